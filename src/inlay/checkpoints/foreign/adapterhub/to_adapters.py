"""Methods of Inlay as options of `adapters`; what those options cannot express is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.adapterhub.layout import layer_numbers, layout_of
from inlay.checkpoints.foreign.adapterhub.options import (
    ACTIVATIONS,
    BottleneckOptions,
    FusionOptions,
    LoraOptions,
    PartOptions,
    PrefixOptions,
)
from inlay.checkpoints.foreign.adapterhub.to_inlay import acting_places, common_reads, fusion_of, method_of
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, Inlays
from inlay.methods import IA3, PHM, Bottleneck, Fusion, LoRA, Method, Prefix, UniPELT

_ATTENTION: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")


def options_of(inlay: Inlay, anatomy: Anatomy) -> list[PartOptions]:
    """Their options for an inlay, one for each part of a UniPELT, or an error that says what they cannot express."""
    method, places = inlay.method, list(acting_places(inlay, anatomy).values())
    if inlay.norms:
        raise ConfigError("it owns layer norms, which `adapters` does not save")
    if isinstance(method, UniPELT):
        _check_gates(method)
        parts = [part for part in (method.prefix, method.bottleneck, method.lora) if part is not None]
        where = [[place for place in places if method.part_at(place) is part] for part in parts]
        options = [
            _gated(_part_options(part, there, anatomy), method) for part, there in zip(parts, where, strict=True)
        ]
    else:
        options = [_part_options(method, places, anatomy)]
    theirs = {place.id.removesuffix(".raw") for place in method_of(options, anatomy).places(anatomy)}
    if theirs != {place.id.removesuffix(".raw") for place in places}:
        odd = ", ".join(sorted(theirs ^ {place.id.removesuffix(".raw") for place in places}))
        raise ConfigError(f"`adapters` cannot say where it acts; its config would differ at {odd}")
    return options


def _part_options(method: Method, places: Sequence[Place], anatomy: Anatomy) -> PartOptions:
    if isinstance(method, LoRA):
        return _lora_options(method, places, anatomy)
    if isinstance(method, IA3):
        return _ia3_options(method, places, anatomy)
    if isinstance(method, Prefix):
        return _prefix_options(method, places, anatomy)
    if isinstance(method, Bottleneck) and method.kind != "lowrank":
        return _bottleneck_options(method, places, anatomy)
    raise ConfigError(f"`adapters` has no counterpart of the method {method.kind!r}")


def _gated(options: PartOptions, method: UniPELT) -> PartOptions:
    gates = {"shared_gating": method.gates == "one"} if isinstance(options, PrefixOptions) else {}
    return options.model_copy(update={"use_gating": True, **gates})


def _check_gates(method: UniPELT) -> None:
    if method.variant == "paper":
        raise ConfigError("its LoRAs share a gate in each layer; in `adapters` every projection has its own")
    if not method.count_padding:
        raise ConfigError(
            "in `adapters` padding counts in every gate's mean, and here it does not: "
            "inlay.UniPELT(count_padding=True, …) does the same as theirs"
        )
    if method.lora is not None and method.lora.alpha != method.lora.rank:
        raise ConfigError("behind a gate a LoRA of `adapters` has no scale alpha / r: it has to have alpha = rank")


def _prefix_options(method: Prefix, places: Sequence[Place], anatomy: Anatomy) -> PrefixOptions:
    if method.shift:
        raise ConfigError("it moves the tokens' positions, which prefixes of `adapters` do not")
    kinds = {(place.kind, place.stack) for place in places}
    return PrefixOptions(
        prefix_length=method.length, flat=not method.reparametrised, bottleneck_size=method.hidden,
        encoder_prefix=("self_attention", "encoder") in kinds, leave_out=_left_out(places, anatomy),
        cross_prefix=any(kind == "cross_attention" for kind, _ in kinds),
    )  # fmt: skip


def _ia3_options(method: IA3, places: Sequence[Place], anatomy: Anatomy) -> LoraOptions:
    if method.inputs:
        raise ConfigError(
            "it rescales the FFN's inner activations, and `adapters` what its first projection gives, before the "
            "activation: inlay.IA3(outputs=('k', 'v', 'cross_k', 'cross_v', 'ffn_in'), inputs=()) does that"
        )
    return LoraOptions(
        r=1, alpha=1, composition_mode="scale", init_weights="ia3", **_where(places, anatomy),
    )  # fmt: skip


def _bottleneck_options(method: Bottleneck, places: Sequence[Place], anatomy: Anatomy) -> BottleneckOptions:
    normed = method.reads == "normed" or (method.reads == "stream" and all(place.norm is None for place in places))
    if method.reads == "stream" and not normed:
        raise ConfigError("it reads the sum before the host's norm, which `adapters` cannot do in a post-LN host")
    fields: dict[str, Any] = {
        "mh_adapter": "attention" in method.sites,
        "output_adapter": "ffn" in method.sites,
        "reduction_factor": _factors(method, places, anatomy),
        "non_linearity": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(
            method.activation, method.activation
        ),
        "original_ln_before": normed,
        "ln_before": method.own_norm,
        "init_weights": "mam_adapter" if method.init == "identity" else "bert",
        "is_parallel": method.reads == "residual",
        "scaling": method.scale,
        "leave_out": _left_out(places, anatomy),
        "dropout": method.dropout,
    }
    if isinstance(method, PHM):
        fields |= {
            "phm_layer": True, "phm_dim": method.n, "factorized_phm_W": method.rank is not None,
            "phm_rank": method.rank or 1,
            "shared_phm_rule": method.share_rule, "learn_phm": method.learn_rule,
        }  # fmt: skip
    return BottleneckOptions(**fields)


def _factors(method: Bottleneck, places: Sequence[Place], anatomy: Anatomy) -> float | dict[str, float]:
    if method.size is None and not isinstance(method.reduction, dict):
        return method.reduction
    layers = layer_numbers(anatomy)
    by_layer = {
        str(layers.index(f"{p.stack}.{p.layer}")): _factor(anatomy.width, method.bottleneck(p, anatomy.width))
        for p in places
    }
    values = set(by_layer.values())
    return values.pop() if len(values) == 1 else {**by_layer, "default": next(iter(by_layer.values()))}


def _factor(width: int, size: int) -> float:
    """A factor for which width // factor is exactly that size."""
    factor = width / size
    return factor if int(width // factor) == size else math.nextafter(factor, 0)


def _left_out(places: Iterable[Place], anatomy: Anatomy) -> tuple[int, ...]:
    there = {f"{place.stack}.{place.layer}" for place in places}
    return tuple(number for number, layer in enumerate(layer_numbers(anatomy)) if layer not in there)


def _lora_options(method: LoRA, places: Sequence[Place], anatomy: Anatomy) -> LoraOptions:
    cannot = {
        "ranks that differ by place": method.ranks, "alphas that differ by place": method.alphas,
        "rank-stabilised scaling": method.rank_stabilised, "trained biases": method.bias != "none",
    }  # fmt: skip
    if any(cannot.values()):
        raise ConfigError(f"`adapters` cannot say {', '.join(what for what, there in cannot.items() if there)}")
    return LoraOptions(r=method.rank, alpha=method.alpha, dropout=method.dropout, **_where(places, anatomy))


def _where(places: Sequence[Place], anatomy: Anatomy) -> dict[str, Any]:
    """Which projections a LoRA or an IA3 changes, in their words."""
    layout, kinds = layout_of(anatomy), {place.kind for place in places}

    def changes(wanted: Sequence[str]) -> bool:
        return any(place.kind == want or place.module.endswith(f".{want}") for place in places for want in wanted)

    return {
        "attn_matrices": tuple(role for role in _ATTENTION if role in kinds), "leave_out": _left_out(places, anatomy),
        "selfattn_lora": bool(set(_ATTENTION) & kinds), "intermediate_lora": changes(layout.intermediate),
        "output_lora": changes(layout.output),
    }  # fmt: skip


def fusion_options(inlay: Inlay, inlays: Inlays, host: PreTrainedModel) -> FusionOptions:
    method = inlay.method
    assert isinstance(method, Fusion)
    if inlay.norms:
        raise ConfigError("it owns layer norms, which `adapters` does not save")
    if method.temperature != 1.0:
        raise ConfigError(
            "its temperature is not 1; `adapters` lets a temperature fall at every call and does not save it"
        )
    reads = common_reads([inlays[member] for member in method.members])
    if method.query == "normed" and reads == "output":
        raise ConfigError(
            "it asks with the normed stream though its members read the branch's output, which `adapters` cannot do"
        )
    options = FusionOptions(
        value=method.value, query_before_ln=method.query == "output" and reads == "normed",
        regularization=method.strength > 0, value_initialized=method.value, dropout_prob=method.dropout or None,
    )  # fmt: skip
    theirs, _ = fusion_of(options, method.members, inlays, host)
    if theirs.sites != method.sites or any(theirs.at(site) != method.at(site) for site in method.sites):
        raise ConfigError(
            "it mixes fewer members or acts at fewer places than its members do, which `adapters` cannot say"
        )
    return options
