"""What a user does with fusions: add, penalise, prune, collapse. The rest is as for every inlay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inlay.analysis.activations import FusionActivations, fusion_activations, labelled_accuracy
from inlay.anatomy import Anatomy, Place, in_layers
from inlay.errors import ConfigError, NamingError, SetupError
from inlay.heads import Head
from inlay.host import active, bare, free_name, inlays_of
from inlay.methods.base import Form
from inlay.methods.bottleneck import Layer, Wide
from inlay.methods.fusion import Fusion, FusionLayer
from inlay.registry import Inlay, Inlays, key_of
from inlay.setup import names_in


def add_fusion(
    host: nn.Module, name: str, members: Sequence[str], *,
    query: Literal["normed", "output"] = "normed", value: bool = True, temperature: float = 1.0, dropout: float = 0.0,
    strength: float = 0.01, subset: int | None = None, leave_out: Sequence[Layer] = (),
    target: str | None = None, head: Head | None = None, norms: bool = False,
) -> None:  # fmt: skip
    """Learn to mix what several inlays learned. Members stay as they are; several fusions may share them.

    query, value, temperature, dropout, strength, subset: see the fields of `inlay.methods.Fusion`.
    leave_out: layers where neither the fusion nor its members act.
    target:    the member whose head the fusion starts with; by default the last one, if it has a head of its own.
    head:      a fresh head instead.
    norms:     whether the fusion owns a copy of the host's norms, or of the target's where it owns them.
    """
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    members = (members,) if isinstance(members, str) else tuple(members)
    for member in members:
        if not isinstance(member, str):
            raise ConfigError(f"members is a list of names, got {member!r} in it")
    if not members:
        raise ConfigError("a fusion needs at least one member")
    inlays.check_members(members)
    sites = tuple(_common_places(inlays, members, tuple(leave_out)))
    method = Fusion(
        members=members,
        sites=sites,
        query=query,
        value=value,
        temperature=temperature,
        dropout=dropout,
        strength=strength,
        subset=subset,
    )
    if subset is not None and subset > len(members):
        raise ConfigError(f"subset is {subset}, but there are {len(members)} members")
    start = _target(inlays, members, target)
    if not norms and any(inlays[member].norms for member in members):
        owners = ", ".join(member for member in members if inlays[member].norms)
        warnings.warn(
            f"{owners}: own norms do not act inside a fusion. norms=True gives the fusion a copy of the target's.",
            stacklevel=2,
        )
    inlay = Inlay(name, method, head or start.head, norms).fill(model, inlays.anatomy)
    kinds = (["norm"] if norms else []) + (["head"] if head is None else [])
    for place in inlays.anatomy.of_kind(*kinds) if kinds else ():
        mine, theirs = inlay.part(place), start.part(place)
        if mine is not None and theirs is not None:
            mine.load_state_dict(theirs.state_dict())
    inlays.admit(model, inlay)


def _common_places(inlays: Inlays, members: tuple[str, ...], leave_out: tuple[Layer, ...]) -> list[str]:
    """Where any member acts; a branch before its dropout only if all members act there."""
    anatomy: Anatomy = inlays.anatomy
    anatomy.check_layers(leave_out)
    where = [{p for p in inlays[m].place_ids() if anatomy.places[p].changes} for m in members]
    everywhere = set.union(*where)
    if len(members) > 1 and not any(
        a & b for i, a in enumerate(map(_plain, where)) for b in map(_plain, where[i + 1 :])
    ):
        acts = "; ".join(
            f"{m} at {', '.join(sorted({anatomy.places[p].kind for p in w}))}"
            for m, w in zip(members, where, strict=True)
        )
        raise SetupError(f"the members have no place in common: {acts}.")
    chosen = {p for p in everywhere if not (p.endswith(".raw") and p.removesuffix(".raw") in everywhere)}
    places = [place for place in anatomy.places.values() if place.id in chosen and in_layers(place, leave_out) is None]
    if not places:
        raise SetupError("every layer in which a member acts is left out")
    return [place.id for place in places]


def _plain(places: set[str]) -> set[str]:
    return {p.removesuffix(".raw") for p in places}


def _target(inlays: Inlays, members: tuple[str, ...], target: str | None) -> Inlay:
    if target is not None and target not in members:
        raise NamingError(f"the target {target!r} is not among the members {', '.join(members)}")
    return inlays[target or members[-1]]


def penalty(host: nn.Module) -> Tensor:
    """The active setup's regulariser, to add to the loss in the same step: strength · Σ ‖I − V‖² of its fusions."""
    model = bare(host)
    total = next(model.parameters()).new_zeros((), dtype=torch.float32)
    for name in names_in(active(model)):
        inlay = inlays_of(model)[name]
        if isinstance(inlay.method, Fusion) and inlay.method.value and inlay.method.strength:
            layers = [part for part in inlay.parts.values() if isinstance(part, FusionLayer)]
            total = total + inlay.method.strength * sum((layer.penalty() for layer in layers), total.new_zeros(()))
    return total


