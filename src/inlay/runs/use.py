"""A trained run or a saved inlay, opened for use: its host, its task, and what it says about rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import Manifest, read_manifest
from inlay.data import Data, Prepared, Task, builtin_tasks, prepare
from inlay.data.errors import DataError
from inlay.data.examples import Example, examples, grouped
from inlay.data.rows import Table, read_table
from inlay.data.sources import read_splits
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import CHOICE, SPAN, Head
from inlay.host.verbs import activate
from inlay.runs.allowed import Allowed
from inlay.runs.folder import RECORD, Run, run_at
from inlay.runs.settings import PATHS, Settings
from inlay.training.codec import Answer, Codec, EncodedSplit, asking
from inlay.training.evaluate import Route, ask
from inlay.training.generation import write
from inlay.training.progress import Silent, Watcher, counter
from inlay.training.recipe import Generation, Recipe
from inlay.training.workbench import Workbench


@dataclass(frozen=True)
class Opened:
    """A host with the trained setup active."""

    host: PreTrainedModel
    codec: Codec
    name: str | None
    run: Run | None

    def reading(self, **columns: str | None) -> Opened:
        """The same, for rows whose columns have other names: text, pair, label."""
        return replace(self, codec=replace(self.codec, task=self.codec.task.reading(**columns)))

    def writing(self, **given: Any) -> Opened:
        """The same, with other settings of how texts are written; what is None stays as the run has it."""
        said = {name: value for name, value in given.items() if value is not None}
        if said and self.codec.form != "text":
            names = ", ".join(f"`{name}`" for name in said)
            raise ConfigError(f"{names}: nothing would use it, because this host does not answer in text.")
        generation = Generation(**self.codec.generation.model_dump() | said)
        return replace(self, codec=replace(self.codec, generation=generation))

    def rows(
        self, split: str | None, file: Path | None = None, data_dir: Path | None = None
    ) -> tuple[str, list[Example]]:
        """Labelled rows: of a file, or of a split of its own task; and what to call them."""
        if file is not None:
            found = examples(self.codec.task, read_table(file))
            return str(file), grouped(found) if self.codec.task.kind == "text" else found
        prepared = self._prepared(data_dir)
        split = split or prepared.judge
        return split, prepared.split(split)

    def listening_rows(self) -> tuple[str, EncodedSplit]:
        """Rows to see by what a fusion listens to: validation rows, or training rows of a run without any."""
        prepared = self._prepared()
        split = "validation" if prepared.validation else "train"
        return split, self.codec.encode(prepared.split(split))

    def _prepared(self, data_dir: Path | None = None) -> Prepared:
        """Every split of its own task, read as it was when it was trained."""
        return prepare(self._data(data_dir), self._task)

    @property
    def _task(self) -> Task:
        """Its task, and where its rows are on the hub, which no record says."""
        known = builtin_tasks().get(self.codec.task.name)
        return self.codec.task if known is None else self.codec.task.model_copy(update={"hub": known.hub})

    def _data(self, data_dir: Path | None) -> Data:
        """Where the rows of its own task are."""
        if self.run is not None:
            config = self.run.config()
            if data_dir is not None:
                config = {name: value for name, value in config.items() if name not in (*PATHS, "hub")}
                config["data_dir"] = data_dir
            return Settings(**config | {"out": self.run.folder})
        name = self.codec.task.name
        if data_dir is None and name not in builtin_tasks():
            raise CheckpointError("an inlay by itself has no rows: give `file`, `data_dir`, or the run it came from.")
        return Data(task=name, data_dir=data_dir)

    def table(self, split: str | None, data_dir: Path) -> Table:
        """Rows to be labelled: a split of its task as a folder has it, by default test, or else validation."""
        there = read_splits(self._data(data_dir), self._task)
        split = split or next(name for name in ("test", "validation", *there) if name in there)
        if split not in there:
            raise DataError(f"{data_dir} has no {split} rows of {self.codec.task.name}; it has {', '.join(there)}.")
        return there[split]

    def predict(self, table: Table, watch: Watcher | None = None) -> Iterator[dict[str, Any]]:
        """Each row as it is, with its label and probabilities; these are `predicted_…` where it has such columns."""
        rows = examples(self.codec.task, table, labelled=False)
        taken = {column for row in table.rows for column in row}
        for row, answer in zip(table.rows, self.answers(self.codec.encode(rows, labelled=False), watch), strict=True):
            yield {**row, **{free(name, taken): value for name, value in self._said(answer).items()}}

    def writes_one(self, table: Table) -> bool:
        """Whether its answer to these rows is one text, which can be shown as it is written."""
        return self.codec.form == "text" and self.codec.task.kind == "text" and len(table) == 1

    def write(self, table: Table, on_text: Callable[[str], None] | None = None) -> list[str]:
        """The texts for rows; that of a single one is handed out piece by piece, where there are no beams."""
        rows = self.codec.encode(examples(self.codec.task, table, labelled=False), labelled=False)
        stream = on_text if self.codec.generation.beams == 1 else None
        texts = write(self.host, self.codec, rows, on_text=stream)
        if on_text is not None and stream is None:
            on_text(texts[0])
        return texts

    def answers(
        self, split: EncodedSplit, watch: Watcher | None = None, route: Route | None = None
    ) -> list[Answer]:  # fmt: skip
        """What the host says about rows."""
        watch, total = watch or Silent(), len(split.examples)
        watch.start("rows", 0, total)
        try:
            return ask(self.host, self.codec, split, watch=counter(watch, total), route=route or Route())
        finally:
            watch.stop()

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
        return {"label": label, "probabilities": shares} | ({"said": answer.said} if answer.said is not None else {})


def free(name: str, taken: Collection[str]) -> str:
    """A name that no column of the rows has: an answer never stands in for what a row says itself."""
    while name in taken:
        name = f"predicted_{name}"
    return name


def _several(task: Task, answer: Answer) -> dict[str, Any]:
    """Several labels of one text, or one for each word."""
    assert isinstance(answer.prediction, tuple)
    labels, shares = [task.labels[i] for i in answer.prediction], [round(p, 6) for p in answer.probabilities or ()]
    if task.kind == "tags":
        return {"tags": labels, "probabilities": shares}
    return {"labels": labels, "probabilities": dict(zip(task.labels, shares, strict=True))}


def open_for_use(path: str | Path, host_name: str | None = None, allowed: Allowed = Allowed()) -> Opened:  # noqa: B008 (frozen)
    """Open a run folder, one task of a joint run (`runs/joint:rte`), or an inlay's folder."""
    path, run = Path(path), run_at(path)
    if run is not None:
        return _open_run(run.of_one_task(), host_name, allowed)
    manifest = read_manifest(path)
    if manifest.method["kind"] == "fusion":
        raise CheckpointError(
            f"{path} is a fusion, which needs its members: give the run folder that `inlay fuse` wrote."
        )
    host_name = host_name or manifest.host["name"]
    if not host_name:
        raise ConfigError(f"{path} does not name its host; give `host`.")
    task, max_length = task_of(manifest)
    bench = Workbench.open(host_name, task, trust_remote_code=allowed.trust_remote_code)
    return _ready(bench, _loaded(bench.host, path, allowed), None, max_length, generation_of(manifest))


