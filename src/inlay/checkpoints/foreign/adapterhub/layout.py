"""Where the `adapters` library keeps its modules in each model family, and what it calls their tensors.

    <base model>.encoder.layer.0 . output . adapters.<name> . adapter_down.0.weight
    ────────── layer ───────────   module                     ─────── leaf ────────

A new family is one entry in `LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy, family_of
from inlay.checkpoints.foreign.keys import FileKey
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, key_of
from inlay.methods import IA3, PHM, Fusion, LoRA, Method, Prefix, UniPELT

Pooling = Literal["first", "last"]


PREFIXES = {"encoder": "encoder_prefix", "decoder": "self_prefix", "cross": "cross_prefix"}


@dataclass(frozen=True)
class Layout:
    """One model family as `adapters` sees it; names are relative to a layer."""

    attention: str
    ffn: str
    decoder_ffn: str | None = None
    """Where it differs in the decoder."""
    intermediate: tuple[str, ...] = ("ffn_in",)
    """What `intermediate_lora` changes: roles, or the ends of module names where a role has several modules."""
    output: tuple[str, ...] = ("ffn_out",)
    flexible: str | None = None
    """The class with heads of the library's own; None: Inlay has no counterpart of the token they read."""
    pooling: Pooling = "first"
    """The token that such a head reads."""
    attention_dropout: str | None = None
    """The setting of the host that a fusion takes its dropout from; None: it has none."""
    prefixes: Mapping[str, str] = field(default_factory=lambda: dict(PREFIXES))
    """What the prefixes of a stack, or those of cross-attention, are called."""

    def module(self, place: Place) -> str:
        """The module of a layer that holds the adapters for a place."""
        if place.kind.startswith("attention"):
            return self.attention
        return self.decoder_ffn if self.decoder_ffn and place.stack == "decoder" else self.ffn


def _bert(flexible: str) -> Layout:
    dropout = "attention_probs_dropout_prob"
    return Layout(
        "attention.output", "output", flexible=flexible, attention_dropout=dropout, prefixes={"encoder": "self_prefix"}
    )


def _beside(dropout: str | None, flexible: str | None = None, pooling: Pooling = "first") -> Layout:
    return Layout(
        "attention_adapters", "output_adapters", flexible=flexible, pooling=pooling, attention_dropout=dropout
    )


def _llama(flexible: str) -> Layout:
    """In `adapters`, intermediate_lora is on Llama's down_proj and output_lora on its up_proj, against their names."""
    return replace(_beside(None, flexible, "last"), intermediate=("mlp.down_proj",), output=("mlp.up_proj",))


def _t5(dropout: str | None) -> Layout:
    intermediate = ("DenseReluDense.wi", "DenseReluDense.wi_1")
    return Layout("layer.0", "layer.1", "layer.2", intermediate=intermediate, attention_dropout=dropout)


LAYOUTS: Mapping[str, Layout] = {
    "bert": _bert("BertAdapterModel"),
    "roberta": _bert("RobertaAdapterModel"),
    "xlm-roberta": _bert("XLMRobertaAdapterModel"),
    "electra": _bert("ElectraAdapterModel"),
    "distilbert": replace(_beside("attention_dropout", "DistilBertAdapterModel"), prefixes={"encoder": "self"}),
    "bart": _beside("attention_dropout"),
    "t5": _t5("dropout_rate"),
    "mt5": _t5(None),
    "gpt2": _beside("attn_pdrop", "GPT2AdapterModel", "last"),
    "llama": _llama("LlamaAdapterModel"),
    "mistral": _llama("MistralAdapterModel"),
}

_KRONECKER = {"left": "W_left", "right": "W_right", "blocks": "W", "bias": "b", "own.rule": "phm_rule"}
_LORA = {"down.weight": "lora_A", "up.weight": "lora_B"}
_PREFIX = {
    "embedding": "wte.weight", "inner.weight": "control_trans.0.weight", "inner.bias": "control_trans.0.bias",
    "table.weight": "control_trans", "table.out.weight": "control_trans.2.weight",
    "table.out.bias": "control_trans.2.bias",
}  # fmt: skip


def layout_of(anatomy: Anatomy) -> Layout:
    if anatomy.family not in LAYOUTS:
        raise ConfigError(
            f"Inlay does not know where `adapters` keeps its modules in {anatomy.family} hosts. "
            f"Known: {', '.join(LAYOUTS)}."
        )
    return LAYOUTS[anatomy.family]


def layer_numbers(anatomy: Anatomy) -> list[str]:
    """Our name of each layer by their number: encoder first, then decoder."""
    return [f"{stack}.{index}" for stack, depth in anatomy.depth.items() for index in range(depth)]