def prune(
    host: nn.Module, fusion: str, activations: FusionActivations, *, name: str,
    keep: int | None = None, threshold: float | None = None, per_layer: bool = False,
) -> None:  # fmt: skip
    """A smaller fusion beside the old one: its `keep` most active members, or those above a mean weight."""
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    old = inlays[fusion]
    method = fusion_method(old)
    if (keep is None) == (threshold is None):
        raise ConfigError("prune by one of keep=<members> and threshold=<mean weight>")
    if keep is not None and not 1 <= keep <= len(method.members):
        raise ConfigError(f"keep is {keep}, but {fusion!r} has {len(method.members)} members; keep at least 1 of them")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"a threshold is a mean weight from 0 to 1, got {threshold}")
    if activations.members != method.members or tuple(activations.mean) != method.sites:
        raise SetupError(f"these activations are not of {fusion!r}")

    def most(weights: Mapping[str, float]) -> tuple[str, ...]:
        ranked = sorted(weights, key=lambda m: -weights[m])
        kept = (
            ranked[:keep] if keep is not None else [m for m in ranked if weights[m] >= (threshold or 0)] or ranked[:1]
        )
        return tuple(m for m in method.members if m in kept)

    if per_layer:
        kept = {
            site: most({m: w for m, w in activations.by_member(site).items() if m in method.at(site)})
            for site in method.sites
        }
    else:
        best = most(activations.overall())
        kept = {site: tuple(m for m in method.at(site) if m in best) for site in method.sites}
    kept = {site: left for site, left in kept.items() if _acts(inlays, left, site)}
    if not kept:
        raise SetupError(f"nothing of {fusion!r} would be left: the most active members have no module anywhere")
    members = tuple(m for m in method.members if any(m in left for left in kept.values()))
    smaller = method.model_copy(update={
        "members": members,
        "sites": tuple(kept),
        "kept": kept if per_layer or method.kept is not None else None,
        "subset": None if method.subset is None else min(method.subset, len(members)),
    })  # fmt: skip
    new = Inlay(name, smaller, old.head, old.norms)
    gone = {key_of(site) for site in set(method.sites) - set(smaller.sites)}
    new.parts = nn.ModuleDict({key: copy.deepcopy(part) for key, part in old.parts.items() if key not in gone})
    inlays.admit(model, new)


def _acts(inlays: Inlays, members: Iterable[str], site: str) -> bool:
    """Whether one of these members has a module at a place: where nobody has, a fusion of them adds nothing."""
    return any(inlays.member_part(member, inlays.anatomy.places[site]) is not None for member in members)


@dataclass(frozen=True)
class Collapse:
    """What collapsing did: mean weights per place, and accuracy before and after where the batches had labels."""

    name: str
    weights: dict[str, dict[str, float]]
    accuracy_fused: float | None
    accuracy_collapsed: float | None


