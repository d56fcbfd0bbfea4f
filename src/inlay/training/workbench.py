"""A host opened for a task, and everything that training or using it there needs.

    bench = Workbench.open("bert-base-uncased", task)
    name = bench.set_up("rte", "inlay", method=Pfeiffer())
    codec = bench.codec(max_length=256)
    bench.for_task(other)          the same host and tokenizer, for a task of another kind

mode      trains                                  frozen
inlay     the inlay's modules and its head        the host
fusion    the fusion and its head                 the host and every member
head      a head                                  the host
full      the host and a head                     nothing
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import read_manifest
from inlay.compose.fuse import add_fusion
from inlay.data.task import Task
from inlay.errors import CheckpointError, ConfigError, InlayError, SetupError, first_line
from inlay.host.heads import CHOICE, SPAN, Head
from inlay.host.registry import Inlay
from inlay.host.verbs import add, inlays_of, train
from inlay.methods.base import Method
from inlay.methods.head import HeadOnly
from inlay.training.codec import STRIDE, AnswerForm, Codec, answer_form, is_decoder
from inlay.training.label_words import label_words
from inlay.training.recipe import Mode
from inlay.training.tokens import positions_of

Pooling = Literal["first", "mean", "last", "host"]


def open_config(name: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the host with this name or folder; Python code of the host's own runs only if trusted."""
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse_remote_code(name, error)
        raise InlayError(
            f"no host {name!r}: neither a folder with a config.json nor a model that the hub would give. "
            f"{first_line(error)}"
        ) from None


@dataclass(frozen=True)
class Workbench:
    """A host and its tokenizer, opened once, and the task at hand."""

    host: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    form: AnswerForm
    """How the host answers this task."""

    @classmethod
    def open(
        cls, name: str, task: Task, config: PreTrainedConfig | None = None, *, trust_remote_code: bool = False
    ) -> Workbench:
        """Open a host by its name or folder; `config` is its configuration, where that has been opened already."""
        trust = {"trust_remote_code": trust_remote_code}
        config = copy.deepcopy(config) if config is not None else open_config(name, **trust)
        form = answer_form(task, config)
        if form == "labels":
            config.num_labels = max(1, len(task.labels))
        try:
            host = _class_for(form, config).from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # a head for other labels
                **trust,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, config=config, **trust)
        except (OSError, ValueError) as error:
            _refuse_remote_code(name, error)
            raise InlayError(f"the host {name!r} cannot be opened for {task.kind}: {first_line(error)}") from None
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if host.config.get_text_config().pad_token_id is None:
            host.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        return cls(host, tokenizer, task, form)

    def for_task(self, task: Task) -> Workbench:
        """The same host and tokenizer for another task. Its inlays stay, and each has its own head."""
        form = answer_form(task, self.host.config)
        if form != self.form:
            raise InlayError(
                f"this host was opened to answer with {self.form}, but {task.name} ({task.kind}) needs {form}. "
                f"Open another host for it."
            )
        return replace(self, task=task)

    def codec(self, max_length: int = 256, stride: int = STRIDE) -> Codec:
        """Between the task and the host; inputs are cut at `max_length` tokens, or earlier if the host needs it.

        stride: tokens that the windows of a long context share (kind spans), which is read whole.
        """
        decoder = self.form == "text" and not self.host.config.is_encoder_decoder
        worded = self.task.answer_with == "words"
        words = label_words(self.task, self.tokenizer, "decoder" if decoder else self.form) if worded else None
        return Codec(
            self.task, self.form, self.tokenizer, self.longest_input(max_length), stride, decoder=decoder, words=words
        )  # fmt: skip

    def longest_input(self, wanted: int) -> int:
        """The most tokens that the host, its tokenizer and the user allow."""
        return longest_input(self.host.config, self.tokenizer, wanted)

    def head(self, layers: int = 1, dropout: float = 0.1, pooling: Pooling | None = None) -> Head | None:
        """A new head for the task: mean pooling, or the last token of decoders; hosts that answer in text have none.

        Tags and spans have logits for every token.
        pooling: another way to pool; 'host' copies the host's own head.
        """
        if self.form != "labels":
            return None
        how: Any = pooling or ("last" if is_decoder(self.host.config) else "mean")
        if self.task.kind in ("tags", "spans"):
            if pooling is not None:
                raise ConfigError(
                    f"pooling is {pooling!r}, but {self.task.kind} have logits for every token. Leave it out."
                )
            how = "tokens"
        elif how == "host" or self.host.config.is_encoder_decoder:
            how, layers = None, 1  # encoder-decoders pick a token of the decoder's themselves
        return Head(
            labels=self._outputs(), pooling=how, layers=layers, dropout=dropout,
            problem="multi_label_classification" if self.task.kind == "multilabel" else None,
        )  # fmt: skip

    def _outputs(self) -> tuple[str, ...] | int:
        """The names of a head's outputs for the task."""
        return {"choice": CHOICE, "spans": SPAN}.get(self.task.kind, self.task.labels) or 1

    def check_head(self, name: str) -> None:
        """Refuse an inlay whose own head was made for another kind of task, or for other labels."""
        head, wanted = inlays_of(self.host)[name].head, self.head()
        if head is None or wanted is None or head.names is None or wanted.names is None:
            return
        problems = []
        if head.per_token != wanted.per_token:
            problems.append(f"its head answers per {'token' if head.per_token else 'text'}, {self.task.kind} does not")
        if len(head.names) != len(wanted.names):
            problems.append(
                f"the task {self.task.name!r} has {len(wanted.names)} labels ({', '.join(wanted.names)}), "
                f"its head {len(head.names)} ({', '.join(head.names)})"
            )
        if problems:
            raise CheckpointError(f"{name!r} cannot answer {self.task.name!r}: {'; '.join(problems)}.")

    def set_up(
        self,
        name: str,
        mode: Mode,
        *,
        method: Method | None = None,
        members: Sequence[Path] = (),
        head: Head | None = None,
        norms: bool | None = None,
        fusion: Mapping[str, Any] | None = None,
        any_host: bool = False,
    ) -> str | None:
        """Set into the host what the mode trains, and let only that train. Returns the inlay's name, if there is one.

        head:     its head; without it `self.head()`.
        norms:    whether it owns the host's norms. None: as the method says; a fusion as its members, who must agree.
        fusion:   settings of a fusion, as `inlay.add_fusion` takes them.
        any_host: take members also of a host with other weights.
        """
        host, head = self.host, head or self.head()
        if mode == "inlay":
            if method is None:
                raise ConfigError("mode 'inlay' needs a method, for instance 'pfeiffer'.")
            add(host, name, method, head=head, norms=norms, tokenizer=self.tokenizer)
        elif mode == "fusion":
            if len(members) < 2:
                raise ConfigError(f"a fusion needs at least two members, got {len(members)}.")
            names, same = _load_members(host, members, name, head, any_host)
            if norms is None:
                norms = _common_norms(host, names)
            with warnings.catch_warnings():  # what it says of own norms was decided just now
                warnings.filterwarnings("ignore", message=".*own norms do not act inside a fusion")
                add_fusion(host, name, names, head=None if same else head, norms=norms, **(fusion or {}))
        elif head is not None:
            add(host, name, HeadOnly(), head=head)
        elif mode == "head":
            raise ConfigError(
                "this host answers in text with the head it was trained with; there is no head to train alone."
            )
        if mode == "full":
            return _train_everything(host, name if head is not None else None)
        train(host, name)
        return name


