"""Plans of single setups, joined for one batch in which every row has its own.

`activate(host, Rows(...))` resolves the whole setup, which takes a while. A server resolves each of its setups once and
joins what it has: for each module the rows of one plan together, and rows whose plan leaves the module alone in a group
of their own. What comes out is the plan of `Rows` over these setups. Where the rows of a plan lie side by side, nothing
is copied on the way, and what is alike acts in one product (`methods/together.py`).

    plans    a  a  b  c  c        module m, where a and c act:    ByRow((a: 0 1), (unchanged: 2), (c: 3 4))
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

from torch import nn

from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.front import InFront, line_up
from inlay.host.plan import Plan
from inlay.host.setup import Rows
from inlay.host.steps import ByRow, Unchanged
from inlay.methods.acting import Add, Step
from inlay.methods.together import Together, likeness

UNCHANGED = Unchanged()
Where = dict[str, tuple[str, int]]
"""A module at a branch's end → the branch, and which of its modules it is."""


class Joiner:
    """Joins plans of one host."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.shared = frozenset(anatomy.not_norms)
        self.together: set[tuple[int, str]] = set()
        """Likeness of plans, and modules where their steps act together."""
        self.where: Where = {
            module: (branch, at) for branch, end in anatomy.branches.items() for at, module in enumerate(end.modules)
        }

    def must_be_alone(self, plan: Plan) -> bool:
        """Whether a plan acts on what all rows of a batch share, so that they cannot differ in it."""
        return bool(plan.weights) or not self.shared.isdisjoint(plan.steps)

    def likeness(self, plan: Plan) -> int:
        """Plans with the same number have steps that act together, so that their rows had better lie side by side."""
        found = {module: likeness(step) for module, step in sorted(plan.steps.items())}
        number = hash(tuple(found.items()))
        self.together.update((number, module) for module, kind in found.items() if kind is not None)
        return number

    def joined(self, plans: Sequence[Plan], each: int = 1, likeness: Mapping[int, int] | None = None) -> Plan:
        """One plan for a batch: row i as plan i has it. `each` is that of `Rows`.

        likeness: by a plan's id, if their steps are to act together where their rows lie side by side; none of these
        plans must be alone.
        """
        groups: dict[int, list[int]] = {}
        for row, plan in enumerate(plans):
            groups.setdefault(id(plan), []).append(row)
        different = {id(plan): plan for plan in plans}
        if len(different) == 1:
            return plans[0]
        if likeness is None and any(map(self.must_be_alone, different.values())):
            raise SetupError("a setup that changes what all rows of a batch share cannot act beside another one.")
        together = list(different.values())
        by_row = _ByRow(groups, likeness or {}, self.together)
        return Plan(
            Rows.of([plan.setup for plan in plans], each),
            by_row.steps({key: plan.steps for key, plan in different.items()}),
            inputs=by_row.steps({key: plan.inputs for key, plan in different.items()}),
            keys={path: front for path in _union(plan.keys for plan in together)
                  if (front := line_up([_front(plan.keys.get(path)) for plan in plans])) is not None},
            tokens=line_up([_front(plan.tokens) for plan in plans]),
            shifts=_shifts(plans),
            attends=any(plan.attends for plan in together),
            keeps=frozenset().union(*(plan.keeps for plan in together)),
            lasts=self._lasts(together),
            branches=frozenset().union(*(plan.branches for plan in together)),
            layers=frozenset().union(*(plan.layers for plan in together)),
            whole_texts=any(plan.whole_texts for plan in together),
            rows=len(plans) * each,
            masks=any(plan.masks for plan in together),
            pools=any(plan.pools for plan in together),
            per_token=any(plan.per_token for plan in together),
            draws=tuple(draw for plan in together for draw in plan.draws),
        )  # fmt: skip

    def _lasts(self, plans: Sequence[Plan]) -> frozenset[str]:
        """The last module of each branch at which any row acts."""
        found: dict[str, tuple[int, str]] = {}
        for plan in plans:
            for module in plan.lasts:
                branch, at = self.where[module]
                found[branch] = max(found.get(branch, (-1, "")), (at, module))
        return frozenset(module for _, module in found.values())


@dataclass(frozen=True)
class _Acting:
    """Which plans act at a module, in the order of the batch."""

    keys: tuple[int | None, ...]
    """The plans; None: plans that follow each other and do not act."""
    groups: tuple[tuple[int, ...], ...]
    """The rows of each."""
    runs: tuple[tuple[int, int, int | None], ...]
    """Where plans that are alike begin and end, and their likeness."""


class _ByRow:
    """Steps by row, over the groups of one batch. Modules at which the same plans act share one index."""

    def __init__(
        self, groups: Mapping[int, list[int]], likeness: Mapping[int, int], together: Set[tuple[int, str]]
    ) -> None:
        self.groups, self.likeness, self.together = groups, likeness, together
        self.acting: dict[tuple[int, ...], _Acting] = {}
        self.kept: dict[Hashable, ByRow] = {}

    def steps(self, tables: Mapping[int, Mapping[str, Step]]) -> dict[str, Step]:
        return {module: self._step(module, tables) for module in _union(tables.values())}

    def _step(self, module: str, tables: Mapping[int, Mapping[str, Step]]) -> Step:
        there = tuple(key for key, table in tables.items() if module in table)
        if there not in self.acting:
            self.acting[there] = self._found(frozenset(there))
        acting = self.acting[there]
        steps = [UNCHANGED if key is None else tables[key][module] for key in acting.keys]
        alike = tuple(
            part for a, b, kind in acting.runs
            for part in ([(a, b)] if (kind, module) in self.together else [(i, i + 1) for i in range(a, b)])
        )  # fmt: skip
        together = tuple(_together(steps[a:b], acting.groups[a:b]) for a, b in alike)
        like = self.kept.get((there, alike))
        if like is not None:
            return ByRow(together, like.index, like.kept)
        index = tuple(tuple(row for group in acting.groups[a:b] for row in group) for a, b in alike)
        made = self.kept[there, alike] = ByRow(together, index)
        return made

    def _found(self, acting: frozenset[int]) -> _Acting:
        """The rows of each acting plan; those of others that follow each other are one group."""
        keys: list[int | None] = []
        groups: list[list[int]] = []
        for key, rows in self.groups.items():
            own = key if key in acting else None
            if own is not None or not keys or keys[-1] is not None:
                keys.append(own)
                groups.append([])
            groups[-1] += rows
        kinds = [None if key is None else self.likeness.get(key) for key in keys]
        begins = [i for i, kind in enumerate(kinds) if i == 0 or kind is None or kind != kinds[i - 1]]
        runs = [(a, b, kinds[a]) for a, b in zip(begins, (*begins[1:], len(keys)), strict=True)]
        return _Acting(tuple(keys), tuple(map(tuple, groups)), tuple(runs))


def _together(steps: Sequence[Step], groups: Sequence[tuple[int, ...]]) -> Step:
    if len(steps) == 1:
        return steps[0]
    return Together(cast(tuple[Add, ...], tuple(steps)), tuple(map(len, groups)))


def _union(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _front(front: InFront | None) -> tuple[nn.Module, ...]:
    """The modules of a front that all rows of a plan have."""
    return () if front is None else front.parts[0]


def _shifts(plans: Sequence[Plan]) -> tuple[int, ...]:
    shifts = tuple(plan.shifts[0] for plan in plans)
    return shifts if len(set(shifts)) > 1 else shifts[:1]
