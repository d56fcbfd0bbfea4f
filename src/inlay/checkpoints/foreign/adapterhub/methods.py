"""The configs of `adapters` in our words, and back.

    their config ── BottleneckOptions, LoraOptions, FusionOptions ── Pfeiffer, Houlsby, Compacter, LoRA, Fusion …

The option classes list every option of `adapters` 1.3.0. What has no counterpart here is a field that takes one value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.adapterhub.layout import layer_numbers, rooms_of
from inlay.checkpoints.foreign.files import only
from inlay.config import Config
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, Inlays
from inlay.methods import (
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
)
from inlay.methods.bottleneck import Wide

Finite = Annotated[float, Field(allow_inf_nan=False)]
Factor = Annotated[Finite, Field(ge=1e-6)]
Share = Annotated[float, Field(ge=0, lt=1)]
_INITS = {"bert": "normal", "mam_adapter": "identity", "houlsby": "normal"}
_ACTIVATIONS = {"leakyrelu": "leaky_relu", "swish": "silu"}  # theirs to ours, where the name differs
_ATTENTION: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}  # files without a version

_OLD_FUSION = (
    "attention_type",
    "new_attention_norm",
)  # about a fusion, when an adapter's config still had a word on it
_INVERTIBLE = ("invertible_adapter", "inv_adapter", "inv_adapter_reduction_factor")


class BottleneckOptions(Config):
    """BnConfig of `adapters`: seq_bn, double_seq_bn, par_bn, compacter and all between."""

    architecture: None = None
    mh_adapter: bool
    output_adapter: bool
    reduction_factor: Factor | Annotated[dict[str, Factor], Field(min_length=1)]
    non_linearity: str
    original_ln_before: bool = False
    original_ln_after: Annotated[bool, only(True, why="the host's own norm always acts after the sum")] = True
    ln_before: bool = False
    ln_after: Annotated[bool, only(False, why="a norm after the up-projection has no counterpart")] = False
    init_weights: Literal["bert", "mam_adapter", "houlsby"] = "bert"
    init_weights_seed: int | None = None
    is_parallel: bool = False
    scaling: Finite | Annotated[str, only("learned", why="a scale per channel has no counterpart")] = 1.0
    use_gating: Annotated[bool, only(False, why="gates have no counterpart")] = False
    residual_before_ln: bool | str = True
    adapter_residual_before_ln: bool = False
    inv_adapter: Annotated[str | None, only(None, why="invertible adapters have no counterpart")] = None
    inv_adapter_reduction_factor: float | None = None
    invertible_adapter: Annotated[Any, only(None, False, why="invertible adapters have no counterpart")] = None
    cross_adapter: Annotated[bool, only(False, why="adapters after cross-attention have no counterpart")] = False
    leave_out: tuple[int, ...] = ()
    dropout: Share = 0.0
    phm_layer: bool = False
    phm_dim: int = Field(default=4, ge=1)
    factorized_phm_W: bool = True
    shared_W_phm: Annotated[bool, only(False, why="weights shared by all layers have no counterpart")] = False
    shared_phm_rule: bool = True
    factorized_phm_rule: Annotated[bool, only(False, why="a factorised rule has no counterpart")] = False
    phm_c_init: str = "normal"
    phm_init_range: float = 0.0001
    learn_phm: bool = True
    hypercomplex_nonlinearity: str = "glorot-uniform"
    phm_rank: int = Field(default=1, ge=1)
    phm_bias: Annotated[bool, only(True, why="PHM layers have a bias here")] = True
    stochastic_depth: Annotated[float, only(0.0, why="stochastic depth has no counterpart")] = 0.0

    def factors(self) -> list[float]:
        """Every reduction factor it names."""
        return (
            list(self.reduction_factor.values()) if isinstance(self.reduction_factor, dict) else [self.reduction_factor]
        )


class LoraOptions(Config):
    """LoRAConfig of `adapters`."""

    architecture: Literal["lora"] = "lora"
    selfattn_lora: bool = True
    intermediate_lora: bool = False
    output_lora: bool = False
    leave_out: tuple[int, ...] = ()
    r: int = Field(default=8, ge=1)
    alpha: Annotated[Finite, Field(gt=0)] = 8
    dropout: Share = 0.0
    attn_matrices: tuple[Literal["q", "k", "v"], ...] = ("q", "v")
    composition_mode: Annotated[str, only("add", why="(IA)³ scales the host's output, which LoRA does not")] = "add"
    init_weights: str = "lora"
    init_weights_seed: int | None = None
    use_gating: Annotated[bool, only(False, why="gates have no counterpart")] = False
    use_dora: Annotated[bool, only(False, why="DoRA rescales the host's weights")] = False
    vera_d: Annotated[float | None, only(None, why="VeRA has no counterpart")] = None
    vera_b: Annotated[float | None, only(None, why="VeRA has no counterpart")] = None
    dtype: str | None = None


class FusionOptions(Config):
    """AdapterFusionConfig of `adapters`."""

    key: Annotated[bool, only(True, why="a fusion without keys has no counterpart")] = True
    query: Annotated[bool, only(True, why="a fusion without queries has no counterpart")] = True
    value: bool = True
    query_before_ln: bool = False
    regularization: bool = True
    residual_before: Annotated[bool, only(False, why="values that include the residual have no counterpart")] = False
    temperature: Annotated[
        bool, only(False, why="`adapters` lets the temperature fall at every call and does not save it")
    ] = False
    value_before_softmax: bool = True
    value_initialized: bool | str = True
    dropout_prob: Share | None = None


OPTIONS: dict[str | None, type[BottleneckOptions] | type[LoraOptions]] = {None: BottleneckOptions, "lora": LoraOptions}


def options_kind(config: dict[str, Any]) -> type[BottleneckOptions] | type[LoraOptions]:
    architecture = config.get("architecture")
    if not isinstance(architecture, str | None) or architecture not in OPTIONS:
        raise ConfigError(
            f"adapters of the architecture {architecture!r} have no counterpart in Inlay; "
            f"it reads bottleneck adapters and LoRA."
        )
    return OPTIONS[architecture]


def as_trained(config: dict[str, Any], version: str | None, kind: str | None) -> dict[str, Any]:
    """A config of an older version with the meaning it had then."""
    config = dict(config)
    if version is None and config.get("non_linearity") in _OLD_ACTIVATIONS:
        config["non_linearity"] = _OLD_ACTIVATIONS[config["non_linearity"]]
    if version is None and not config.get("new_attention_norm"):
        config = {name: value for name, value in config.items() if name not in _OLD_FUSION}
    if kind == "text_task":  # the first versions wrote what only their language adapters had
        config = {name: value for name, value in config.items() if name not in _INVERTIBLE}
    number = (version or "").removeprefix("adapters.").split(".")
    before_1_1 = (version or "").startswith("adapters.") and number[:2] in (["0", "1"], ["0", "2"], ["1", "0"])
    if before_1_1 and config.get("architecture") == "lora" and "r" in config:
        config["alpha"] = config["r"]  # adapters before 1.1.0 left the scale out
    return config


# their options to our methods


def method_of(options: BottleneckOptions | LoraOptions, anatomy: Anatomy) -> Method:
    return lora_of(options, anatomy) if isinstance(options, LoraOptions) else bottleneck_of(options, anatomy)


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
        "activation": _ACTIVATIONS.get(name, name),
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
    """The method's name; every setting is given, so nothing else depends on it."""
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
    """Our names of their flat layer numbers; with one stack the number says it all."""
    layers = layer_numbers(anatomy)
    odd = [n for n in numbers if not 0 <= n < len(layers)]
    if odd:
        raise ConfigError(
            f"there is no layer {', '.join(map(str, odd))}; "
            f"this host's are 0 to {len(layers) - 1}, counted through all stacks"
        )
    return tuple(n if len(anatomy.depth) == 1 else layers[n] for n in numbers)


