"""What training together does to tasks: ways to train beside each other, and each against training alone.

                 single   multi-task        MT-A              fusion of single
rte (accuracy)   71.04    66.10 ▼ −4.94     71.12   +0.08     76.82 ▲ +5.78
…
mean             …

Each score with its difference in points; ▲ and ▼ mark differences of 0.3 points and more, as AdapterFusion's tables
do (Pfeiffer et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.data.task import Task
from inlay.errors import ConfigError
from inlay.runs.folder import Run, TaskRun, finished_runs, run_at, task_names
from inlay.runs.use import open_for_use
from inlay.training.evaluate import ask
from inlay.training.recipe import LOWER_IS_BETTER

MARK = 0.3
"""Points from which on a difference is marked."""
ALONE = {"inlay": "single", "full": "full fine-tuning", "head": "head only"}
"""How runs of one task were trained, by their mode; the first that is there is what the others are compared with."""
TOGETHER = {"full": "multi-task", "mt-a": "MT-A", "inlay": "side by side", "head": "heads side by side"}
"""How joint runs were."""
WAYS = (*ALONE.values(), *TOGETHER.values())


@dataclass(frozen=True)
class Cell:
    """One way to train on one task: the mean of its runs' scores, of the task's main metric."""

    score: float
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Every way on every task."""

    tasks: dict[str, str]
    """Each task's main metric."""
    ways: tuple[str, ...]
    """What the others are compared with stands first."""
    cells: dict[tuple[str, str], Cell]

    def score(self, task: str, way: str) -> float | None:
        cell = self.cells.get((task, way))
        return None if cell is None else cell.score

    def points(self, task: str, way: str) -> float | None:
        """The difference to training alone, in points; None where one of the two is missing."""
        return _difference(self.score(task, way), self.score(task, self.ways[0]))

    def complete(self) -> list[str]:
        """The tasks that every way has."""
        return [task for task in self.tasks if all((task, way) in self.cells for way in self.ways)]

    def means(self) -> dict[str, float]:
        """Of every way over the tasks that all of them have; empty where there is no such task."""
        full = self.complete()
        if not full:
            return {}
        return {way: sum(self.cells[task, way].score for task in full) / len(full) for way in self.ways}

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows, for people."""
        base = self.ways[0]

        def cell(task: str, way: str) -> str:
            lower = self.tasks[task] in LOWER_IS_BETTER
            return _shown(self.score(task, way), self.points(task, way), way == base, lower)

        rows = [(f"{task} ({metric})", *(cell(task, way) for way in self.ways)) for task, metric in self.tasks.items()]
        if means := self.means():
            count = len(self.complete())
            label = "mean" if count == len(self.tasks) else f"mean of the {count} with all"
            rows.append((label, *(_shown(means[w], _difference(means[w], means[base]), w == base) for w in self.ways)))
        return ("", *self.ways), rows

    def facts(self) -> dict[str, Any]:
        scores = {
            task: {
                way: {"score": cell.score, "points": self.points(task, way), "runs": list(cell.runs)}
                for way in self.ways if (cell := self.cells.get((task, way))) is not None
            }
            for task in self.tasks
        }  # fmt: skip
        return {
            "metrics": self.tasks, "ways": list(self.ways), "compared_with": self.ways[0], "scores": scores,
            "means": self.means(),
        }  # fmt: skip


def compare(paths: Sequence[Path], split: str | None = None, rows: int | None = None) -> Comparison:
    """Every run on its own task, measured anew; several runs of one way and task (seeds) count as their mean."""
    runs = finished_runs(paths)
    ways = {run.address: way_of(run) for run in runs}
    base = next((way for way in ALONE.values() if way in ways.values()), None)
    if base is None:
        raise ConfigError(
            f"none of these runs was trained alone, so there is nothing to compare {', '.join(set(ways.values()))} "
            f"with. Give a run of one task as well, as `inlay train --task …` makes it."
        )
    names, tasks = task_names(runs), dict[str, Task]()
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for run in runs:
        task, name = Task(**run.record()["task"]), names[run.address]
        first = tasks.setdefault(name, task)
        if (first.labels, first.main) != (task.labels, task.main):
            raise ConfigError(f"{run.address}: its task {name!r} has other labels or another metric than before.")
        found.setdefault((name, ways[run.address]), []).append((_score(run, split, rows), run.address))
    cells = {
        at: Cell(sum(score for score, _ in each) / len(each), tuple(name for _, name in each))
        for at, each in found.items()
    }
    return Comparison(
        {name: task.main for name, task in tasks.items()}, _ordered(set(ways.values()), base), cells
    )  # fmt: skip


def way_of(run: Run) -> str:
    """How a run was trained, in a word."""
    record = run.record()
    if record["mode"] != "fusion":
        return (TOGETHER if isinstance(run, TaskRun) else ALONE)[record["mode"]]
    members = [_run_of(Path(member)) for member in run.config().get("members") or ()]
    ways = list(dict.fromkeys(way_of(member) for member in members if member is not None))
    return f"fusion of {' and '.join(ways) or 'single'}"


def _run_of(member: Path) -> Run | None:
    """The run that a fusion's member came from, if it is still there."""
    if (run := run_at(member)) is not None:
        return run
    if member.parent.name == "inlays":
        return run_at(f"{member.parent.parent}:{member.name}")
    return run_at(member.parent)


def _score(run: Run, split: str | None, rows: int | None) -> float:
    opened = open_for_use(run.address)
    _, asked = opened.rows(split, None)
    encoded = opened.codec.encode(asked[:rows])
    return float(opened.codec.measure(encoded, ask(opened.host, opened.codec, encoded))[opened.codec.task.main])


def _ordered(ways: set[str], base: str) -> tuple[str, ...]:
    """What is compared with, then other ways as they are listed, then fusions."""
    known = [base, *(way for way in WAYS if way in ways and way != base)]
    return (*known, *sorted(ways - set(known)))


def _difference(score: float | None, base: float | None) -> float | None:
    return None if score is None or base is None else round(100 * (score - base), 6)


def _shown(score: float | None, points: float | None, base: bool, lower: bool = False) -> str:
    """lower: less is the better."""
    if score is None:
        return "—"
    if base or points is None:
        return f"{100 * score:.2f}"
    gain = -points if lower else points
    mark = "▲" if gain >= MARK else "▼" if gain <= -MARK else " "
    sign = "+" if points >= 0 else "−"
    return f"{100 * score:.2f} {mark} {sign}{abs(points):.2f}"
