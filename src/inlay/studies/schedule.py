"""Running a study: every cell that is not done, by an engine, until nothing is left to do.

    look at the folder → start what is ready, the longest chain first → wait for something to happen → …

Nothing is remembered but in the study's folder. So a schedule may be killed and begun again, and several may work on
one folder: the lease of a cell decides who runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.studies.costs import Costs
from inlay.studies.engines.base import Ended, Engine, Moved
from inlay.studies.plan import Cell, View
from inlay.studies.records import Records

ELSEWHERE = 1.0
"""Seconds until a cell that another process runs is looked at again."""


class DiskFull(OSError):
    """No cell can be written any more; all that are done are whole."""


@dataclass
class Progress:
    """How far a study is."""

    done: int = 0
    failed: int = 0
    total: int = 0
    running: dict[str, Moved | None] = field(default_factory=dict)
    """Cells that this runner runs."""
    elsewhere: int = 0
    """Cells that another runner runs."""
    seconds_left: float | None = None


@dataclass
class Schedule:
    """A study on its way."""

    view: View
    engine: Engine
    tell: Callable[[Progress, View], None] = lambda progress, view: None
    records: Records | None = None
    """Where a record of every cell that is done is written at once."""

    def __post_init__(self) -> None:
        self.running: dict[str, Moved | None] = {}
        self.elsewhere: dict[str, float] = {}
        """Cells that another process has, and when to look again."""
        self.costs = Costs(self.view)
        self.left: float | None = None

    def run(self) -> View:
        """Until every slot is filled or has failed."""
        try:
            self._look()
            while True:
                self._start_what_is_ready()
                self._tell()
                if not self.running and not self.view.ready():
                    return self.view
                self._hear(self.engine.wait(0.5 if self.running else ELSEWHERE / 4))
        finally:
            self.engine.stop()

    def _start_what_is_ready(self) -> None:
        now = time.monotonic()
        ready = [
            cell for cell in self.view.ready()
            if cell.name not in self.running and self.elsewhere.get(cell.name, 0) <= now
        ]  # fmt: skip
        if not ready or not self.engine.room(0.0):
            return
        for cell in sorted(ready, key=lambda cell: -self.costs.urgency(cell)):  # equals keep the plan's order
            megabytes = self.costs.megabytes(cell)
            if not self.engine.room(megabytes):
                return
            self.running[cell.name] = None
            self.engine.start(cell.name, self.description(cell), megabytes)

    def description(self, cell: Cell) -> dict[str, Any]:
        """A cell as its worker needs it: plain data."""
        study = self.view.plan.study
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in cell.draft.settings.items()}
        settings |= {"host": study.hosts[cell.slot.host]}
        settings |= {} if cell.draft.work == "joint" else {"name": _inlay_name(cell)}  # there each task has its own
        return {
            "folder": str(self.view.folder.folder.absolute()),
            "cell": cell.name,
            "work": cell.draft.work,
            "settings": settings,
            "members": list(cell.members),
            "start": cell.start,
            "of": cell.of,
            "more": dict(cell.draft.more),
            "identity": dict(cell.identity),
            "drop_host": study.keep == "inlays" and settings["mode"] == "full",
            "again": cell.name in self.view.results,
        }

    def _hear(self, events: list[Ended | Moved]) -> None:
        ended = False
        for event in events:
            if isinstance(event, Moved):
                if event.cell in self.running:
                    self.running[event.cell] = event
                continue
            ended = True
            self.running.pop(event.cell, None)
            if event.ending == "full":
                raise DiskFull(28, f"the disk is full: {event.error}", str(self.view.folder.folder))
            if event.ending == "elsewhere":
                self.elsewhere[event.cell] = time.monotonic() + ELSEWHERE
            else:
                self.elsewhere.pop(event.cell, None)
            if event.died:
                self.view.folder.note_failure(event.cell, event.error, final=False)
                self.view.folder.log("failed", event.cell, error=event.error)
        if ended or self._is_due():
            self._look()

    def _look(self) -> None:
        self.view.look()
        if self.records is not None:
            self.records.add(self.view)
        self.costs.learn()
        self.left = self.costs.left()

    def _is_due(self) -> bool:
        """Whether something may have happened elsewhere."""
        return any(at <= time.monotonic() for at in self.elsewhere.values())

    def _tell(self) -> None:
        view = self.view
        names = view.names()
        done = sum(name in view.results for name in names)
        failed = sum(view.gave_up(name) for name in names)
        now = time.monotonic()
        away = sum(at > now and name not in view.results for name, at in self.elsewhere.items())
        left = self.left / max(1, len(self.running)) if self.left is not None else None
        self.tell(Progress(done, failed, len(names) + view.waiting(), dict(self.running), away, left), view)


def _inlay_name(cell: Cell) -> str:
    """Inlays are called like their tasks, so that a fusion's pictures name tasks; a fusion like its way."""
    slot = cell.slot
    name = f"{slot.task}-{slot.way}" if cell.members else slot.task
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name)[:60]


def retry(view: View) -> int:
    """Forget all failures, so that their cells are run again; how many there were."""
    for name in view.failures:
        view.folder.forgive(name)
    return len(view.failures)
