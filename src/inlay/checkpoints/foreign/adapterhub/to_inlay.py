"""The options of `adapters` as methods of Inlay."""

from __future__ import annotations

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
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, Inlays
from inlay.methods import (
    IA3,
    PHM,
    Bapna,
    Bottleneck,
    Compacter,
    CompacterPlusPlus,
    Fusion,
    Houlsby,
    LoRA,
    Method,
    Parallel,
    Pfeiffer,
    Prefix,
    UniPELT,
)
from inlay.methods.bottleneck import Wide

MOVED = ("t5", "mt5")
"""Families in which a prefix of theirs moves relative positions."""
_INITS = {"bert": "normal", "mam_adapter": "identity", "houlsby": "normal"}


def method_of(parts: Sequence[PartOptions], anatomy: Anatomy) -> Method:
    """The method of a config, or of the configs of a union."""
    gated = {part.use_gating for part in parts}
    if gated == {True}:
        return unipelt_of(parts, anatomy)
    if len(parts) > 1:
        raise ConfigError(
            "it is a union of several methods in one adapter, of which Inlay reads UniPELT's, each behind a gate; "
            "without gates: inlays of their own in a Stack"
        )
    (only_one,) = parts
    return _part_of(only_one, anatomy)


def _part_of(options: PartOptions, anatomy: Anatomy) -> Method:
    if isinstance(options, PrefixOptions):
        return prefix_of(options, anatomy)
    if isinstance(options, BottleneckOptions):
        return bottleneck_of(options, anatomy)
    return ia3_of(options, anatomy) if options.composition_mode == "scale" else lora_of(options, anatomy)


def prefix_of(options: PrefixOptions, anatomy: Anatomy) -> Prefix:
    if anatomy.family in MOVED:
        raise ConfigError(
            f"in {anatomy.family} hosts `adapters` lets a prefix move the keys' relative positions but not the "
            f"queries', which Inlay does not follow"
        )
    both = set(anatomy.depth) == {"encoder", "decoder"}
    there = {"encoder": options.encoder_prefix or not both, "decoder": True, "cross": both and options.cross_prefix}
    at: Any = tuple(where for where, wanted in there.items() if wanted and where in (*anatomy.depth, "cross"))
    return Prefix(
        length=options.prefix_length, at=at, reparametrised=not options.flat, hidden=options.bottleneck_size,
        leave_out=layers_of(options.leave_out, anatomy),
    )  # fmt: skip


def unipelt_of(parts: Sequence[PartOptions], anatomy: Anatomy) -> UniPELT:
    """Behind a gate their LoRA has no scale alpha / r, and padding counts in every gate's mean."""
    found: dict[str, Any] = {"lora": None, "prefix": None, "bottleneck": None}
    for part in parts:
        method = _part_of(part, anatomy)
        name = "lora" if isinstance(method, LoRA) else "prefix" if isinstance(method, Prefix) else "bottleneck"
        if isinstance(method, IA3) or found[name] is not None:
            raise ConfigError("a union with gates may have one LoRA, one prefix and one bottleneck, and nothing else")
        found[name] = method.model_copy(update={"alpha": float(method.rank)}) if isinstance(method, LoRA) else method
        beyond = {place.stack for place in method.places(anatomy)} - {"encoder"}
        if beyond:
            raise ConfigError(
                "its gates act in a decoder too. A gate is a mean over a whole text, which a decoder does not have "
                "while it writes: Inlay reads UniPELT in encoders only"
            )
    shared = [part.shared_gating for part in parts if isinstance(part, PrefixOptions)]
    return UniPELT(**found, gates="one" if all(shared) else "two", count_padding=True)


def bottleneck_of(options: BottleneckOptions, anatomy: Anatomy) -> Bottleneck:
    sites = [site for site, there in (("attention", options.mh_adapter), ("ffn", options.output_adapter)) if there]
    if options.original_ln_before and not options.is_parallel and options.residual_before_ln is not True:
        raise ConfigError(
            f"residual_before_ln={options.residual_before_ln!r}: the residual is taken before the host's norm here"
        )
    name = options.non_linearity.lower()
    fields: dict[str, Any] = {
        "reads": "residual" if options.is_parallel else "normed" if options.original_ln_before else "output",
        "own_norm": options.ln_before,
        "sites": tuple(sites),
        "reduction": _reduction(options.reduction_factor, anatomy),
        "activation": ACTIVATIONS.get(name, name),
        "dropout": options.dropout,
        "scale": options.scaling,
        "init": _INITS[options.init_weights],
        "leave_out": layers_of(options.leave_out, anatomy),
        "before_dropout": False,
    }
    if options.phm_layer:
        rank = options.phm_rank if options.factorized_phm_W else None
        fields |= {
            "n": options.phm_dim,
            "rank": rank,
            "share_rule": options.shared_phm_rule,
            "learn_rule": options.learn_phm,
        }
    return _kind(options, sites)(**fields)


def _kind(options: BottleneckOptions, sites: Sequence[str]) -> type[Bottleneck]:
    """Which method it is called here. Since every setting is given, only the name depends on it."""
    if options.phm_layer:
        compact = options.shared_phm_rule and options.factorized_phm_W and options.phm_rank == 1
        return PHM if not compact else Compacter if len(sites) > 1 else CompacterPlusPlus
    if min(options.factors()) < 1:
        return Wide
    if options.ln_before:
        return Bapna
    return Parallel if options.is_parallel else Pfeiffer if options.original_ln_before else Houlsby