class Keys:
    """Their keys for the tensors of one inlay."""

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, name: str, prefixed: bool = True) -> None:
        self.anatomy = anatomy
        self.layout = layout_of(anatomy)
        self.name = name
        self.prefix = f"{host.base_model_prefix}." if prefixed else ""
        self.layers = {stack: layers.path for stack, layers in family_of(host).stacks.items()}

    def module(self, place: Place) -> str:
        return f"{self.prefix}{self.layers[place.stack]}.{place.layer}.{self.layout.module(place)}"

    def table(self, inlay: Inlay) -> dict[str, FileKey]:
        """Their key of every tensor except those of a head."""
        found = {f"shared.{leaf}": self.shared(leaf) for leaf in inlay.shared.state_dict()}
        places = [place for place in map(self.anatomy.places.__getitem__, inlay.place_ids()) if place.kind != "head"]
        for place in places:
            for leaf in inlay.parts[key_of(place.id)].state_dict():
                found[f"{place.id}.{leaf}"] = self.entry(place, leaf, inlay.method, places)
        return found

    def entry(self, place: Place, leaf: str, method: Method, places: Sequence[Place]) -> FileKey:
        if isinstance(method, UniPELT):
            if leaf.startswith("gate."):
                return self.gate(place, leaf.removeprefix("gate.linear."))
            leaf, method = leaf.removeprefix("part."), method.part_at(place)
        if isinstance(method, Fusion):
            return self.fusion(place, leaf)
        if isinstance(method, LoRA | IA3):
            return self.lora(place, leaf, places)
        if isinstance(method, Prefix):
            return self.prefixed(place, leaf, places)
        return self.bottleneck(place, leaf, method)

    def shared(self, leaf: str) -> FileKey:
        """A PHM rule, or what makes the prefixes of a stack: `encoder.inner.weight`."""
        where, _, rest = leaf.partition(".")
        if rest in _PREFIX:
            return self.pooled(where, _PREFIX[rest])
        return FileKey(f"{self.prefix}shared_parameters.{self.name}.phm_{leaf}")

    def pooled(self, where: str, leaf: str, share: int = 0, shares: int = 1) -> FileKey:
        """What all layers of a stack have together. They write it once for themselves and once for each attention."""
        rest = f"prefix_tunings.{self.name}.{self.layout.prefixes[where]}.{leaf}"
        attentions = [self.below(place) for place in self.anatomy.of_kind("self_attention", "cross_attention")]
        return FileKey(
            f"{self.prefix}prefix_tuning.{rest}", share, shares,
            copies=tuple(f"{module}.prefix_tuning.pool.{rest}" for module in attentions),
            form="side by side" if leaf == "control_trans" else "rows",
        )  # fmt: skip

    def below(self, place: Place) -> str:
        """A place's module, as they name it."""
        return self.prefix + place.module.removeprefix(f"{self.anatomy.base}.")

    def prefixed(self, place: Place, leaf: str, places: Sequence[Place]) -> FileKey:
        alike = [p.id for p in places if (p.kind, p.stack) == (place.kind, place.stack)]
        where = place.stack if place.kind == "self_attention" else "cross"
        return self.pooled(where, _PREFIX[leaf], alike.index(place.id), len(alike))

    def gate(self, place: Place, leaf: str) -> FileKey:
        if place.acts == "keys":
            return FileKey(f"{self.below(place)}.prefix_tuning.prefix_gates.{self.name}.{leaf}")
        if place.projection is not None:
            return FileKey(f"{self.below(place)}.loras.{self.name}.gate.{leaf}")
        return FileKey(f"{self.module(place)}.adapters.{self.name}.gate.{leaf}")

    def fusion(self, place: Place, leaf: str) -> FileKey:
        return FileKey(f"{self.module(place)}.adapter_fusion_layer.{self.name}.{leaf}")

    def bottleneck(self, place: Place, leaf: str, method: Method) -> FileKey:
        module = f"{self.module(place)}.adapters.{self.name}"
        part, _, rest = leaf.partition(".")
        if part == "scale":
            return FileKey(f"{module}.scaling")
        if part == "norm":  # they register it twice
            return FileKey(f"{module}.adapter_norm_before.{rest}", copies=(f"{module}.adapter_down.0.{rest}",))
        down = "adapter_down.1" if getattr(method, "own_norm", False) else "adapter_down.0"
        theirs = _KRONECKER[rest] if isinstance(method, PHM) else rest
        return FileKey(f"{module}.{down if part == 'down' else 'adapter_up'}.{theirs}")

    def lora(self, place: Place, leaf: str, places: Sequence[Place]) -> FileKey:
        together = [other.id for other in places if other.module == place.module]  # q, k, v of a fused module
        key, share, shares = f"{self.below(place)}.loras.{self.name}", together.index(place.id), len(together)
        if leaf == "scale.weight":  # IA3: a LoRA that has no A and multiplies
            return FileKey(f"{key}.lora_B", share, shares, form="column")
        return FileKey(f"{key}.{_LORA[leaf]}", share, shares)
