"""Heads of an inlay's own: a copy of the host's with other labels, or one that pools the hidden states itself.

Head(labels=["yes", "no"])                              a copy of the host's head with two outputs
Head(labels=3, pooling="mean", layers=2)                mean over real tokens ── [dropout, D→D, tanh] ── dropout, D→3
Head(labels=["O", "B-PER"], pooling="tokens")           every token by itself ── dropout, D→2

One host serves every kind of task, because the head belongs to the inlay:

    asks for              head                                                      logits
    a label               Head(labels=names, pooling="mean")                        (B, labels)
    a number              Head(labels=1, pooling="mean")                            (B, 1)
    several labels        the same with problem="multi_label_classification"        (B, labels)
    one of some choices   Head(labels=CHOICE, pooling="mean"), a text per choice    (B · choices, 1)
    a label per token     Head(labels=names, pooling="tokens")                      (B, T, labels)
    a span                Head(labels=SPAN, pooling="tokens")                       (B, T, 2)
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from inlay.anatomy.modules import last_linear
from inlay.anatomy.survey import Anatomy
from inlay.config import Config
from inlay.errors import ConfigError
from inlay.host.offload import in_pieces, present, quantised
from inlay.methods.acting import check_mask
from inlay.methods.bottleneck import known_activation

FIXED = ("ForMultipleChoice", "ForQuestionAnswering", "ForPreTraining", "ForNextSentencePrediction")
"""Hosts whose forward counts on the number of outputs that their head has; language models do too."""
PER_TEXT = ("ForSequenceClassification", "ForMultipleChoice")
PER_TOKEN = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Hosts that can carry a pooling head; the first of them carries every kind."""
CHOICE = ("choice",)
"""The one output of a choice head: how well a choice fits its row."""
SPAN = ("start", "end")
"""The two outputs per token of a head that marks a span."""
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


class Head(Config):
    """A head that acts only while its inlay is active.

    While it does, the host's config shows its labels, for losses and pipelines. `host.save_pretrained` still writes the
    host's own head and labels.
    """

    labels: int | tuple[str, ...] | None = None
    """The label names, or how many there are; None keeps the host's outputs. One output means regression."""
    pooling: Literal["first", "mean", "last", "tokens"] | None = None
    """None copies the host's head. Otherwise how real tokens become one vector; 'tokens': each has its own logits."""
    layers: int = Field(default=1, ge=1, le=64)
    """Linear layers of a pooling head."""
    activation: str = "tanh"
    """Between the layers of a pooling head."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Before each layer of a pooling head."""
    problem: Problem | None = None
    """The loss that transformers computes when it is given labels; None: by the number of labels."""
    choices: int | None = Field(default=None, ge=2)
    """A choice head, labels=CHOICE: how many choices every row has. Only `adapters` asks for it, at the export."""

    @field_validator("labels", mode="before")
    @classmethod
    def _names(cls, labels: Any) -> Any:
        if isinstance(labels, list | tuple) and not all(isinstance(label, str) for label in labels):
            raise ValueError("labels are names (texts), or the number of them")
        return tuple(labels) if isinstance(labels, list) else labels

    @field_validator("labels")
    @classmethod
    def _sensible(cls, labels: int | tuple[str, ...] | None) -> int | tuple[str, ...] | None:
        if labels is not None and (labels < 1 if isinstance(labels, int) else not labels):
            raise ValueError("a head needs at least one label")
        if isinstance(labels, int) and labels > 1_000_000:
            raise ValueError("a head has at most a million labels")
        if isinstance(labels, tuple) and len(set(labels)) != len(labels):
            raise ValueError("label names must differ from each other")
        return labels

    _known_activation = field_validator("activation")(known_activation)

    @model_validator(mode="after")
    def _layers_only_when_pooling(self) -> Head:
        if self.pooling is None and self.layers != 1:
            raise ValueError("layers describe a pooling head; set pooling to 'first', 'mean', 'last' or 'tokens'")
        return self

    @model_validator(mode="after")
    def _choices_of_a_choice_head(self) -> Head:
        if self.choices is not None and self.names != CHOICE:
            raise ValueError(f"choices belong to a head with the one output {CHOICE[0]!r}: labels={CHOICE!r}")
        return self

    @model_validator(mode="after")
    def _classes_to_choose_from(self) -> Head:
        if self.problem == "single_label_classification" and self.names is not None and len(self.names) == 1:
            raise ValueError("one label leaves nothing to choose; use two labels, or problem='regression'")
        return self

    def described(self) -> dict[str, Any]:
        """As a manifest has it; how many choices there are only where that was said."""
        return self.model_dump(mode="json", exclude={"choices"} if self.choices is None else None)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The label names; None when the head keeps the host's outputs."""
        if isinstance(self.labels, int):
            return tuple(f"LABEL_{i}" for i in range(self.labels))
        return self.labels

    @property
    def per_token(self) -> bool:
        """Whether every token has logits of its own."""
        return self.pooling == "tokens"

    @property
    def problem_type(self) -> Problem | None:
        if self.problem is not None or self.names is None:
            return self.problem
        return "regression" if len(self.names) == 1 else "single_label_classification"