def _open_run(run: Run, host_name: str | None, allowed: Allowed) -> Opened:
    record = finished_record(run)
    if run.host.is_dir() and host_name is not None:
        raise ConfigError(f"{run.folder} has a host of its own, which was trained, and can be used with no other one.")
    host_name = str(run.host) if run.host.is_dir() else host_name or record["host"]
    bench = Workbench.open(host_name, Task(**record["task"]), trust_remote_code=allowed.trust_remote_code)
    name = set_in(bench.host, run, allowed) if record["name"] else None
    return _ready(bench, name, run, record["max_length"], run.config())


def finished_record(run: Run) -> dict[str, Any]:
    """What a run that can be used says of itself; its files are those that it wrote."""
    record = run.record()
    if record.get("status") != "finished":
        raise CheckpointError(
            f"{run.folder} is not finished. To go on with it: inlay train --resume {run.folder}; "
            f"to take its best state so far: inlay finish {run.folder}"
        )
    if not isinstance(record["host"], str) or not isinstance(record["task"], dict) or record["max_length"] is None:
        raise CheckpointError(f"{run.folder / RECORD} names no host, task or max_length.")
    _check_inlay(run, record)
    run.check_host()
    return record


def set_in(host: PreTrainedModel, run: Run, allowed: Allowed = Allowed()) -> str:  # noqa: B008 (frozen)
    """Set a run's inlay into a host, after the members that it is over; returns its name."""
    for member in run.member_folders():
        load(host, member, name=member.name, head=False, any_host=allowed.any_host)
    return _loaded(host, run.inlay, allowed)


