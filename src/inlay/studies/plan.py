"""From a study to its cells: which slots there are, what they need, which candidate fills each.

A candidate's name is a digest of all that decides it, and so of the names of its members. Which candidate of a member
is taken is known when all of them are done: until then, what needs it has no name and waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from inlay.errors import CheckpointError
from inlay.studies.cells import FORMAT, STUDY, Failure, Result, StudyFolder
from inlay.studies.file import Study, wrong_names
from inlay.studies.identity import CODE, all_digests, cell_name, host_digest, rows_digest
from inlay.studies.ways import Draft, Slot, drafts, slots_of


@dataclass(frozen=True)
class Cell:
    """A candidate with its name."""

    name: str
    draft: Draft
    identity: Mapping[str, Any]
    members: tuple[str, ...] = ()
    """The names of the cells that it needs."""
    start: str | None = None
    of: str | None = None

    @property
    def slot(self) -> Slot:
        return self.draft.slot

    def needs(self) -> tuple[str, ...]:
        return (*self.members, *(name for name in (self.start, self.of) if name is not None))


@dataclass(frozen=True)
class Searched:
    """All that choosing from a grid may know of a candidate: nothing of the judged rows is in it."""

    cell: str
    validation: float


def chosen(candidates: list[Searched]) -> str:
    """The best by its validation score, the first of equal ones."""
    return max(candidates, key=lambda one: one.validation).cell


@dataclass
class Plan:
    """A study with the digests of its hosts and rows."""

    study: Study
    hosts: Mapping[str, str]
    rows: Mapping[str, str]
    code: int = CODE
    """The code that cells were run with: tables of an older study are still made when its cells would be run anew."""

    @classmethod
    def of(cls, study: Study) -> Plan:
        """Read the hosts' and rows' digests from where they are; what is not there is told at once."""
        hosts = [(f"host {name}", partial(host_digest, path)) for name, path in study.hosts.items()]
        rows = [
            (f"task {name}", partial(rows_digest, name, study.settings | said, study.data_dir))
            for name, said in study.tasks.items()
        ]
        found = all_digests([*hosts, *rows])
        return cls(
            study,
            {name: found[f"host {name}"] for name in study.hosts},
            {name: found[f"task {name}"] for name in study.tasks},
        )

    @classmethod
    def opened(cls, folder: StudyFolder) -> Plan:
        """The plan that a study's folder was begun with."""
        facts = folder.facts()
        study, problems = Study(**facts["study"]), list[str]()
        for what, named, digests in (("host", study.hosts, facts["hosts"]), ("task", study.tasks, facts["rows"])):
            problems += [f"{what} {name!r} has no digest." for name in named if name not in digests]
        if problems := wrong_names(study) + problems:
            raise CheckpointError("\n".join((f"{folder.folder / STUDY} is not whole:", *problems)))
        return cls(study, facts["hosts"], facts["rows"], facts["code"])

    def facts(self) -> dict[str, Any]:
        """As study.json holds it."""
        study = self.study.model_dump(mode="json", exclude_defaults=True)
        return {"format": FORMAT, "study": study, "hosts": dict(self.hosts), "rows": dict(self.rows), "code": self.code}

    @cached_property
    def shown(self) -> list[Slot]:
        """The slots of the table, way by way."""
        return [slot for way in self.study.ways for slot in slots_of(self.study, way)]

    @cached_property
    def drafts(self) -> dict[Slot, list[Draft]]:
        """The candidates of every slot, those before it that it needs; what the table does not show is there too."""
        found: dict[Slot, list[Draft]] = {}

        def look(slot: Slot) -> None:
            if slot in found:
                return
            made = drafts(self.study, slot)
            for need in {need: None for draft in made for need in draft.needs()}:
                look(need)
            found[slot] = made

        for slot in self.shown:
            look(slot)
        return found

    def identity(self, draft: Draft, cells: Mapping[Slot, str]) -> dict[str, Any]:
        """Everything that decides a candidate's result."""
        slot = draft.slot
        found: dict[str, Any] = {"code": self.code, "work": draft.work, "host": self.hosts[slot.host]}
        rows: Any = self.rows.get(slot.task)
        if draft.work == "joint":
            rows = {task: self.rows[task] for task in draft.settings["tasks"]}
        found |= {"rows": rows, "settings": draft.deciding()}
        if draft.members:
            found["members"] = [cells[member] for member in draft.members]
        for name in ("start", "of"):
            if (need := getattr(draft, name)) is not None:
                found[name] = cells[need]
        return found | ({"more": dict(draft.more)} if draft.more else {})


