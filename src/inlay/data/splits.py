"""Which rows train, which choose and which judge.

official    the splits as published; without validation rows, a tenth of the training rows (at most 1,000) is held out
compacter   small sets: the validation rows are halved; large ones: 1,000 training rows validate and the validation rows
            are the test; MNLI validates on mismatched and tests on matched (Karimi Mahabadi et al. 2021)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inlay.data.errors import DataError
from inlay.data.examples import Example, check_classes, examples, find_labels
from inlay.data.rows import Table
from inlay.data.sources import Data, read_splits
from inlay.data.task import Task

SEED = 42
HELD_OUT = 1000


@dataclass(frozen=True)
class Prepared:
    """A task with its labels known and its rows read."""

    task: Task
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    notes: tuple[str, ...] = ()
    """What was decided about labels and splits, to show."""

    @property
    def judge(self) -> str:
        """The split that the final score is of."""
        return "test" if self.test else "validation"

    def split(self, name: str) -> list[Example]:
        rows = {"train": self.train, "validation": self.validation, "test": self.test}[name]
        if not rows:
            raise DataError(f"{self.task.name} has no {name} rows here.")
        return rows


def prepare(data: Data) -> Prepared:
    """Read everything a task needs; nothing is kept half."""
    task = data.described()
    tables = read_splits(data, task)
    notes: list[str] = []
    if "train" not in tables and data.data_dir is not None and "validation" in tables:
        tables["train"], tables["validation"] = _drawn_apart(
            tables["validation"], min(HELD_OUT, len(tables["validation"]) // 5)
        )
        notes.append(
            f"no training rows: {len(tables['train'])} validation rows train; no score compares with published ones"
        )
    if "train" not in tables:
        raise DataError(f"{task.name} has no training rows.")
    tables = _by_rule(tables, task, data, notes)
    if data.rows is not None and data.rows < len(tables["train"]):
        tables["train"] = _drawn_apart(tables["train"], data.rows)[1]
        notes.append(f"{data.rows} training rows drawn with seed {SEED}")
    if task.kind == "classification" and not task.labels:
        task = task.model_copy(update={"labels": find_labels(task, tables["train"])})
        notes.append(f"labels found: {', '.join(task.labels)}")
    train = examples(task, tables["train"])
    if task.kind == "classification":
        check_classes(task, train, tables["train"].source)
    validation, test = (examples(task, tables[split]) if split in tables else [] for split in ("validation", "test"))
    return Prepared(task, train, validation, test, tuple(notes))


def _by_rule(tables: dict[str, Table], task: Task, data: Data, notes: list[str]) -> dict[str, Table]:
    tables = dict(tables)
    mismatched = tables.pop("mismatched", None)
    if data.splits == "compacter" and "validation" in tables:
        if task.compacter == "mismatched" and mismatched is not None:
            tables["test"], tables["validation"] = tables["validation"], mismatched
            notes.append("compacter splits: mismatched rows validate, matched rows test")
        elif task.compacter == "halve":
            half = len(tables["validation"]) // 2
            tables["test"], tables["validation"] = _drawn_apart(tables["validation"], half)
            notes.append("compacter splits: validation rows halved")
        else:
            tables["test"] = tables["validation"]
            tables["train"], tables["validation"] = _drawn_apart(tables["train"], HELD_OUT)
            notes.append(f"compacter splits: {HELD_OUT} training rows validate, validation rows test")
    elif "validation" not in tables:
        held = min(HELD_OUT, max(1, len(tables["train"]) // 10))
        tables["train"], tables["validation"] = _drawn_apart(tables["train"], held)
        notes.append(f"no validation rows: {held} training rows held out")
    return tables


def _drawn_apart(table: Table, count: int) -> tuple[Table, Table]:
    """The rest and `count` rows drawn at random."""
    order = _shuffled(len(table))
    return table.take(order[count:]), table.take(order[:count])


def _shuffled(count: int) -> Sequence[int]:
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).tolist()
