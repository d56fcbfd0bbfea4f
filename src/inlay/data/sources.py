"""Where rows come from: a folder of the built-in tasks, the user's own files, or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from inlay.config import Config
from inlay.data.builtin import builtin_tasks, task_named
from inlay.data.errors import DataError
from inlay.data.rows import Row, Table, read_table
from inlay.data.task import Answers, Hub, Kind, Metric, Task
from inlay.errors import nearest

SPLITS = ("train", "validation", "test")
FILE_SPLITS = (*SPLITS, "mismatched")
OF_THE_TASK = (
    "kind", "text", "pair", "choices", "label", "labels", "metrics", "prompt", "template", "answers", "answer_with",
    "label_words", "label_tokens",
)  # fmt: skip
"""What `Data` may say of a task, under the task's own names."""
ENDINGS = (".jsonl.gz", ".jsonl", ".csv.gz", ".csv", ".tsv", ".parquet")


class Data(Config):
    """What to read: a built-in task by its name, or columns of the user's own files."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    task: str = "own"
    """A built-in task (see `inlay ls tasks`), or a name for your own."""
    data_dir: Path | None = None
    """A folder with <task>/{train,validation,test}.jsonl.gz; without it a built-in task is read from the hub."""
    train_file: Path | None = None
    """Your own training rows: .jsonl, .csv or .tsv (also gzipped, .gz), or .parquet."""
    validation_file: Path | None = None
    """Your own validation rows; without them a tenth of the training rows is held out."""
    test_file: Path | None = None
    """Your own test rows."""
    hub: str | None = None
    """A data set on the hub instead of files, as name or name:config."""
    kind: Kind | None = None
    """What your own rows ask for: classification (the default), regression, choice, multilabel, tags, spans or text."""
    text: str | None = None
    """The column of the text, or a template such as "{title}. {body}"."""
    pair: str | None = None
    """The column of the second text of a pair, or a template."""
    choices: str | None = None
    """Kind choice: the column with the list of choices, or several columns with one choice each: a,b,c."""
    label: str | None = None
    """The column with what is to be predicted."""
    labels: tuple[str, ...] | None = None
    """The labels, in order; by default those found in the training rows, which are shown."""
    metrics: tuple[Metric, ...] | None = None
    """The metrics, the main one first; by default the usual ones for the kind."""
    prompt: str | None = None
    """Hosts that answer in text: what they read, such as "qa question: {question}"; "" is the usual form."""
    template: str | None = None
    """What decoders read, ending in {target}, as in "{question}{eos} {target}". For masked models {target} may be
    anywhere."""
    answer_with: Literal["head", "words"] | None = None
    """Classify with a new head (the default), or with label words in a template and the host's own head."""
    label_words: tuple[str, ...] | None = None
    """Answering with words: the word for each label, in the labels' order; most built-in classification tasks have
    some."""
    label_tokens: Literal["one", "sum", "mean"] | None = None
    """Label words of several tokens: refuse them (one), sum their log-probabilities (the default), or average them."""
    demonstrations: int = Field(default=0, ge=0, le=100)
    """Answering with words: how many answered training rows of each label are put before every text."""
    answers: Answers | None = None
    """Hosts that answer in text: how they write a label or choice: words (the default), its index, or a choice's own
    text."""
    splits: Literal["official", "compacter", "held_out"] = "official"
    """official: the published splits. compacter: also make a test set, by that paper's rules. held_out: also make one,
    so that the rows that give the final score never choose anything."""
    rows: int | None = Field(default=None, ge=1)
    """Train on only this many rows, chosen at random."""
    per_class: int | None = Field(default=None, ge=1)
    """Train on only this many rows of each label, chosen at random."""
    rows_seed: int = Field(default=42, ge=0)
    """The seed for choosing these rows; which rows are held out does not depend on it."""
    validation: bool = True
    """Whether validation rows choose the best state. If not, the last state is the result; and if there are no test
    rows, the validation rows give the score."""

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        given = [name for name in ("data_dir", "train_file", "hub") if getattr(self, name) is not None]
        if self.rows is not None and self.per_class is not None:
            raise ValueError("rows are drawn in total (rows) or of each label (per_class), not both")
        if len(given) > 1:
            raise ValueError(
                f"rows can come from one place only, but {' and '.join(f'`{name}`' for name in given)} are given"
            )
        if not given and self.task not in builtin_tasks():
            raise ValueError(
                f"no rows: {self.task!r} is not a built-in task, and neither `train_file`, `hub` nor `data_dir` "
                f"is given.{nearest(self.task, builtin_tasks())}"
            )
        return self

    def described(self) -> Task:
        """The task with what the user said about it; labels that are not known yet are left empty."""
        said = {name: value for name in OF_THE_TASK if (value := getattr(self, name)) is not None}
        for name in ("prompt", "template"):
            if said.get(name) == "":
                said[name] = None  # the usual form, also of a built-in task
        if "template" in said:
            said["cloze"] = said["template"]
        if self.task in builtin_tasks():
            known = task_named(self.task).model_dump()
            if said.keys() & {"text", "pair", "choices"}:
                # they read columns that these rows need not have
                known |= {"prompt": None, "template": None, "cloze": None}
            if "kind" in said and "metrics" not in said:
                known.pop("metrics")
            if said.get("kind", known["kind"]) != known["kind"]:
                known |= {"labels": (), "positive": None}  # they answer what the task asks otherwise
            return Task(**known | said)
        return Task(name=self.task, **said)