@dataclass
class View:
    """A plan and how far its folder is. `look` again after something has changed."""

    plan: Plan
    folder: StudyFolder
    results: dict[str, Result] = field(default_factory=dict)
    """Of the cells that are done; each is read once."""
    failures: dict[str, Failure] = field(default_factory=dict)
    cells: dict[Slot, list[Cell]] = field(default_factory=dict)
    """The candidates of every slot whose members are chosen."""
    filled: dict[Slot, Cell] = field(default_factory=dict)
    """The candidate that each slot has chosen."""
    failed: set[Slot] = field(default_factory=set)
    """Slots that nothing can fill any more, because a candidate or a member has failed for good."""

    def look(self) -> View:
        """Read what is new in the folder. A candidate that failed for good is out; a slot of such alone has failed."""
        broken = self.folder.failures()
        self.failures = {name: failure for name in broken if (failure := self.folder.failure(name)) is not None}
        self.failed = set()
        begun = self.folder.begun()
        before = -1
        while len(self.filled) + len(self.failed) > before:  # what is chosen may let others choose
            before = len(self.filled) + len(self.failed)
            for slot, made in self.plan.drafts.items():
                if slot not in self.filled and slot not in self.failed:
                    self._look_at(slot, made, begun)
        return self

    def _look_at(self, slot: Slot, made: list[Draft], begun: set[str]) -> None:
        needs = {need for draft in made for need in draft.needs()}
        if needs & self.failed or self._chooser(slot) in self.failed:
            self.failed.add(slot)
        if slot in self.failed or not all(need in self.filled for need in needs):
            return
        if slot not in self.cells:
            named = [self._named(draft) for draft in self._searched(slot, made)]
            if not named:
                return
            self.cells[slot] = named
        cells = self.cells[slot]
        for cell in cells:
            if cell.name in self.results or cell.name not in begun:
                continue
            if (result := self.folder.result(cell.name)) is not None:
                self.results[cell.name] = result
        if all(cell.name in self.results or self.gave_up(cell.name) for cell in cells):
            self._choose(slot, cells)

    def _searched(self, slot: Slot, made: list[Draft]) -> list[Draft]:
        """All points of the grid; only the chosen one where the first seed chooses for all; none while it has not."""
        chooser = self._chooser(slot)
        if chooser == slot or len(made) == 1:
            return made
        if chooser not in self.filled:
            return []
        point = self.filled[chooser].draft.point
        return [draft for draft in made if draft.point == point]

    def _chooser(self, slot: Slot) -> Slot:
        """The slot whose validation rows choose this one's point of the grid."""
        first = self.plan.study.seeds_of(slot.way)[0]
        searches_once = self.plan.study.search == "first" and len(self.plan.drafts[slot]) > 1
        return replace(slot, seed=first) if searches_once else slot

    def _choose(self, slot: Slot, cells: list[Cell]) -> None:
        """By the validation rows alone; with search `mean` when all seeds are done, or have failed."""
        known = [cells]
        if self.plan.study.search == "mean" and len(cells) > 1:
            seeds = [replace(slot, seed=seed) for seed in self.plan.study.seeds_of(slot.way)]
            known = [self.cells.get(one, []) for one in seeds if one not in self.failed]
            if any(not one or not all(c.name in self.results or self.gave_up(c.name) for c in one) for one in known):
                return  # `look` comes back when the other seeds are done
            known = [one for one in known if any(c.name in self.results for c in one)]
        candidates = []
        for i, cell in enumerate(cells):
            found = [self.results[one[i].name]["selected"] for one in known if one[i].name in self.results]
            if cell.name in self.results and len(found) == len(known):
                candidates.append(Searched(cell.name, sum(map(_number, found)) / len(found)))
        if not candidates:
            self.failed.add(slot)
            return
        name = chosen(candidates)
        self.filled[slot] = next(cell for cell in cells if cell.name == name)

    def _named(self, draft: Draft) -> Cell:
        cells = {need: self.filled[need].name for need in draft.needs()}
        identity = self.plan.identity(draft, cells)
        return Cell(
            cell_name(identity),
            draft,
            identity,
            tuple(cells[member] for member in draft.members),
            cells[draft.start] if draft.start is not None else None,
            cells[draft.of] if draft.of is not None else None,
        )

    def gave_up(self, name: str) -> bool:
        """Whether a cell broke as often as the study allows, or so that trying again is of no use."""
        failure = self.failures.get(name)
        return failure is not None and (failure.final or failure.tries >= self.plan.study.tries)

    def ready(self) -> list[Cell]:
        """Cells that could be run now, each once, in the plan's order.

        Where only the record of a member is here and not its weights, the member comes first, again.
        """
        found: dict[str, Cell] = {}
        named: dict[str, Cell] = {}

        def want(cell: Cell) -> None:
            lacking = [name for name in cell.needs() if not self.folder.has_weights(name)]
            if lacking and not named:
                named.update(self.names())
            for name in lacking:
                want(named[name])
            if not lacking and not self.gave_up(cell.name):
                found.setdefault(cell.name, cell)

        for slot, cells in self.cells.items():
            if slot not in self.filled:
                for cell in cells:
                    if cell.name not in self.results and not self.gave_up(cell.name):
                        want(cell)
        return list(found.values())

    def names(self) -> dict[str, Cell]:
        """Every cell that has a name, each once."""
        return {cell.name: cell for cells in self.cells.values() for cell in cells}

    def waiting(self) -> int:
        """Candidates that have no name yet, because they wait for others."""
        return sum(
            1 if slot != self._chooser(slot) else len(made)
            for slot, made in self.plan.drafts.items()
            if slot not in self.cells and slot not in self.failed
        )


def view_of(folder: Path) -> View:
    """A study's folder as it is."""
    there = StudyFolder(folder)
    return View(Plan.opened(there), there).look()


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value