def longest_input(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """The most tokens that a host, its tokenizer and the user allow."""
    limits = [wanted, int(min(tokenizer.model_max_length, 1 << 30))]
    positions = positions_of(config)
    return min(limits if positions is None else [*limits, positions])


def _class_for(form: AnswerForm, config: PreTrainedConfig) -> Any:
    """The transformers class that opens a host for a form of answer."""
    if form == "labels":
        return transformers.AutoModelForSequenceClassification
    if form == "mask":
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def _load_members(
    host: PreTrainedModel, members: Sequence[Path], fusion: str, head: Head | None, any_host: bool = False
) -> tuple[list[str], bool]:
    """Set members into the host without their heads, under names that differ; whatever does not fit is said at once.

    The last one, the target's own, brings its head if that has the same outputs: a fusion starts with it then. Returns
    the names, and whether it did.
    """
    names: list[str] = []
    problems: list[str] = []
    same = False
    for member in members:
        manifest = read_manifest(member)
        own = manifest.name
        numbered = (own if number == 1 else f"{own[:60]}-{number}" for number in count(1))
        free = (name for name in numbered if name not in (*names, fusion))
        same = member == members[-1] and head is not None and _has_outputs(manifest.head, head)
        try:
            names.append(str(load(host, member, name=next(free), head=same, any_host=any_host)))
        except InlayError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return names, same


def _has_outputs(saved: dict[str, Any] | None, head: Head) -> bool:
    """Whether a saved head answers what a new one would. Choice heads of earlier versions named no outputs."""
    own = Head(**saved) if saved is not None else None
    if own is None or own.per_token != head.per_token:
        return False
    if own.names == head.names:
        return own.problem_type == head.problem_type
    return bool(own.names is None and own.pooling is not None and head.names == CHOICE)


def _common_norms(host: PreTrainedModel, members: Sequence[str]) -> bool:
    """Whether a fusion owns norms: it does if members do. Theirs must be equal, as a host has one set at a time."""
    inlays = inlays_of(host)
    owners = [inlays[member] for member in members if inlays[member].norms]
    if not owners:
        return False
    places = list(inlays.anatomy.of_kind("norm"))

    def norms_of(inlay: Inlay) -> list[torch.Tensor]:
        modules = [inlay.part(place) or host.get_submodule(place.module) for place in places]
        return [tensor for module in modules for tensor in module.state_dict().values()]

    last = inlays[members[-1]]
    other = [
        m for m in members
        if any(not torch.equal(a, b) for a, b in zip(norms_of(inlays[m]), norms_of(last), strict=True))
    ]  # fmt: skip
    if other:
        owns = {True: "its own", False: "the host's"}
        told = ", ".join(f"{m} has {owns[inlays[m].norms]}" for m in members)
        raise SetupError(
            f"the members' norms differ ({told}), and a fusion has one set of norms. Train the members without norms "
            f"of their own, or say norms=True (those of the last member) or norms=False (the host's)."
        )
    return True


def _train_everything(host: PreTrainedModel, name: str | None) -> str | None:
    """The whole host and the own head. What the own head stands in for does not train: no gradient reaches it."""
    quantizer: Any = getattr(host, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_serializable():  # transformers would say so after the last step
        kind = getattr(quantizer.quantization_config.quant_method, "value", "quantized")
        raise ConfigError(
            f"this host is opened as {kind}, which cannot be saved, so that training all of it would be lost. Train an "
            f"inlay; or take `quantization_config` out of its config.json, if its weights are plain ones."
        )
    if name is None:
        host.requires_grad_(True).train()
        return None
    train(host, name, host_too=True)
    return name


def _refuse_remote_code(name: str, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        raise InlayError(
            f"the host {name!r} runs Python code of its own, which is refused. If you trust it: `trust_remote_code`, "
            f"or trust_remote_code=True."
        ) from None