def read_splits(data: Data, task: Task) -> dict[str, Table]:
    """Every split that there is, as the source has it."""
    if data.train_file is not None:
        files = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
        return {split: read_table(path) for split, path in files.items() if path is not None}
    if data.data_dir is not None:
        return _from_folder(Path(data.data_dir), task.folder or task.name)
    if data.hub is not None:
        path, _, config = data.hub.partition(":")
        return _from_hub(Hub(path=path, config=config or None), task)
    if task.hub is None:
        raise DataError(f"{task.name} is not on the hub; give its rows with `data_dir` or `train_file`.")
    return _from_hub(task.hub, task)


def _from_folder(data_dir: Path, name: str) -> dict[str, Table]:
    folder = data_dir / name
    if not folder.is_dir():
        there = [sub.name for sub in data_dir.iterdir() if sub.is_dir()] if data_dir.is_dir() else []
        raise DataError(f"{folder} is not a folder.{nearest(name, there)}")
    found = {split: read_table(file) for split, file in split_files(folder).items()}
    if not found:
        raise DataError(f"{folder} has no train, validation or test file ({', '.join(ENDINGS)}).")
    return found


def split_files(folder: Path) -> dict[str, Path]:
    """The file of every split in a task's folder; of several the one with the first of the endings is read."""
    there = {
        split: [file for ending in ENDINGS if (file := folder / f"{split}{ending}").is_file()] for split in FILE_SPLITS
    }
    return {split: files[0] for split, files in there.items() if files}


def _from_hub(hub: Hub, task: Task) -> dict[str, Table]:
    import datasets

    revision = {"revision": hub.revision} if hub.revision is not None else {}
    try:
        there = datasets.load_dataset(hub.path, hub.config, **revision)
    except Exception as error:  # the hub has many ways to say no
        raise DataError(
            f"the data set {hub.path} {hub.config or ''} could not be read: {type(error).__name__}: {error}\n"
            f"Without a network, give `data_dir` or `train_file`."
        ) from None
    found = {}
    for split in FILE_SPLITS:
        name = hub.splits.get(split, split)
        if name in there:
            source = f"{hub.path} {name}"
            _check_hub_columns(there[name], hub, source)
            table = Table([_as_task_row(row, hub, task) for row in there[name]], source)
            known = _with_labels([row.get(task.label) for row in table.rows], task, _classes(there[name], hub, task))
            if known:
                found[split] = replace(table.take(known), unlabelled=len(table) - len(known))
    return found


HIDDEN: tuple[Any, ...] = (None, "", [], -1, "-1")
"""What stands in place of labels that nobody is shown."""


def _with_labels(labels: Sequence[Any], task: Task, classes: bool) -> list[int]:
    """The rows that have a label.

    −1 is none where classes or choices are counted, and a number elsewhere; of several labels none may hold.
    """
    if all(label in HIDDEN for label in labels):
        return []
    none: list[Any] = [None, ""] if task.kind == "multilabel" else [None, "", []]
    if task.kind == "choice" or (classes and "-1" not in task.labels):
        none += [-1, "-1"]
    return [i for i, label in enumerate(labels) if label not in none]


def _classes(rows: Any, hub: Hub, task: Task) -> bool:
    """Whether labels are numbers of classes that are known, as a built-in task or the data set has them."""
    import datasets

    feature = (getattr(rows, "features", None) or {}).get(hub.rename.get("label", task.label))
    return task.kind == "classification" and (bool(task.labels) or isinstance(feature, datasets.ClassLabel))


def _check_hub_columns(rows: Sequence[Row], hub: Hub, source: str) -> None:
    """The columns that become the task's own are there; all that are not are named."""
    wanted = [*hub.rename.values(), *hub.choices]
    missing = [path for path in wanted if len(rows) and _reached(rows[0], path) is MISSING]
    if missing:
        listed = ", ".join(map(repr, missing))
        raise DataError(
            f"{source} has no column {listed}; it has {', '.join(rows[0])}. The data set has changed on the hub: "
            f"give your own rows with `train_file`, or its columns with `hub`, `text`, `pair` and `label`."
        )


MISSING = object()


def _reached(row: Any, path: str) -> Any:
    """A value by its path, as in choices.text, in a list that of each part; MISSING where the path ends early."""
    for part in path.split("."):
        if isinstance(row, list) and row and all(isinstance(each, dict) and part in each for each in row):
            row = [each[part] for each in row]
            continue
        if not isinstance(row, dict) or part not in row:
            return MISSING
        row = row[part]
    return row


def _as_task_row(row: Row, hub: Hub, task: Task) -> Row:
    """A hub's row under the task's own column names, with labels in the task's own words."""
    made = dict(row)
    for ours, theirs in hub.rename.items():
        value = _reached(row, theirs)
        made[ours] = None if value is MISSING else value
    if hub.choices:
        made[task.choices] = [row[column] for column in hub.choices]
    label = made.get(task.label)
    if hub.labels and str(label) in hub.labels:
        made[task.label] = hub.labels.index(str(label))
    elif (
        task.kind == "classification"
        and isinstance(label, int)
        and not isinstance(label, bool)
        and 0 <= label < len(task.labels)
    ):
        made[task.label] = task.labels[label]
    return made