def _check_inlay(run: Run, record: dict[str, Any]) -> None:
    """The inlay is the one that the record speaks of."""
    wanted = record.get("inlay_sha256")
    if record["name"] and wanted is not None and read_manifest(run.inlay).sha256 != wanted:
        raise CheckpointError(
            f"{run.inlay} is not the inlay that {run.folder / RECORD} speaks of: it was replaced after the run. "
            f"Use it by itself, as {run.inlay}, or train again."
        )


def _loaded(host: PreTrainedModel, folder: Path, allowed: Allowed) -> str:
    """The name of the inlay of a folder, set into the host."""
    name = load(host, folder, any_host=allowed.any_host)
    assert isinstance(name, str), "our own folders hold one inlay each"
    return name


def _ready(
    bench: Workbench, name: str | None, run: Run | None, max_length: int, config: Mapping[str, Any] | None = None
) -> Opened:
    if name is not None:
        bench.check_head(name)
        activate(bench.host, name)
    return Opened(bench.host.eval(), codec_for(bench, max_length, config), name, run)


def codec_for(bench: Workbench, max_length: int, config: Mapping[str, Any] | None = None) -> Codec:
    """A codec that asks as a run's settings say."""
    asked = {field: config[field] for field in Recipe.model_fields if config is not None and field in config}
    return asking(bench.codec(max_length), Recipe(**asked))


def generation_of(manifest: Manifest) -> Mapping[str, Any]:
    """How an inlay alone writes texts, where its run noted it."""
    found = (manifest.data or {}).get("generation", {})
    if not isinstance(found, dict):
        raise CheckpointError(f"the manifest of {manifest.name!r} has no settings in `generation`, but {found!r:.80}.")
    return {name: value for name, value in found.items() if name in Generation.model_fields}


def task_of(manifest: Manifest) -> tuple[Task, int]:
    """The task of an inlay alone, and how long its inputs may be.

    Earlier versions noted neither: then it is a built-in task, or one with the labels of its head.
    """
    usual, name = Recipe().max_length, manifest.task
    if manifest.data is not None:
        task, max_length = manifest.data.get("task"), manifest.data.get("max_length")
        if not isinstance(task, dict) or type(max_length) is not int or max_length < 2:
            raise CheckpointError(f"the manifest of {manifest.name!r} has no task and max_length in `data`.")
        return Task(**{str(key): value for key, value in task.items()}), max_length
    if name in builtin_tasks():
        return builtin_tasks()[name], usual
    if manifest.head is None:
        raise CheckpointError(
            "this inlay has no head of its own, so its labels are not known; give the run it came from."
        )
    head = Head(**manifest.head)
    labels, called = head.names or (), name or manifest.name
    if head.per_token:
        task = Task(name=called, kind="spans") if labels == SPAN else Task(name=called, kind="tags", labels=labels)
        return task, usual
    if labels == CHOICE:
        return Task(name=called, kind="choice"), usual
    if head.problem_type == "multi_label_classification":
        return Task(name=called, kind="multilabel", labels=labels), usual
    own = {"labels": labels} if len(labels) > 1 else {"kind": "regression"}
    return Task(name=called, **own), usual