def collapse(host: nn.Module, fusion: str, batches: Iterable[Mapping[str, Any]], *, name: str) -> Collapse:
    """Replace the learned mixing by its mean weights over a data set: exactly one wider bottleneck, a plain inlay."""
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    old, batches = inlays[fusion], list(batches)
    method = fusion_method(old)
    seen = fusion_activations(model, fusion, batches)
    forms = {site: found for site in method.sites if (found := _forms(inlays, method, site))}
    kinds = {(form.reads, form.standardised, form.activation) for found in forms.values() for form in found.values()}
    if len(kinds) != 1:
        alike = "; ".join(sorted(f"{reads} through {activation}" for reads, _, activation in kinds))
        raise SetupError(f"{fusion!r} cannot be one bottleneck: its members read and act differently ({alike}).")
    reads, standardised, activation = kinds.pop()
    if reads == "input" or standardised:
        raise SetupError(f"{fusion!r} cannot be one bottleneck: its members are LoRA or have norms of their own.")
    places = {site: inlays.anatomy.places[site] for site in forms}
    size: dict[str, int] = {"default": 1}
    for site, found in forms.items():
        size[site] = sum(form.down.shape[0] for form in found.values())
    settings: dict[str, Any] = {
        "reads": reads,
        "activation": activation,
        "sites": tuple(dict.fromkeys(place.kind.removesuffix(".raw") for place in places.values())),
        "size": size,
        "before_dropout": all(place.kind.endswith(".raw") for place in places.values()),
        "leave_out": _missing_layers(inlays.anatomy, places.values()),
    }
    wide = Wide(**settings)
    inlay = Inlay(name, wide, old.head, old.norms).fill(model, inlays.anatomy)
    if set(inlay.place_ids()) - {p.id for p in inlays.anatomy.of_kind("norm", "head")} != set(forms):
        raise SetupError(f"{fusion!r} acts at different branches in different layers, which no plain method does")
    with torch.no_grad():
        for site, found in forms.items():
            _pour_mean(inlay.parts[key_of(site)], old.parts[key_of(site)], found, seen.by_member(site))
        for place in inlays.anatomy.of_kind("norm", "head"):
            mine, theirs = inlay.part(place), old.part(place)
            if mine is not None and theirs is not None:
                mine.load_state_dict(theirs.state_dict())
    inlays.admit(model, inlay)
    accuracy = {setup: labelled_accuracy(model, setup, batches) for setup in (fusion, name)}
    return Collapse(name, {site: seen.by_member(site) for site in method.sites}, accuracy[fusion], accuracy[name])


def _forms(inlays: Inlays, method: Fusion, site: str) -> dict[str, Form]:
    parts = {m: inlays.member_part(m, inlays.anatomy.places[site]) for m in method.at(site)}
    return {m: part[0].form(part[1]) for m, part in parts.items() if part is not None}  # type: ignore[operator]


def _missing_layers(anatomy: Anatomy, places: Iterable[Place]) -> tuple[str, ...]:
    there = {f"{place.stack}.{place.layer}" for place in places}
    return tuple(
        f"{stack}.{i}" for stack, depth in anatomy.depth.items() for i in range(depth) if f"{stack}.{i}" not in there
    )


def _pour_mean(adapter: Any, layer: Any, forms: Mapping[str, Form], weights: Mapping[str, float]) -> None:
    """Σ_n p_n V z_n with p fixed: all downs below each other, all ups times p_n V beside each other."""
    adapter.down.weight.copy_(torch.cat([form.down for form in forms.values()]))
    adapter.down.bias.copy_(torch.cat([form.down_bias for form in forms.values()]))
    exact = torch.promote_types(adapter.up.weight.dtype, torch.float32)  # rounded once, at the end
    up = torch.cat([weights[m] * form.up.to(exact) for m, form in forms.items()])  # (Σb, D)
    up_bias = torch.stack([weights[m] * form.up_bias.to(exact) for m, form in forms.items()]).sum(0)
    if layer.value is not None:
        value = layer.value.weight.to(exact)
        up, up_bias = up @ value.T, value @ up_bias
    adapter.up.weight.copy_(up.T)
    adapter.up.bias.copy_(up_bias)


def fusion_method(inlay: Inlay) -> Fusion:
    if not isinstance(inlay.method, Fusion):
        raise SetupError(f"{inlay.name!r} is a {inlay.method.kind} inlay, not a fusion")
    return inlay.method
