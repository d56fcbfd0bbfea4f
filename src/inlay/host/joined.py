"""Plans of single setups, joined for one batch in which every row has its own.

`activate(host, Rows(...))` resolves the whole setup, which takes a while. A server resolves each of its setups once and
joins what it has: for each module the rows of one plan together, and rows whose plan leaves the module alone in a group
of their own. What comes out is the plan of `Rows` over these setups. Where the rows of a plan lie side by side, nothing
is copied on the way.

    plans    a  a  b  c  c        module m, where a and c act:    ByRow((a: 0 1), (unchanged: 2), (c: 3 4))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.front import InFront, line_up
from inlay.host.plan import Plan
from inlay.host.setup import Rows
from inlay.host.steps import ByRow, Unchanged
from inlay.methods.acting import Step

UNCHANGED = Unchanged()
Where = dict[str, tuple[str, int]]
"""A module at a branch's end → the branch, and which of its modules it is."""


class Joiner:
    """Joins plans of one host."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.shared = frozenset(anatomy.not_norms)
        self.where: Where = {
            module: (branch, at) for branch, end in anatomy.branches.items() for at, module in enumerate(end.modules)
        }

    def must_be_alone(self, plan: Plan) -> bool:
        """Whether a plan acts on what all rows of a batch share, so that they cannot differ in it."""
        return bool(plan.weights) or any(module in self.shared for module in plan.steps)

    def joined(self, plans: Sequence[Plan], each: int = 1) -> Plan:
        """One plan for a batch: row i as plan i has it. `each` is that of `Rows`."""
        groups: dict[int, list[int]] = {}
        for row, plan in enumerate(plans):
            groups.setdefault(id(plan), []).append(row)
        different = {id(plan): plan for plan in plans}
        if len(different) == 1:
            return plans[0]
        if any(map(self.must_be_alone, different.values())):
            raise SetupError("a setup that changes what all rows of a batch share cannot act beside another one.")
        together = list(different.values())
        by_row = _ByRow(groups)
        return Plan(
            Rows(*(plan.setup for plan in plans), each=each),
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


class _ByRow:
    """Steps by row, over the groups of one batch. Modules at which the same plans act share one index."""

    def __init__(self, groups: Mapping[int, list[int]]) -> None:
        self.groups = groups
        self.kept: dict[tuple[int, ...], ByRow] = {}

    def steps(self, tables: Mapping[int, Mapping[str, Step]]) -> dict[str, Step]:
        return {module: self._step(module, tables) for module in _union(tables.values())}

    def _step(self, module: str, tables: Mapping[int, Mapping[str, Step]]) -> Step:
        acting = tuple(key for key, table in tables.items() if module in table)
        like = self.kept.get(acting)
        groups = self._groups(frozenset(acting)) if like is None else None
        steps: list[Step] = []
        for table in tables.values():
            step = table.get(module, UNCHANGED)
            if step is not UNCHANGED or not steps or steps[-1] is not UNCHANGED:
                steps.append(step)
        if like is not None:
            return ByRow(tuple(steps), like.index, like.kept)
        made = self.kept[acting] = ByRow(tuple(steps), groups or ())
        return made

    def _groups(self, acting: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """The rows of each acting plan; those of others that follow each other are one group."""
        found: list[list[int]] = []
        idle = False
        for key, rows in self.groups.items():
            if key in acting or not idle:
                found.append([])
            found[-1] += rows
            idle = key not in acting
        return tuple(map(tuple, found))


def _union(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _front(front: InFront | None) -> tuple[nn.Module, ...]:
    """The modules of a front that all rows of a plan have."""
    return () if front is None else front.parts[0]


def _shifts(plans: Sequence[Plan]) -> tuple[int, ...]:
    shifts = tuple(plan.shifts[0] for plan in plans)
    return shifts if len(set(shifts)) > 1 else shifts[:1]
