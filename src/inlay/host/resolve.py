"""A setup, resolved into a plan: what each hook of the host does.

The meaning is the setup's own, branch by branch, whatever order inlays came in:

    Stack     each part acts on what the parts before it gave
    Average   the mean of what each part alone would have given
    Rows      each row as if its part were alone

Several places may share one module (LoRA on the last projection, a trained bias, a bottleneck), and a branch ends in up
to three modules one after the other (see `BranchEnd`). A part acts at its own module as long as the order allows it;
where an earlier part of a Stack acts at a later module, it moves there too. Without dropout that is the same h.

Norms and heads *stand in*: the uppermost part of a Stack that owns one. What is added to a module's output, such as a
trained bias of a norm, is added after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from inlay.anatomy.places import BranchEnd, Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.front import InFront, line_up
from inlay.host.heads import Head, PooledHead
from inlay.host.plan import Plan
from inlay.host.setup import Average, Fuse, Rows, Setup, Stack, names_in, walk
from inlay.host.steps import ByRow, HostNorm, Mean, PooledStandIn, StandIn, Unchanged, in_turn
from inlay.methods.acting import Draw, Reads, Spot, Step
from inlay.methods.base import Method

T = TypeVar("T")
InContext = Callable[[Setup], Setup]
"""A part to the whole setup as the rows of that part see it."""


class Resident(Protocol):
    """What is asked of an inlay."""

    name: str
    method: Method
    head: Head | None
    draw: Draw

    def part(self, place: Place) -> nn.Module | None: ...


@dataclass(frozen=True)
class _Fronts:
    """What stands in front of what the host attends to; the fields are those of `Plan`."""

    keys: Mapping[str, InFront]
    tokens: InFront | None
    shifts: tuple[int, ...]
    attends: bool


class Resolver:
    """Resolves setups for one host and the inlays that live in it."""

    def __init__(self, host: nn.Module, anatomy: Anatomy, inlay_named: Callable[[str], Resident], folded: bool) -> None:
        self.host, self.anatomy, self.inlay_named, self.folded = host, anatomy, inlay_named, folded
        self.keeps: set[str] = set()
        """Modules whose input a step of the plan in the making reads later on; see `Plan.keeps`."""

    def plan(self, setup: Setup, modules: Iterable[str]) -> Plan:
        """What acts at these modules of the host."""
        for part in walk(setup):
            if isinstance(part, Fuse):
                self.inlay_named(part.name).method.check_pins(part.name, dict(part.pinned))
        self._check_averages(setup)
        heads = self.heads(setup)
        steps: dict[str, Step] = {}
        self.keeps = set()
        for module in modules:
            if self._branch_of(module) is None and (step := self._at_module(setup, module)) is not None:
                steps[module] = step
        lasts, branches = set(), set()
        for name, end in self.anatomy.branches.items():
            found = self._at_end(setup, name, end)
            if found:
                branches.add(name)
                lasts.add(end.modules[max(found)])
                steps |= {end.modules[at]: step for at, step in found.items()}
        rows = next((len(s.parts) * s.each for s in walk(setup) if isinstance(s, Rows)), None)
        if rows:
            self._check_rows(setup, steps)
        fronts = self._fronts(setup)
        return Plan(
            setup, steps, keeps=frozenset(self.keeps), lasts=frozenset(lasts), branches=frozenset(branches), rows=rows,
            layers=self._layers(setup), whole_texts=self._whole_texts(setup),
            inputs=self._inputs(setup), weights=self._weights(setup),
            keys=fronts.keys, tokens=fronts.tokens, shifts=fronts.shifts, attends=fronts.attends,
            masks=any(self.inlay_named(name).method.reads_texts for name in names_in(setup)),
            pools=any(head.pooling for head in heads), per_token=any(head.per_token for head in heads),
            draws=tuple((inlay, inlay.draw) for inlay in map(self.inlay_named, names_in(setup))),  # type: ignore[misc]
        )  # fmt: skip

    def _layers(self, setup: Setup) -> frozenset[str]:
        """The layers whose input something reads."""
        inlays = [self.inlay_named(name) for name in names_in(setup)]
        ends = list(self.anatomy.of_kind("ffn", "ffn.raw"))
        found = {p for p in ends for i in inlays if i.part(p) is not None and i.method.reads_at(p) == "layer"}
        return frozenset(layer_of(place) for place in found)

    def _whole_texts(self, setup: Setup) -> bool:
        """Whether something attends to other tokens in a decoder; refused beside tokens that are run alone."""
        written = [place for place in self.anatomy.of_kind("ffn", "ffn.raw") if place.stack == "decoder"]

        def attends(inlay: Resident) -> bool:
            return inlay.method.attends and any(inlay.part(place) is not None for place in written)

        for each in self._by_row(setup, lambda inlay: (inlay,)):
            attending = [inlay for inlay in each if attends(inlay)]
            front = [inlay for inlay in each if inlay.part(self.anatomy.places["tokens"]) is not None]
            if attending and front and self.anatomy.causal:
                raise SetupError(
                    f"{front[0].name!r} puts tokens in front that this decoder runs alone, so that "
                    f"{attending[0].name!r} ({attending[0].method.kind}) could not attend to them. Use a Prefix."
                )
        return any(attends(self.inlay_named(name)) for name in names_in(setup))

    def _branch_of(self, module: str) -> str | None:
        return next((name for name, end in self.anatomy.branches.items() if module in end.modules), None)

    def _fronts(self, setup: Setup) -> _Fronts:
        """What stands in front: of keys, of tokens, and how far that moves positions."""
        keys: dict[str, InFront] = {}
        tokens: InFront | None = None
        for place in self.anatomy.places.values():
            if place.acts in ("keys", "tokens"):
                front = line_up(self._by_row(setup, lambda inlay, place=place: _some(inlay.part(place))))  # type: ignore[misc]
                if front is not None and place.acts == "keys":
                    keys[place.module] = front
                elif front is not None:
                    tokens = front
        moves = self._by_row(setup, lambda inlay: (inlay.method.moves(self.anatomy),))
        shifts = tuple(map(sum, moves))
        attends = bool(keys) or (tokens is not None and self.anatomy.causal)
        shifts = shifts if len(set(shifts)) > 1 else shifts[:1]
        return _Fronts(keys, tokens, shifts, attends)

    def _by_row(self, setup: Setup, each: Callable[[Resident], tuple[T, ...]]) -> list[tuple[T, ...]]:
        """What the inlays of a setup have, in its order: for all rows together, or for each part of Rows."""
        if setup is None or isinstance(setup, Average):
            return [()]
        if isinstance(setup, str | Fuse):
            return [each(self.inlay_named(name_in(setup)))]
        if isinstance(setup, Rows):
            return [mine for part in setup.parts for mine in self._by_row(part, each)]
        parts = [self._by_row(part, each) for part in setup.parts]
        rows = math.lcm(*map(len, parts))  # an encoder may see fewer rows than its decoder's beams
        return [sum((part[row * len(part) // rows] for part in parts), ()) for row in range(rows)]

    def _weights(self, setup: Setup) -> tuple[tuple[nn.Module, float], ...]:
        """How much of whose changes of the host's weights: what acts is linear in them."""
        found: dict[nn.Module, float] = {}
        for module, share in self._weight_shares(setup, next(self.anatomy.of_kind("weights")), 1.0):
            found[module] = found.get(module, 0.0) + share
        return tuple(found.items())

    def _weight_shares(self, setup: Setup, place: Place, share: float) -> Iterator[tuple[nn.Module, float]]:
        if isinstance(setup, Average):
            for inner, weight in zip(setup.parts, setup.weights, strict=True):
                yield from self._weight_shares(inner, place, share * weight)
        elif isinstance(setup, Stack):
            for inner in setup.parts:
                yield from self._weight_shares(inner, place, share)
        elif isinstance(setup, Rows):
            for name in names_in(setup):
                if self.inlay_named(name).part(place) is not None:
                    raise SetupError(
                        f"{name!r} ({self.inlay_named(name).method.kind}) changes the host's weights, which all "
                        f"rows of a batch share, so it cannot act in Rows."
                    )
        elif setup is not None and (module := self.inlay_named(name_in(setup)).part(place)) is not None:
            yield module, share

    def _inputs(self, setup: Setup) -> dict[str, Step]:
        """What is made of the inputs of modules."""
        places = [place for place in self.anatomy.places.values() if place.acts == "input"]
        found = {place.module: self._change(setup, [place], _alone) for place in places}
        return {module: step for module, step in found.items() if step is not None}

    def _check_averages(self, setup: Setup) -> None:
        """Refuse a mean of results that is not the mean of what each part would have given."""
        before = [place for place in self.anatomy.places.values() if place.acts != "output"]
        for part in walk(setup):
            inlays = [self.inlay_named(name) for name in names_in(part)] if isinstance(part, Average) else []
            for inlay in inlays:
                acts = {place.acts for place in before if inlay.part(place) is not None}
                if acts & {"keys", "tokens"}:
                    raise SetupError(
                        f"{part}: {inlay.name!r} ({inlay.method.kind}) puts something in front of what the host "
                        f"attends to, and such results have no mean in one pass. Use Rows, or inlay.average."
                    )
                if acts and any(other.method.kind != inlay.method.kind for other in inlays):
                    raise SetupError(
                        f"{part}: {inlay.name!r} ({inlay.method.kind}) changes what goes into a module or its weights, "
                        f"and only parts of its own kind can share that. Use Rows, or a Stack."
                    )

    def _check_rows(self, setup: Setup, steps: dict[str, Step]) -> None:
        shared = [place.id for place in self.anatomy.places.values() if place.module in steps]
        shared = [place for place in shared if self.anatomy.places[place].module in self.anatomy.not_norms]
        if shared:
            raise SetupError(f"{setup}: {shared[0]} acts on what all rows share, so they cannot differ there.")

    # modules that stand alone: projections, norms, heads

    def _at_module(self, setup: Setup, module: str, norm: Step | None = None) -> Step | None:
        """What stands in for a module, then what is added to its output."""
        places = [p for p in self.anatomy.places.values() if p.module == module and p.acts == "output"]
        steps = []
        for place in places:
            if not place.changes:
                absent = Unchanged() if place.kind == "head" else HostNorm(self.host.get_submodule(module))
                steps.append(self._stand_in(setup, place, absent))
        if norm is not None and not any(steps):
            steps.append(norm)
        changing = [place for place in places if place.changes]
        steps.append(self._change(setup, changing, _alone))
        return in_turn([step for step in steps if step is not None])

    def _change(self, setup: Setup, places: list[Place], in_context: InContext) -> Step | None:
        if setup is None:
            return None
        if isinstance(setup, str | Fuse):
            return in_turn(list(self._leaf_steps(setup, places, in_context)))
        if isinstance(setup, Stack):
            steps = [self._change(part, places, _inside(setup, at, in_context)) for at, part in enumerate(setup.parts)]
            return in_turn([step for step in steps if step is not None])
        return _of_parts(setup, lambda part: self._change(part, places, in_context), Unchanged())

    def _leaf_steps(self, setup: str | Fuse, places: Iterable[Place], in_context: InContext) -> Iterator[Step]:
        inlay = self.inlay_named(name_in(setup))
        for place in places:
            module = inlay.part(place)
            if module is None or (self.folded and place.projection is not None):
                continue
            norm = self._norm(in_context(setup), place)

            def member(name: str, place: Place = place) -> tuple[nn.Module, Reads] | None:
                return member_part(self.inlay_named(name), place, self.anatomy)

            pinned = dict(setup.pinned) if isinstance(setup, Fuse) else {}
            yield inlay.method.step(Spot(module, place, inlay.draw, norm, member, pinned))

    def _norm(self, setup: Setup, place: Place) -> Step | None:
        """The norm after a branch's sum as a setup has it."""
        if place.norm is None:
            return None
        host_norm = HostNorm(self.host.get_submodule(place.norm))
        return self._at_module(setup, place.norm, norm=host_norm)

    # the ends of branches

    def _at_end(self, setup: Setup, name: str, end: BranchEnd) -> dict[int, Step]:
        """What acts along a branch's end: where the host norms h on the way (Gemma 2), own norms come first."""
        if isinstance(setup, Rows):
            return _by_position(setup, {part: self._at_end(part, name, end) for part in dict.fromkeys(setup.parts)})
        if isinstance(setup, Average):
            changes = self._in_average(setup, name, end, _alone, 0)
            return _by_position(setup, {part: self._normed(part, end, steps) for part, steps in changes.items()})
        return self._normed(setup, end, self._along(setup, name, end, _alone, 0))

    def _normed(self, setup: Setup, end: BranchEnd, changes: dict[int, Step]) -> dict[int, Step]:
        """Steps along a branch's end, after the norms that stand in there for the host's."""
        if not end.norms:
            return changes
        found = {at: [step] for at, step in changes.items()}
        for place in self.anatomy.of_kind("norm"):
            if place.module in end.norms and (norm := self._stand_in(setup, place, Unchanged())) is not None:
                found.setdefault(end.at(place), []).insert(0, norm)
        return _in_turn_by_position(found)

    def _along(self, setup: Setup, name: str, end: BranchEnd, in_context: InContext, earliest: int) -> dict[int, Step]:
        """The steps along a branch's end, by the position of the module they act at; none before `earliest`."""
        if setup is None:
            return {}
        if isinstance(setup, str | Fuse):
            found: dict[int, list[Step]] = {}
            for place in self._places_along(name, end):
                for step in self._leaf_steps(setup, [place], in_context):
                    found.setdefault(self._position(setup, place, end, earliest), []).append(step)
            return _in_turn_by_position(found)
        if isinstance(setup, Stack):
            found = {}
            for number, part in enumerate(setup.parts):
                steps = self._along(part, name, end, _inside(setup, number, in_context), earliest)
                for at, step in steps.items():
                    found.setdefault(at, []).append(step)
                earliest = max([earliest, *steps])
            return _in_turn_by_position(found)
        if isinstance(setup, Average):
            return _by_position(setup, self._in_average(setup, name, end, in_context, earliest))
        parts = dict.fromkeys(setup.parts)
        return _by_position(setup, {part: self._along(part, name, end, in_context, earliest) for part in parts})

    def _in_average(
        self, setup: Average, name: str, end: BranchEnd, in_context: InContext, earliest: int
    ) -> dict[Setup, dict[int, Step]]:  # fmt: skip
        """The steps of each part of an Average, all at the last module at which any of them acts."""
        parts = dict.fromkeys(setup.parts)
        each = {part: self._along(part, name, end, in_context, earliest) for part in parts}
        positions = {at for steps in each.values() for at in steps}
        if len(positions) > 1:
            each = {part: self._along(part, name, end, in_context, max(positions)) for part in parts}
        return each

    def _places_along(self, name: str, end: BranchEnd) -> list[Place]:
        """A branch's places in the order in which one inlay's modules there act."""
        places = [place for place in self.anatomy.places.values() if place.branch == name and place.changes]
        kinds = ("bias", "head_bias")
        return sorted(
            places, key=lambda p: (end.at(p), p.projection is None, p.kind not in kinds, not p.kind.endswith(".raw"))
        )

    def _position(self, setup: str | Fuse, place: Place, end: BranchEnd, earliest: int) -> int:
        own = end.at(place)
        if earliest <= own:
            return own
        normed = [module for module in end.modules[own + 1 : earliest + 1] if module in end.norms]
        if normed:
            raise SetupError(
                f"{name_in(setup)!r} acts at {place.id}, before {normed[0]}, and cannot act on what a part gave that "
                f"acts after it. Put it before that part, or use Rows."
            )
        if place.projection is not None:
            self.keeps.add(place.module)
        return earliest

    # stand-ins

    def _stand_in(self, setup: Setup, place: Place, absent: Step) -> Step | None:
        """In a Stack the uppermost part that owns the module stands in; elsewhere each part has its own."""
        if setup is None:
            return None
        if isinstance(setup, str | Fuse):
            module = self.inlay_named(name_in(setup)).part(place)
            if isinstance(module, PooledHead):
                return PooledStandIn(module)
            return StandIn(module) if module is not None else None
        if isinstance(setup, Stack):
            upper: Step | None = None
            for part in setup.parts:
                upper = self._stand_in(part, place, upper or absent) or upper
            return upper
        if isinstance(setup, Average) and place.kind == "head":
            owners = [step for part in setup.parts if (step := self._stand_in(part, place, absent)) is not None]
            if len(owners) == 1:
                return owners[0]
        return _of_parts(setup, lambda part: self._stand_in(part, place, absent), absent)

    def heads(self, setup: Setup) -> list[Head]:
        """The own heads that stand in for the host's; several only under Rows and Average."""
        return [head for row in self.row_heads(setup) for head in row]

    def row_heads(self, setup: Setup) -> list[tuple[Head, ...]]:
        """The same, of all rows together or of each part of Rows; where there are none, the host's own acts."""
        if setup is None:
            return [()]
        if isinstance(setup, str | Fuse):
            return [_some(self.inlay_named(name_in(setup)).head)]
        parts = [self.row_heads(part) for part in setup.parts]
        if isinstance(setup, Rows):
            return [row for part in parts for row in part]
        if isinstance(setup, Average):
            _check_mean_head(setup, [[head for row in part for head in row] for part in parts])
        together = math.lcm(*map(len, parts))
        by_row = [[part[row * len(part) // together] for part in parts] for row in range(together)]
        if isinstance(setup, Stack):  # the uppermost
            return [next((heads for heads in reversed(row) if heads), ()) for row in by_row]
        return [sum(row, ()) for row in by_row]


def _check_mean_head(setup: Average, heads: list[list[Head]]) -> None:
    """Refuse heads of an Average's parts whose logits have no mean."""
    found = [own for own in heads if own]
    flat = [head for own in found for head in own]
    if len(flat) > 1 and len(found) < len(setup.parts):
        raise SetupError(
            f"{setup}: some parts have a head of their own and some have not. Give a head to all of them, or to one."
        )
    if len({(head.names, head.per_token) for head in flat}) > 1:
        raise SetupError(
            f"{setup}: its parts have heads with different labels, which have no mean. Use Rows, or one head."
        )


def member_part(inlay: Resident, place: Place, anatomy: Anatomy) -> tuple[nn.Module, Reads] | None:
    """A member's module at a place and what it reads; before or after the dropout is the same to a fusion."""
    for near in (place.id, f"{place.id}.raw", place.id.removesuffix(".raw")):
        if near in anatomy.places and (part := inlay.part(anatomy.places[near])) is not None:
            return part, inlay.method.reads_at(anatomy.places[near])
    return None


def layer_of(place: Place) -> str:
    """The layer that a place is in: 'encoder.3'."""
    return f"{place.stack}.{place.layer}"


def _some(thing: T | None) -> tuple[T, ...]:
    return () if thing is None else (thing,)


def name_in(setup: str | Fuse) -> str:
    return setup.name if isinstance(setup, Fuse) else setup


def _in_turn_by_position(found: dict[int, list[Step]]) -> dict[int, Step]:
    return {at: step for at, steps in found.items() if (step := in_turn(steps)) is not None}


def _by_position(setup: Average | Rows, each: dict[Setup, dict[int, Step]]) -> dict[int, Step]:
    """The steps of an Average or Rows at each module of a branch's end, from those of its parts."""
    positions = sorted({at for steps in each.values() for at in steps})
    made = {at: _of_parts(setup, lambda part, at=at: each[part].get(at), Unchanged()) for at in positions}  # type: ignore[misc]
    return {at: step for at, step in made.items() if step is not None}


def _alone(part: Setup) -> Setup:
    """A setup that is no part of another one is the whole itself."""
    return part


def _inside(stack: Stack, at: int, in_context: InContext) -> InContext:
    """A part of a Stack in context: the Stack with what that part is to its rows."""
    return lambda inner: in_context(stack.with_part(at, inner))


def _of_parts(setup: Average | Rows, step_of: Callable[[Setup], Step | None], absent: Step) -> Step | None:
    """The step of an Average or Rows from those of its parts; `absent` where a part does nothing."""
    if isinstance(setup, Average):
        steps = [step_of(part) for part in setup.parts]
        if all(step is None for step in steps):
            return None
        return Mean(tuple(step or absent for step in steps), setup.weights)
    groups: dict[Setup, list[int]] = {}
    for row, part in enumerate(setup.parts):
        groups.setdefault(part, []).append(row)
    by_part = {part: step_of(part) for part in groups}
    if all(step is None for step in by_part.values()):
        return None
    return ByRow(tuple(step or absent for step in by_part.values()), tuple(map(tuple, groups.values())))
