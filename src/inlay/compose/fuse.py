"""Fuse: set a fusion into a host, and its regulariser."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import Anatomy
from inlay.errors import ConfigError, InlayError, NamingError, SetupError
from inlay.host.heads import Head
from inlay.host.offload import computes_on
from inlay.host.registry import Inlay, Inlays
from inlay.host.setup import names_in
from inlay.host.verbs import active, bare, free_name, inlays_of
from inlay.methods.bottleneck import Layer
from inlay.methods.fusion import Fusion


def add_fusion(
    host: nn.Module, name: str, members: Sequence[str], *,
    query: Literal["normed", "output"] = "normed", value: bool = True, temperature: float = 1.0, dropout: float = 0.0,
    strength: float = 0.01, subset: int | None = None, sites: Sequence[str] | None = None,
    leave_out: Layer | Sequence[Layer] = (), target: str | None = None, head: Head | None = None, norms: bool = False,
) -> None:  # fmt: skip
    """Learn to mix what several inlays learned. Members stay as they are; several fusions may share them.

    query, value, temperature, dropout, strength, subset: see the fields of `inlay.methods.Fusion`.
    sites:     kinds of places where it acts, such as 'ffn', or single places; by default wherever a member acts.
    leave_out: layers where neither the fusion nor its members act.
    target:    the member whose head the fusion starts with; by default the last one, if it has a head of its own.
    head:      a fresh head instead.
    norms:     whether the fusion owns a copy of the host's norms, or of the target's where it owns them.

    A fusion with a head of its own cannot act inside the host's head. If its members do, name its `sites`.
    """
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    members = _checked_members(inlays, members)
    sites = (sites,) if isinstance(sites, str) else sites
    leave_out = (leave_out,) if isinstance(leave_out, int | str) else tuple(leave_out)
    places = _checked_sites(inlays, members, sites, leave_out, subset)
    method = Fusion(
        members=members, sites=places, query=query, value=value,
        temperature=temperature, dropout=dropout, strength=strength, subset=subset,
    )  # fmt: skip
    start = _target(inlays, members, target)
    owners = [member for member in members if inlays[member].norms]
    if owners and not norms:
        warnings.warn(
            f"{', '.join(owners)}: own norms do not act inside a fusion. "
            f"norms=True gives the fusion a copy of the target's.",
            stacklevel=2,
        )
    inlay = Inlay(name, method, head or start.head, norms).fill(model, inlays.anatomy)
    inlay.check_head(inlays.anatomy)
    inlay.start_like(start, inlays.anatomy.of_kind("norm", *(["head"] if head is None else [])))
    inlays.admit(model, inlay)


def _checked_members(inlays: Inlays, members: Sequence[str]) -> tuple[str, ...]:
    members = (members,) if isinstance(members, str) else tuple(members)
    for member in members:
        if not isinstance(member, str):
            raise ConfigError(f"members is a list of names, got {member!r} in it")
    if not members:
        raise ConfigError("a fusion needs at least one member")
    inlays.check_members(members)
    return members


def _checked_sites(
    inlays: Inlays, members: tuple[str, ...], wanted: Sequence[str] | None, leave_out: tuple[Layer, ...],
    subset: int | None,
) -> tuple[str, ...]:  # fmt: skip
    """The fusion's places. What is wrong with them, with the layers left out and with the subset is said at once."""
    problems: list[InlayError] = []
    if subset is not None and subset > len(members):
        problems.append(ConfigError(f"`subset` is {subset}, but there are {len(members)} members"))
    try:
        inlays.anatomy.check_layers(leave_out)
    except InlayError as error:
        problems.append(error)
        leave_out = ()
    try:
        places = _sites(inlays, members, wanted, leave_out)
    except InlayError as error:
        problems.append(error)
    if problems:
        raise type(problems[0])("\n".join(map(str, problems)))
    return places


def _common_places(inlays: Inlays, members: tuple[str, ...], leave_out: tuple[Layer, ...]) -> list[str]:
    """Where any member acts; a branch before its dropout only if all members act there."""
    anatomy: Anatomy = inlays.anatomy
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


def _sites(
    inlays: Inlays, members: tuple[str, ...], wanted: Sequence[str] | None, leave_out: tuple[Layer, ...]
) -> tuple[str, ...]:
    """Those of the members' places that the user wants, named by their kind or one by one."""
    common = _common_places(inlays, members, leave_out)
    if wanted is None:
        return tuple(common)
    known = {name for place in common for name in _names_of(inlays.anatomy.places[place])}
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(
            f"no member acts at {', '.join(map(repr, unknown)) or 'no place at all'}. "
            f"Members act at: {', '.join(sorted(known - set(common)))}."
        )
    return tuple(place for place in common if set(wanted) & set(_names_of(inlays.anatomy.places[place])))


def _names_of(place: Place) -> tuple[str, str, str]:
    """What a user may call a place: its id, the id of its branch, its kind."""
    return place.id, place.id.removesuffix(".raw"), place.kind.removesuffix(".raw")


def _plain(places: set[str]) -> set[str]:
    return {p.removesuffix(".raw") for p in places}


def _target(inlays: Inlays, members: tuple[str, ...], target: str | None) -> Inlay:
    if target is not None and target not in members:
        raise NamingError(f"the target {target!r} is not among the members {', '.join(members)}")
    return inlays[target or members[-1]]


def penalty(host: nn.Module) -> Tensor:
    """The active setup's regulariser, to add to the loss in the same step: strength · Σ ‖I − V‖² of its fusions."""
    model = bare(host)
    total = torch.zeros((), dtype=torch.float32, device=computes_on(model, next(model.parameters())))
    for name in names_in(active(model)):
        inlay = inlays_of(model)[name]
        own = inlay.method.penalty(inlay.parts.values())
        total = total if own is None else total + own.to(total.device)
    return total
