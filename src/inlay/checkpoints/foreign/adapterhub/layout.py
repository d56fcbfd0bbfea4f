"""Where the `adapters` library keeps its modules in each model family, and what it calls their tensors.

    <base model>.encoder.layer.0 . output . adapters.<name> . adapter_down.0.weight
    ────────── layer ───────────   module                     ─────── leaf ────────

A new family is one entry in `LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy, family_of
from inlay.checkpoints.foreign.keys import FileKey
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, key_of
from inlay.methods import PHM, Fusion, LoRA, Method

Pooling = Literal["first", "last"]


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

    def module(self, place: Place) -> str:
        """The module of a layer that holds the adapters for a place."""
        if place.kind.startswith("attention"):
            return self.attention
        return self.decoder_ffn if self.decoder_ffn and place.stack == "decoder" else self.ffn


def _bert(flexible: str) -> Layout:
    return Layout("attention.output", "output", flexible=flexible, attention_dropout="attention_probs_dropout_prob")


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
    "distilbert": _beside("attention_dropout", "DistilBertAdapterModel"),
    "bart": _beside("attention_dropout"),
    "t5": _t5("dropout_rate"),
    "mt5": _t5(None),
    "gpt2": _beside("attn_pdrop", "GPT2AdapterModel", "last"),
    "llama": _llama("LlamaAdapterModel"),
    "mistral": _llama("MistralAdapterModel"),
}

_KRONECKER = {"left": "W_left", "right": "W_right", "blocks": "W", "bias": "b", "own.rule": "phm_rule"}
_LORA = {"down.weight": "lora_A", "up.weight": "lora_B"}


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
        found = {
            f"shared.{leaf}": FileKey(f"{self.prefix}shared_parameters.{self.name}.phm_{leaf}")
            for leaf in inlay.shared.state_dict()
        }
        places = [place for place in map(self.anatomy.places.__getitem__, inlay.place_ids()) if place.kind != "head"]
        for place in places:
            for leaf in inlay.parts[key_of(place.id)].state_dict():
                if isinstance(inlay.method, Fusion):
                    entry = self.fusion(place, leaf)
                elif isinstance(inlay.method, LoRA):
                    entry = self.lora(place, leaf, places)
                else:
                    entry = self.bottleneck(place, leaf, inlay.method)
                found[f"{place.id}.{leaf}"] = entry
        return found

    def fusion(self, place: Place, leaf: str) -> FileKey:
        return FileKey(f"{self.module(place)}.adapter_fusion_layer.{self.name}.{leaf}")

    def bottleneck(self, place: Place, leaf: str, method: Method) -> FileKey:
        module = f"{self.module(place)}.adapters.{self.name}"
        part, _, rest = leaf.partition(".")
        if part == "scale":
            return FileKey(f"{module}.scaling")
        if part == "norm":  # they register it twice
            return FileKey(f"{module}.adapter_norm_before.{rest}", copy=f"{module}.adapter_down.0.{rest}")
        down = "adapter_down.1" if getattr(method, "own_norm", False) else "adapter_down.0"
        theirs = _KRONECKER[rest] if isinstance(method, PHM) else rest
        return FileKey(f"{module}.{down if part == 'down' else 'adapter_up'}.{theirs}")

    def lora(self, place: Place, leaf: str, places: Sequence[Place]) -> FileKey:
        module = place.module.removeprefix(f"{self.anatomy.base}.")
        together = [other.id for other in places if other.module == place.module]  # q, k, v of a fused module
        return FileKey(
            f"{self.prefix}{module}.loras.{self.name}.{_LORA[leaf]}", together.index(place.id), len(together)
        )
