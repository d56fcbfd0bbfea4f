"""What training in stages keeps and forgets: every state against every task.

             mnli    rte          a row is a state: the host and inlay of a run, after its stage
runs/mnli   .8312  .5560          a column is a task, asked with the head of the run that was trained for it
runs/rte    .7790  .7112          hosts that answer in text need no head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inlay.checkpoints.ours import read
from inlay.data.task import Task
from inlay.errors import CheckpointError, ConfigError, InlayError
from inlay.host.heads import Head
from inlay.host.setup import Stack
from inlay.host.verbs import activate, add, inlays_of
from inlay.methods.head import HeadOnly
from inlay.runs.folder import Run, finished_runs, task_names
from inlay.runs.use import Opened, codec_for, open_for_use, set_in
from inlay.training.evaluate import ask
from inlay.training.workbench import Workbench


@dataclass(frozen=True)
class Matrix:
    """Scores of states on tasks; the main metric of each task first."""

    states: tuple[str, ...]
    tasks: tuple[str, ...]
    scores: tuple[tuple[dict[str, float], ...], ...]

    def rows(self) -> list[tuple[Any, ...]]:
        """A table of the main metrics, each row with its state's name."""
        return [(state, *(next(iter(cell.values())) for cell in row)) for state, row in self.pairs()]

    def pairs(self) -> list[tuple[str, tuple[dict[str, float], ...]]]:
        return list(zip(self.states, self.scores, strict=True))

    def facts(self) -> dict[str, Any]:
        states = [{"state": state, "scores": dict(zip(self.tasks, row, strict=True))} for state, row in self.pairs()]
        return {"tasks": list(self.tasks), "states": states}


def matrix(paths: Sequence[Path], split: str | None = None) -> Matrix:
    """Every run's state on every run's task. A task that is not its own is asked with the head of the first run of it.

    A joint run is a state for each of its tasks.
    """
    runs = finished_runs(paths)
    names = task_names(runs)
    askers: dict[str, Run] = {}
    for run in runs:
        askers.setdefault(names[run.address], run)
    scores = tuple(
        tuple(_score(run, asker, split, names[run.address] == name) for name, asker in askers.items()) for run in runs
    )
    return Matrix(tuple(run.address for run in runs), tuple(askers), scores)


def _score(state: Run, asker: Run, split: str | None, own: bool) -> dict[str, float]:
    """own: whether the asker's task is the state's own."""
    same = own and state.record()["task"] == asker.record()["task"]
    opened = open_for_use(state.address) if same else _with_head(state, asker)
    _, rows = opened.rows(split, None)
    encoded = opened.codec.encode(rows)
    return opened.codec.measure(encoded, ask(opened.host, opened.codec, encoded))


def _with_head(state: Run, asker: Run) -> Opened:
    """A state's host and inlay, opened for another run's task with that run's head."""
    record, task = state.record(), Task(**asker.record()["task"])
    try:
        bench = Workbench.open(str(state.host) if state.host.is_dir() else record["host"], task)
        name = None if record["mode"] == "full" or not record["name"] else set_in(bench.host, state)
        parts = [name] if name is not None else []
        if bench.form == "labels":
            parts.append(_add_head(bench, asker))
        if parts:
            activate(bench.host, parts[0] if len(parts) == 1 else Stack(*parts))
    except InlayError as error:
        raise ConfigError(f"{state.address} cannot be asked for {task.name}: {error}") from None
    codec = codec_for(bench, asker.record()["max_length"], asker.config())
    return Opened(bench.host.eval(), codec, name, asker)


def _add_head(bench: Workbench, asker: Run) -> str:
    """The head of a run as an inlay of its own; returns its name."""
    manifest, tensors = read(asker.inlay)
    if manifest.head is None:
        raise CheckpointError(f"{asker.address} has no head of its own")
    name = f"head-of-{manifest.name[:50]}"
    add(bench.host, name, HeadOnly(), head=Head(**manifest.head))
    with torch.no_grad():
        for key, tensor in inlays_of(bench.host)[name].tensors().items():
            tensor.copy_(tensors[key])
    return name
