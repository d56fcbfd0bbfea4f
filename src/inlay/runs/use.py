"""A trained run or a saved inlay, opened for use: its host, its task, and what it says about rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import Manifest, read_manifest
from inlay.data import Task, builtin_tasks, prepare
from inlay.data.examples import Example, examples
from inlay.data.rows import Table, read_table
from inlay.errors import CheckpointError
from inlay.host.heads import Head
from inlay.host.verbs import activate
from inlay.runs.folder import RECORD, Run
from inlay.runs.settings import Settings
from inlay.training.codec import Answer, Codec
from inlay.training.evaluate import ask
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench


@dataclass(frozen=True)
class Opened:
    """A host with the trained setup active."""

    host: PreTrainedModel
    codec: Codec
    name: str | None
    run: Run | None

    def rows(self, split: str | None, file: Path | None) -> tuple[str, list[Example]]:
        """Labelled rows: of a file, or of a split of the run's own task; and what to call them."""
        if file is not None:
            return str(file), examples(self.codec.task, read_table(file))
        if self.run is None:
            raise CheckpointError("an inlay by itself has no rows: give --file, or the run it came from.")
        prepared = prepare(Settings(**self.run.config() | {"out": self.run.folder}))
        split = split or prepared.judge
        return split, prepared.split(split)

    def predict(self, table: Table) -> Iterator[dict[str, Any]]:
        """Each row with its label and probabilities."""
        rows = examples(self.codec.task, table, labelled=False)
        answers = ask(self.host, self.codec, self.codec.encode(rows, labelled=False))
        read = self.codec.task.columns(labelled=False)
        for row, answer in zip(table.rows, answers, strict=True):
            yield {**{column: row[column] for column in read}, **self._said(answer)}

    def _said(self, answer: Answer) -> dict[str, Any]:
        task = self.codec.task
        if task.kind != "classification":
            said: dict[str, Any] = {"prediction": answer.prediction}
            return said | ({"probabilities": list(answer.probabilities)} if answer.probabilities else {})
        label = task.labels[int(answer.prediction)] if int(answer.prediction) >= 0 else None
        shares = (
            dict(zip(task.labels, (round(p, 6) for p in answer.probabilities), strict=True))
            if answer.probabilities
            else None
        )
        return {"label": label, "probabilities": shares}


def open_for_use(path: Path, host_name: str | None = None) -> Opened:
    """Open a run folder, or an inlay's folder."""
    if (path / RECORD).is_file():
        return _open_run(Run(path), host_name)
    manifest = read_manifest(path)
    if manifest.method["kind"] == "fusion":
        raise CheckpointError(
            f"{path} is a fusion, which needs its members: give the run folder that `inlay fuse` wrote."
        )
    bench = Workbench.open(host_name or manifest.host["name"], _task_of(manifest))
    return _ready(bench, _loaded(bench.host, path), None, Recipe().max_length)


def _open_run(run: Run, host_name: str | None) -> Opened:
    record = run.record()
    if record.get("status") != "finished":
        raise CheckpointError(f"{run.folder} is not finished. To go on with it: inlay train --resume {run.folder}")
    host_name = str(run.host) if run.host.is_dir() else host_name or record["host"]
    bench = Workbench.open(host_name, Task(**record["task"]))
    for member in sorted(run.members.iterdir()) if run.members.is_dir() else []:
        load(bench.host, member, name=member.name)
    name = _loaded(bench.host, run.inlay) if record["name"] else None
    return _ready(bench, name, run, record["max_length"])


def _loaded(host: PreTrainedModel, folder: Path) -> str:
    """The name of the inlay of a folder, set into the host."""
    name = load(host, folder)
    assert isinstance(name, str), "our own folders hold one inlay each"
    return name


def _ready(bench: Workbench, name: str | None, run: Run | None, max_length: int) -> Opened:
    if name is not None:
        activate(bench.host, name)
    return Opened(bench.host.eval(), bench.codec(max_length), name, run)


def _task_of(manifest: Manifest) -> Task:
    """What can be known of a task from an inlay alone: a built-in one, or the labels of its head."""
    name = manifest.task
    if name in builtin_tasks():
        return builtin_tasks()[name]
    if manifest.head is None:
        raise CheckpointError(
            "this inlay has no head of its own, so its labels are not known; give the run it came from."
        )
    labels = Head(**manifest.head).names or ()
    return (
        Task(name=name or manifest.name, labels=labels)
        if len(labels) > 1
        else Task(name=name or manifest.name, kind="regression")
    )