def _reduction(factor: float | dict[str, float], anatomy: Anatomy) -> float | dict[int | str, float]:
    if not isinstance(factor, dict):
        return factor
    numbered = {name: value for name, value in factor.items() if name != "default"}
    odd = [name for name in numbered if not name.isdecimal()]
    if odd:
        raise ConfigError(f"reduction_factor is by layer number and 'default', got {', '.join(map(repr, odd))}")
    named = dict(zip(layers_of(tuple(map(int, numbered)), anatomy), numbered.values(), strict=True))
    layers = layer_numbers(anatomy)
    if "default" not in factor and len(named) < len(layers):
        raise ConfigError("reduction_factor names neither every layer nor a 'default'")
    return {**named, "default": factor.get("default", next(iter(factor.values()), 1.0))}


def layers_of(numbers: Iterable[int], anatomy: Anatomy) -> tuple[int | str, ...]:
    """Our names for layers that they number through all stacks; in a host with one stack, the number itself."""
    layers = layer_numbers(anatomy)
    odd = [n for n in numbers if not 0 <= n < len(layers)]
    if odd:
        raise ConfigError(
            f"there is no layer {', '.join(map(str, odd))}; "
            f"this host's are 0 to {len(layers) - 1}, counted through all stacks"
        )
    return tuple(n if len(anatomy.depth) == 1 else layers[n] for n in numbers)


def lora_of(options: LoraOptions, anatomy: Anatomy) -> LoRA:
    layout = layout_of(anatomy)
    wanted: list[str] = list(options.attn_matrices) if options.selfattn_lora else []
    wanted += [f"cross_{role}" for role in wanted]
    wanted += [
        *(layout.intermediate if options.intermediate_lora else ()),
        *(layout.output if options.output_lora else ()),
    ]
    targets = [target for want in wanted for target in _targets(want, anatomy)]
    if not targets:
        raise ConfigError(
            "this LoRA changes no projection: it has neither selfattn_lora, intermediate_lora nor output_lora"
        )
    return LoRA(
        rank=options.r, alpha=options.alpha, dropout=options.dropout, targets=tuple(dict.fromkeys(targets)),
        leave_out=layers_of(options.leave_out, anatomy),
    )  # fmt: skip


def ia3_of(options: LoraOptions, anatomy: Anatomy) -> IA3:
    """There it rescales what the FFN's first projection gives, before the activation."""
    if options.r != 1 or options.alpha != 1 or options.dropout:
        raise ConfigError("IA3 has r = 1, alpha = 1 and no dropout here")
    wanted = set(lora_of(options, anatomy).targets)
    places = [p for p in anatomy.places.values() if p.projection is not None and {p.kind, p.id} & wanted]
    kinds = dict.fromkeys(place.kind for place in places)
    partly = [kind for kind in kinds if {p.id for p in anatomy.of_kind(kind)} - {p.id for p in places}]
    if partly:
        raise ConfigError(f"it rescales only some of the modules of {', '.join(partly)}, which has no counterpart")
    return IA3(outputs=tuple(kinds), inputs=(), leave_out=layers_of(options.leave_out, anatomy))


def _targets(want: str, anatomy: Anatomy) -> list[str]:
    """The role itself if the host has it, or else the places whose module's name ends with it."""
    projections = [place for place in anatomy.places.values() if place.projection is not None]
    if any(place.kind == want for place in projections):
        return [want]
    return [place.id for place in projections if place.module.endswith(f".{want}")]


def fusion_of(
    options: FusionOptions, members: Sequence[str], inlays: Inlays, host: PreTrainedModel
) -> tuple[Fusion, list[Place]]:
    """The fusion, and the places where they keep weights of it although no member acts there."""
    acting = {member: acting_places(inlays[member], inlays.anatomy) for member in members}
    reads = common_reads([inlays[member] for member in members])
    everywhere = [p for p in inlays.anatomy.places.values() if any(p.id in places for places in acting.values())]
    kept = {p.id: tuple(m for m in members if p.id in acting[m]) for p in everywhere}
    kinds = {p.kind for p in everywhere}
    method = Fusion(
        members=tuple(members), sites=tuple(kept), value=options.value,
        query="output" if options.query_before_ln else reads,
        dropout=options.dropout_prob or _attention_dropout(host, inlays.anatomy),
        strength=0.01 if options.regularization else 0.0,
        kept=None if all(len(there) == len(members) for there in kept.values()) else kept,
    )  # fmt: skip
    return method, [p for p in inlays.anatomy.places.values() if p.kind in kinds and p.id not in kept]


def _attention_dropout(host: PreTrainedModel, anatomy: Anatomy) -> float:
    """The dropout of a fusion whose dropout_prob is None or 0."""
    setting = layout_of(anatomy).attention_dropout
    return 0.0 if setting is None else float(getattr(host.config, setting))


def acting_places(inlay: Inlay, anatomy: Anatomy) -> dict[str, Place]:
    return {i: anatomy.places[i] for i in inlay.place_ids() if anatomy.places[i].kind not in ("norm", "head")}


def common_reads(members: Sequence[Inlay]) -> Literal["normed", "output"]:
    """What all members read; `adapters` gives every member of a fusion the input of the last one."""
    odd = [m.name for m in members if not isinstance(m.method, Bottleneck)]
    if odd:
        raise ConfigError(f"a fusion of `adapters` has only bottleneck adapters as members, but not {', '.join(odd)}")
    told = {
        (m.method.reads, m.method.sites, m.method.before_dropout) for m in members if isinstance(m.method, Bottleneck)
    }
    if len(told) != 1:
        raise ConfigError(
            "the members act at different sites or read differently; `adapters` gives all of them the last one's input"
        )
    reads = told.pop()[0]
    if reads == "residual":
        raise ConfigError(
            "the members act beside their branch; a fusion that asks with the branch's input has no counterpart"
        )
    return "output" if reads == "output" else "normed"