def lora_of(options: LoraOptions, anatomy: Anatomy) -> LoRA:
    rooms = rooms_of(anatomy)
    wanted: list[str] = list(options.attn_matrices) if options.selfattn_lora else []
    wanted += [f"cross_{role}" for role in wanted]
    wanted += [
        *(rooms.intermediate if options.intermediate_lora else ()),
        *(rooms.output if options.output_lora else ()),
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


def _targets(want: str, anatomy: Anatomy) -> list[str]:
    """A role this host has, or the places whose module's name ends like that."""
    projections = [place for place in anatomy.places.values() if place.projection is not None]
    if any(place.kind == want for place in projections):
        return [want]
    return [place.id for place in projections if place.module.endswith(f".{want}")]


def fusion_of(
    options: FusionOptions, members: Sequence[str], inlays: Inlays, dropout: float
) -> tuple[Fusion, list[Place]]:
    """The fusion, and the places where they keep its weights though no member acts there."""
    acting = {member: _acting(inlays[member], inlays.anatomy) for member in members}
    reads = common_reads([inlays[member] for member in members])
    everywhere = [p for p in inlays.anatomy.places.values() if any(p.id in places for places in acting.values())]
    kept = {p.id: tuple(m for m in members if p.id in acting[m]) for p in everywhere}
    kinds = {p.kind for p in everywhere}
    method = Fusion(
        members=tuple(members), sites=tuple(kept), value=options.value,
        query="output" if options.query_before_ln else reads,
        dropout=dropout if options.dropout_prob is None else options.dropout_prob,
        strength=0.01 if options.regularization else 0.0,
        kept=None if all(len(there) == len(members) for there in kept.values()) else kept,
    )  # fmt: skip
    return method, [p for p in inlays.anatomy.places.values() if p.kind in kinds and p.id not in kept]


def _acting(inlay: Inlay, anatomy: Anatomy) -> dict[str, Place]:
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


# our methods to their options


def options_of(inlay: Inlay, anatomy: Anatomy) -> BottleneckOptions | LoraOptions:
    """Their options for an inlay; what they cannot say is refused."""
    method, places = inlay.method, list(_acting(inlay, anatomy).values())
    if inlay.norms:
        raise ConfigError("it owns layer norms, which `adapters` does not save")
    if isinstance(method, LoRA):
        options: BottleneckOptions | LoraOptions = _lora_options(method, places, anatomy)
    elif isinstance(method, Bottleneck) and method.kind != "lowrank":
        options = _bottleneck_options(method, places, anatomy)
    else:
        raise ConfigError(f"`adapters` has no counterpart of the method {method.kind!r}")
    theirs = {place.id.removesuffix(".raw") for place in method_of(options, anatomy).places(anatomy)}
    if theirs != {place.id.removesuffix(".raw") for place in places}:
        odd = ", ".join(sorted(theirs ^ {place.id.removesuffix(".raw") for place in places}))
        raise ConfigError(f"`adapters` cannot say where it acts; its config would differ at {odd}")
    return options


def _bottleneck_options(method: Bottleneck, places: Sequence[Place], anatomy: Anatomy) -> BottleneckOptions:
    normed = method.reads == "normed" or (method.reads == "stream" and all(place.norm is None for place in places))
    if method.reads == "stream" and not normed:
        raise ConfigError("it reads the sum before the host's norm, which `adapters` cannot do in a post-LN host")
    fields: dict[str, Any] = {
        "mh_adapter": "attention" in method.sites,
        "output_adapter": "ffn" in method.sites,
        "reduction_factor": _factors(method, places, anatomy),
        "non_linearity": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}.get(
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
    rooms, kinds = rooms_of(anatomy), {place.kind for place in places}

    def changes(wanted: Sequence[str]) -> bool:
        return any(place.kind == want or place.module.endswith(f".{want}") for place in places for want in wanted)

    return LoraOptions(
        r=method.rank, alpha=method.alpha, dropout=method.dropout, leave_out=_left_out(places, anatomy),
        attn_matrices=tuple(role for role in _ATTENTION if role in kinds), selfattn_lora=bool(set(_ATTENTION) & kinds),
        intermediate_lora=changes(rooms.intermediate), output_lora=changes(rooms.output),
    )  # fmt: skip


def fusion_options(inlay: Inlay, inlays: Inlays) -> FusionOptions:
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
    theirs, _ = fusion_of(options, method.members, inlays, method.dropout)
    if theirs.sites != method.sites or any(theirs.at(site) != method.at(site) for site in method.sites):
        raise ConfigError(
            "it mixes fewer members or acts at fewer places than its members do, which `adapters` cannot say"
        )
    return options