class PooledHead(nn.Module):
    """Pool the hidden states over real tokens, or leave them as they are, then one or more linear layers."""

    def __init__(self, width: int, outputs: int, head: Head) -> None:
        super().__init__()
        self.pooling = head.pooling
        hidden = [
            part for _ in range(head.layers - 1)
            for part in (nn.Dropout(head.dropout), nn.Linear(width, width), ACT2FN[head.activation])
        ]  # fmt: skip
        self.layers = nn.Sequential(*hidden, nn.Dropout(head.dropout), nn.Linear(width, outputs))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                start(layer)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, D), (B, T) → (B, labels), or (B, T, labels) where every token counts by itself."""
        return self.layers(hidden if self.pooling == "tokens" else pool(hidden, mask, self.pooling))


def pool(hidden: Tensor, mask: Tensor | None, pooling: str | None) -> Tensor:
    """(B, T, D) to (B, D), over the tokens where mask is 1."""
    if mask is None:
        mask = torch.ones(hidden.shape[:2], device=hidden.device)
    check_mask(mask)
    mask = mask.to(hidden.device).reshape(-1, mask.shape[-1])  # multiple choice: (B, choices, T)
    if pooling == "mean":
        weights = mask.unsqueeze(-1).float()  # in float32: the sum of a long text overflows in float16
        return ((hidden * weights).sum(1) / weights.sum(1).clamp(min=1)).to(hidden.dtype)
    real = mask.to(torch.int64)
    at = real.argmax(-1) if pooling == "first" else mask.shape[-1] - 1 - real.flip(-1).argmax(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), at]


def start(linear: nn.Linear, std: float = 0.02) -> None:
    """The usual start of a new output layer."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def build_head(host: PreTrainedModel, anatomy: Anatomy, head: Head) -> dict[str, nn.Module]:
    """The modules of an own head by the place they stand in for."""
    kind = type(host).__name__
    if not anatomy.head:
        raise ConfigError(
            f"{kind} has no head. Load the host with AutoModelForSequenceClassification or another model with a head."
        )
    ids = [place.id for place in anatomy.of_kind("head")]
    last = host.get_submodule(anatomy.head[-1])
    if head.names is not None and (kind.endswith(FIXED) or host.get_output_embeddings() is not None):
        _check_outputs(len(head.names), _last_linear(last, kind)[1].out_features, kind)
    if head.pooling is None:
        weights = [weight for path in anatomy.head for weight in host.get_submodule(path).parameters()]
        if any(map(quantised, weights)):
            raise ConfigError(
                f"the head of this {kind} is quantised, so that a copy of it cannot learn. Give the inlay a head that "
                f"pools by itself, Head(pooling=…), or leave the host's head out of the quantisation."
            )
        if any(map(in_pieces, weights)):
            raise ConfigError(
                f"of the head of this {kind} each process has a piece, so it cannot be copied. Give the inlay a head "
                f"that pools by itself, Head(pooling=…); with FSDP, set inlays in before the host is sharded."
            )
        copies = [bare_copy(host.get_submodule(path)) for path in anatomy.head]
        if head.names is not None:
            copies[-1] = _with_outputs(copies[-1], len(head.names), kind)
        return dict(zip(ids, copies, strict=True))
    _check_pooling(head, kind)
    outputs = _last_linear(last, kind)[1].out_features if head.names is None else len(head.names)
    width = getattr(host.config, "word_embed_proj_dim", anatomy.width)  # OPT-350m makes its last hidden states narrower
    return {ids[-1]: PooledHead(width, outputs, head)}


def _check_outputs(wanted: int, there: int, kind: str) -> None:
    """Refuse another number of labels where the host's forward counts on the outputs that its head has."""
    if wanted != there:
        raise ConfigError(
            f"{kind} cannot have {wanted} labels: its outputs are words, choices or positions. "
            f"Leave labels out to copy the host's own head, or use AutoModelForSequenceClassification."
        )


def _check_pooling(head: Head, kind: str) -> None:
    """Refuse a pooling head whose logits are not those that the host's class works with."""
    if head.per_token and kind.endswith("ForMultipleChoice"):
        raise ConfigError(
            f"pooling='tokens' gives logits for every token, but {kind} needs one number per text. "
            f"Use AutoModelForSequenceClassification, which carries heads of every kind."
        )
    if not kind.endswith(PER_TOKEN if head.per_token else PER_TEXT):
        raise ConfigError(
            f"pooling={head.pooling!r} gives logits per {'token' if head.per_token else 'text'}, but {kind} needs "
            f"{'words' if head.per_token else 'one per token'}. "
            f"Leave pooling out to copy the host's own head, or use AutoModelForSequenceClassification."
        )


def _last_linear(module: nn.Module, kind: str) -> tuple[str, nn.Linear]:
    found = last_linear(module)
    if found is None:
        raise ConfigError(
            f"the head of {kind} ends in {type(module).__name__}, which has no linear layer to give other labels."
        )
    return found


def _with_outputs(module: nn.Module, outputs: int, kind: str) -> nn.Module:
    """The copied head with a fresh last layer of that many outputs."""
    name, old = _last_linear(module, kind)
    new = nn.Linear(
        old.in_features, outputs, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
    )
    start(new)
    if not name:
        return new
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, new)
    return module


def bare_copy(module: nn.Module) -> nn.Module:
    """A deep copy without the hooks, which belong to the original."""
    kept = {m: (m._forward_hooks, m._forward_pre_hooks) for m in module.modules()}
    try:
        for m in kept:
            m._forward_hooks, m._forward_pre_hooks = OrderedDict(), OrderedDict()
        with present(module):
            return copy.deepcopy(module).requires_grad_(True)
    finally:
        for m, (after, before) in kept.items():
            m._forward_hooks, m._forward_pre_hooks = after, before
