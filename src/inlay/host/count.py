"""How large an inlay will be, before there is one: trainable parameters, share of the host, bytes on disk.

What is counted is what `add` would make: of a config, on the meta device, so that no weights are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from inlay.anatomy.modules import ATTRIBUTE
from inlay.anatomy.survey import Anatomy
from inlay.errors import ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay, Inlays, id_of
from inlay.host.verbs import bare
from inlay.methods.base import Method

_T5: dict[str, Any] = {"decoder_start_token_id": 0, "vocab_size": 32128}
NAMED_HOSTS: Mapping[str, PreTrainedConfig] = {
    "bert-base": transformers.BertConfig(),
    "bert-large": transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    "roberta-base": transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
    "roberta-large": transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1,
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    "t5-small": transformers.T5Config(**_T5),
    "t5-base": transformers.T5Config(**_T5, d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "t5-large": transformers.T5Config(**_T5, d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "gpt2": transformers.GPT2Config(),
    "gpt2-medium": transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16),
}  # fmt: skip


@dataclass(frozen=True)
class Count:
    """What an inlay of some method would hold on some host."""

    trainable: int
    host: int
    by_site: dict[str, int] = field(default_factory=dict)
    """Parameters by the kind of place: attention, ffn, norm, head, shared …"""
    bytes: int = 0
    """Size of the saved tensors."""
    closed_form: str | None = None
    """The paper's formula for the weights alone, without norms and biases, and its value."""

    @property
    def percent(self) -> float:
        return 100 * self.trainable / self.host

    def __str__(self) -> str:
        lines = [f"{'trainable':<12} {self.trainable:>14,}   {self.percent:.3f} % of {self.host:,}"]
        lines += [f"  {kind:<10} {count:>14,}" for kind, count in self.by_site.items()]
        lines.append(f"{'on disk':<12} {self.bytes / 1024:>14,.1f} KB")
        if self.closed_form:
            lines.append(f"{'closed form':<12} {self.closed_form}")
        return "\n".join(lines)


def count(
    host: nn.Module | PreTrainedConfig, method: Method, *, head: Head | None = None, norms: bool | None = None,
    model: type[Any] | None = None,
) -> Count:  # fmt: skip
    """Trainable parameters of an inlay on a host, or on a host that only its config describes.

    model: the class that a config stands for, such as AutoModelForSequenceClassification: methods that reach into the
           head, as BitFit does in a pooler, depend on it. Without it the base model, or with a head a classifier.
    """
    if model is not None and not isinstance(host, PreTrainedConfig):
        raise ConfigError("model says what class a config stands for; a host has its class already. Leave it out.")
    if not isinstance(method, Method):
        raise ConfigError(f"a method is an object such as inlay.Pfeiffer(reduction=16), got {method!r}")
    counted = without_weights(host, head, model) if isinstance(host, PreTrainedConfig) else bare(host)
    known: Inlays | None = getattr(counted, ATTRIBUTE, None)
    anatomy = known.anatomy if known is not None else Anatomy(counted)
    with torch.random.fork_rng(devices=[]):  # counting takes nothing from the run's random numbers
        inlay = Inlay("count", method, head, method.owns_norms() if norms is None else norms).fill(counted, anatomy)
    by_site: Counter[str] = Counter()
    for key, part in inlay.parts.items():
        by_site[anatomy.places[id_of(key)].kind.removesuffix(".raw")] += _size(part)
    if any(True for _ in inlay.shared.parameters()):
        by_site["shared"] = _size(inlay.shared)
    ours = {id(p) for p in known.parameters()} if known is not None else set()
    size = sum(p.numel() for p in counted.parameters() if id(p) not in ours)
    stored = sum(t.numel() * t.element_size() for t in inlay.tensors().values())
    places = [place for i in inlay.place_ids() if (place := anatomy.places[i]).changes]
    return Count(sum(by_site.values()), size, dict(by_site), stored, method.closed_form(places))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def without_weights(
    config: PreTrainedConfig, head: Head | None = None, model: type[Any] | None = None, *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """The host that a config describes, on the meta device. Python code of its own runs only if trusted."""
    usual = transformers.AutoModel if head is None else transformers.AutoModelForSequenceClassification
    kind: Any = model or usual
    auto = hasattr(kind, "from_config")
    try:
        with torch.device("meta"):
            made = kind.from_config(config, trust_remote_code=trust_remote_code) if auto else kind(config)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"the model of {type(config).__name__} is Python code of its own, which does not run unasked. Give the "
            f"loaded host instead of its config."
        ) from None
    if not isinstance(made, PreTrainedModel):
        raise ConfigError(
            f"model is a class of transformers, such as AutoModelForSequenceClassification, not {kind!r}."
        )
    return made
