"""A trained run or a saved inlay, opened for use: its host, its task, and what it says about rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from inlay.host.heads import CHOICE, SPAN, Head
from inlay.host.verbs import activate
from inlay.runs.folder import RECORD, Run
from inlay.runs.settings import Settings
from inlay.training.codec import Answer, Codec, asking
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
        if isinstance(answer.prediction, tuple):
            return _several(task, answer)
        if task.kind == "spans":
            return {"answer": answer.prediction, "probability": round((answer.probabilities or (0.0,))[0], 6)}
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


def _several(task: Task, answer: Answer) -> dict[str, Any]:
    """Several labels of one text, or one for each word."""
    assert isinstance(answer.prediction, tuple)
    labels, shares = [task.labels[i] for i in answer.prediction], [round(p, 6) for p in answer.probabilities or ()]
    if task.kind == "tags":
        return {"tags": labels, "probabilities": shares}
    return {"labels": labels, "probabilities": dict(zip(task.labels, shares, strict=True))}


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
    name = set_in(bench.host, run) if record["name"] else None
    return _ready(bench, name, run, record["max_length"], run.config())


def set_in(host: PreTrainedModel, run: Run) -> str:
    """Set a run's inlay into a host, after the members that it is over; returns its name."""
    for member in sorted(run.members.iterdir()) if run.members.is_dir() else []:
        load(host, member, name=member.name, head=False)
    return _loaded(host, run.inlay)


def _loaded(host: PreTrainedModel, folder: Path) -> str:
    """The name of the inlay of a folder, set into the host."""
    name = load(host, folder)
    assert isinstance(name, str), "our own folders hold one inlay each"
    return name


def _ready(
    bench: Workbench, name: str | None, run: Run | None, max_length: int, config: Mapping[str, Any] | None = None
) -> Opened:
    if name is not None:
        bench.check_head(name)
        activate(bench.host, name)
    asked = {field: config[field] for field in Recipe.model_fields if config is not None and field in config}
    codec = asking(bench.codec(max_length), Recipe(**asked))
    return Opened(bench.host.eval(), codec, name, run)


def _task_of(manifest: Manifest) -> Task:
    """What can be known of a task from an inlay alone: a built-in one, or the labels of its head."""
    name = manifest.task
    if name in builtin_tasks():
        return builtin_tasks()[name]
    if manifest.head is None:
        raise CheckpointError(
            "this inlay has no head of its own, so its labels are not known; give the run it came from."
        )
    head = Head(**manifest.head)
    labels, called = head.names or (), name or manifest.name
    if head.per_token:
        return Task(name=called, kind="spans") if labels == SPAN else Task(name=called, kind="tags", labels=labels)
    if labels == CHOICE:
        return Task(name=called, kind="choice")
    if head.problem_type == "multi_label_classification":
        return Task(name=called, kind="multilabel", labels=labels)
    return Task(name=called, labels=labels) if len(labels) > 1 else Task(name=called, kind="regression")
