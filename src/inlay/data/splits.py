"""Which rows are trained on, which choose the best state, and which give the final score.

official    the splits as published; without validation rows, a tenth of the training rows (at most 1,000) is held out;
            without training rows, a fifth of the validation rows (at most 1,000) is for validation and the rest is
            trained on, which the run notes
compacter   small sets: half of the validation rows become test rows; large ones: the validation rows become test rows
            and 1,000 training rows validation rows; MNLI validates on its mismatched rows and tests on the matched
            ones (Karimi Mahabadi et al. 2021)
held_out    rows that judge are never those that choose: where there are no test rows the validation rows become test
            rows (without them a fifth of the training rows, at most 1,000), and a tenth of the training rows, at least
            50 and at most 1,000, validation rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inlay.data.errors import DataError
from inlay.data.examples import Example, check_metrics, examples, grouped, one_per_answer, settled
from inlay.data.labels import check_classes, label_text
from inlay.data.rows import Table
from inlay.data.sources import Data, read_splits
from inlay.data.task import Task
from inlay.data.text_metrics import measurable

SEED = 42
HELD_OUT, LEAST_HELD_OUT = 1000, 50


@dataclass(frozen=True)
class Prepared:
    """A task with its labels known and its rows read."""

    task: Task
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    notes: tuple[str, ...] = ()
    """What was decided about labels and splits, to be shown."""
    mismatched: list[Example] = field(default_factory=list)
    """MNLI: validation rows of other kinds of text than those trained on."""

    @property
    def judge(self) -> str:
        """The split that gives the final score."""
        return "test" if self.test else "validation"

    def split(self, name: str) -> list[Example]:
        rows: list[Example] = getattr(self, name)
        if not rows:
            raise DataError(f"{self.task.name} has no {name} rows here.")
        return rows


def prepare(data: Data, known: Task | None = None) -> Prepared:
    """Read a task's rows, settle its labels, and divide the rows into splits.

    known: the task as something was trained for it, whatever `data` says of it: its labels, columns and templates.
    """
    task = known or data.described()
    tables = read_splits(data, task)
    notes = [
        f"{t.unlabelled} rows of {t.source} have no label and are left out" for t in tables.values() if t.unlabelled
    ]
    _find_training_rows(tables, task, data, notes)
    tables = _by_rule(tables, task, data, notes)
    tables["train"] = _few(tables["train"], task, data, notes)
    task, found = settled(task, tables["train"])
    if known is None:  # what is trained is measured as it was
        check_metrics(task)
    task, left_out = measurable(task)
    found += left_out
    if data.demonstrations:
        shown, tables["train"] = _demonstrated(task, tables["train"], data)
        if known is None:  # what is trained has its own already
            task = task.model_copy(update={"shown": shown})
        notes.append(f"{data.demonstrations} training rows of each label stand before every text, and do not train")
    few = data.rows is not None or data.per_class is not None
    train, validation, test, mismatched = _examples_of(task, tables, few)
    train = [each for example in train for each in one_per_answer(example)]
    if task.kind == "text":
        validation, test = grouped(validation), grouped(test)
    return Prepared(task, train, validation, test, tuple(notes + found), mismatched)


def _find_training_rows(tables: dict[str, Table], task: Task, data: Data, notes: list[str]) -> None:
    """A folder without training rows lends most of its validation rows; elsewhere there have to be some."""
    if "train" not in tables and data.data_dir is not None and "validation" in tables:
        tables["train"], tables["validation"] = _drawn_apart(
            tables["validation"], min(HELD_OUT, max(1, len(tables["validation"]) // 5))
        )
        notes.append(
            f"no training rows: {len(tables['train'])} of the validation rows are trained on instead; "
            f"scores cannot be compared with published ones"
        )
    if "train" not in tables:
        raise DataError(f"{task.name} has no training rows.")


def _few(table: Table, task: Task, data: Data, notes: list[str]) -> Table:
    """As many of the training rows as were asked for, drawn at random; all of them where nobody did."""
    if data.rows is not None and data.rows < len(table):
        table = _drawn_apart(table, data.rows, data.rows_seed)[1]
        notes.append(f"{data.rows} training rows drawn with seed {data.rows_seed}")
    if data.per_class is not None:
        table = _of_each_class(table, task, data.per_class, data.rows_seed)
        notes.append(f"{data.per_class} training rows of each label drawn with seed {data.rows_seed}")
    return table


def _of_each_class(table: Table, task: Task, count: int, seed: int) -> Table:
    """This many rows of each label, drawn at random."""
    if task.kind != "classification":
        raise DataError(f"per_class draws rows of each label, and {task.kind} has no label for each row. Use rows.")
    drawn: dict[str, list[int]] = {}
    for at in _shuffled(len(table), seed):
        drawn.setdefault(label_text(table.rows[at].get(task.label)), []).append(at)
    short = {label: len(rows) for label, rows in drawn.items() if len(rows) < count}
    if short:
        told = ", ".join(f"{label} ({rows})" for label, rows in sorted(short.items()))
        raise DataError(f"per_class is {count}, but {table.source} has fewer rows of {told}.")
    return table.take([at for rows in drawn.values() for at in rows[:count]])


def _demonstrated(task: Task, table: Table, data: Data) -> tuple[dict[str, str], Table]:
    """Some answered rows as they stand before every text, and the rows that are left to train on."""
    if task.answer_with != "words":
        raise DataError("demonstrations stand in a template: use answer_with words.")
    chosen: dict[int, list[int]] = {}
    made = examples(task.model_copy(update={"shown": {}}), table)
    for at in _shuffled(len(table), data.rows_seed):
        own = chosen.setdefault(int(made[at].target), [])  # type: ignore[arg-type]
        if len(own) < data.demonstrations:
            own.append(at)
    order = [rows[i] for i in range(data.demonstrations) for _, rows in sorted(chosen.items()) if i < len(rows)]
    shown: dict[str, str] = {}
    for at in order:
        word = task.label_words[int(made[at].target)]  # type: ignore[arg-type]
        if made[at].before is not None:
            shown["template"] = shown.get("template", "") + f"{made[at].before}{word}{made[at].after}\n"
        if made[at].cloze is not None:
            before, after = made[at].cloze or ("", "")
            shown["cloze"] = shown.get("cloze", "") + f"{before}{word}{after} "
    taken = set(order)
    return shown, table.take([i for i in range(len(table)) if i not in taken])


def _examples_of(task: Task, tables: dict[str, Table], few: bool = False) -> list[list[Example]]:
    """The examples of every split; what is wrong in any of them is said at once."""
    made: list[list[Example]] = []
    problems: list[str] = []
    for split in ("train", "validation", "test", "mismatched"):
        try:
            made.append(examples(task, tables[split]) if split in tables else [])
            if split == "train" and task.kind == "classification":
                check_classes(task, made[0], tables["train"].source, few=few)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))  # held-out rows lack what the others lack
    return made


def _by_rule(tables: dict[str, Table], task: Task, data: Data, notes: list[str]) -> dict[str, Table]:
    """The splits as `splits` and `validation` ask for them; see the head of this file."""
    tables = dict(tables)
    if not data.validation:
        _without_validation(tables, task, notes)
    elif data.splits == "compacter" and "validation" in tables:
        _as_in_compacter(tables, task, notes)
    elif data.splits == "held_out":
        _hold_out(tables, notes)
    elif "validation" not in tables:
        _hold_out_validation(tables, notes)
    return tables


def _without_validation(tables: dict[str, Table], task: Task, notes: list[str]) -> None:
    """Nothing chooses among states; validation rows give the score if there are no test rows."""
    if "validation" in tables and "test" not in tables:
        tables["test"] = tables["validation"]
    elif "test" not in tables:
        raise DataError(f"{task.name} has no rows to be judged on. Give test or validation rows.")
    tables.pop("validation", None)
    notes.append("no validation: the last state is the result")


def _as_in_compacter(tables: dict[str, Table], task: Task, notes: list[str]) -> None:
    """A test set by the rule that the paper has for this task."""
    if task.compacter == "mismatched" and "mismatched" in tables:
        tables["test"], tables["validation"] = tables["validation"], tables.pop("mismatched")
        notes.append("compacter splits: mismatched rows are for validation, matched rows for the test")
    elif task.compacter == "halve":
        half = len(tables["validation"]) // 2
        tables["test"], tables["validation"] = _drawn_apart(tables["validation"], half)
        notes.append("compacter splits: half of the validation rows are test rows")
    elif len(tables["train"]) <= HELD_OUT:
        there = f"{tables['train'].source} has {len(tables['train']):,}"
        raise DataError(
            f"compacter holds out {HELD_OUT:,} training rows of {task.name}, and {there}. Use splits held_out."
        )
    else:
        tables["test"] = tables["validation"]
        tables["train"], tables["validation"] = _drawn_apart(tables["train"], HELD_OUT)
        notes.append(
            f"compacter splits: {HELD_OUT} training rows are validation rows, the validation rows are test rows"
        )


def _hold_out_validation(tables: dict[str, Table], notes: list[str]) -> None:
    """A tenth of the training rows as validation rows."""
    if len(tables["train"]) < 2:
        raise DataError(f"{tables['train'].source} has one row: nothing is left to train on. Give more rows.")
    count = min(HELD_OUT, max(1, len(tables["train"]) // 10))
    tables["train"], tables["validation"] = _drawn_apart(tables["train"], count)
    notes.append(f"no validation rows: {count} training rows are held out for validation")


def _hold_out(tables: dict[str, Table], notes: list[str]) -> None:
    """Test rows and validation rows that are not the same, whatever is there."""
    if "test" not in tables and "validation" in tables:
        tables["test"] = tables.pop("validation")
        notes.append("held-out splits: the validation rows are test rows")
    elif "test" not in tables:
        count = min(HELD_OUT, len(tables["train"]) // 5)
        tables["train"], tables["test"] = _drawn_apart(tables["train"], count)
        notes.append(f"held-out splits: {count} training rows are test rows")
    if "validation" not in tables:
        rows = len(tables["train"])
        if rows < 2 or not tables["test"]:
            raise DataError(f"{tables['train'].source} has too few rows to hold some out. Give more rows.")
        count = min(HELD_OUT, max(LEAST_HELD_OUT, rows // 10), rows // 2)
        tables["train"], tables["validation"] = _drawn_apart(tables["train"], count)
        notes.append(f"held-out splits: {count} training rows are held out for validation")


def _drawn_apart(table: Table, count: int, seed: int = SEED) -> tuple[Table, Table]:
    """The rest and `count` rows drawn at random."""
    order = _shuffled(len(table), seed)
    return table.take(order[count:]), table.take(order[:count])


def _shuffled(count: int, seed: int) -> Sequence[int]:
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
