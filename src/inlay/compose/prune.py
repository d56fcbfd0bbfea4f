"""Prune: a smaller fusion of the members it listens to."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from numbers import Integral

from torch import nn

from inlay.compose.activations import FusionActivations
from inlay.errors import ConfigError, SetupError
from inlay.host.registry import Inlay, Inlays, key_of
from inlay.host.verbs import bare, free_name, inlays_of
from inlay.methods.fusion import Fusion, as_fusion


def prune(
    host: nn.Module, fusion: str, activations: FusionActivations, *, name: str,
    keep: int | None = None, threshold: float | None = None, per_layer: bool = False,
) -> None:  # fmt: skip
    """A smaller fusion beside the old one: its `keep` most active members, or those above a mean weight."""
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    old = inlays[fusion]
    method = as_fusion(fusion, old.method)
    _check(fusion, method, activations, keep, threshold)
    kept = _kept(method, activations, keep, threshold, per_layer)
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
    new.take_method(smaller)
    inlays.admit(model, new)


def _check(
    fusion: str, method: Fusion, activations: FusionActivations, keep: int | None, threshold: float | None
) -> None:
    if (keep is None) == (threshold is None):
        raise ConfigError("prune by one of keep=<members> and threshold=<mean weight>")
    if keep is not None and not (isinstance(keep, Integral) and 1 <= keep <= len(method.members)):
        raise ConfigError(f"keep is {keep}, but {fusion!r} has {len(method.members)} members; keep at least 1 of them")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"a threshold is a mean weight from 0 to 1, got {threshold}")
    if activations.members != method.members or tuple(activations.mean) != method.sites:
        raise SetupError(f"these activations are not of {fusion!r}")


def _kept(
    method: Fusion, activations: FusionActivations, keep: int | None, threshold: float | None, per_layer: bool
) -> dict[str, tuple[str, ...]]:
    """Place to the members that are left there."""

    def most(weights: Mapping[str, float]) -> tuple[str, ...]:
        ranked = sorted(weights, key=lambda m: -weights[m])
        above = [m for m in ranked if weights[m] >= (threshold or 0)] or ranked[:1]
        return tuple(m for m in method.members if m in (ranked[:keep] if keep is not None else above))

    if not per_layer:
        best = most(activations.overall())
        return {site: tuple(m for m in method.at(site) if m in best) for site in method.sites}
    return {
        site: most({m: w for m, w in activations.by_member(site).items() if m in method.at(site)})
        for site in method.sites
    }


def _acts(inlays: Inlays, members: Iterable[str], site: str) -> bool:
    """Whether one of these members has a module at a place: where nobody has, a fusion of them adds nothing."""
    return any(inlays.member_part(member, inlays.anatomy.places[site]) is not None for member in members)
