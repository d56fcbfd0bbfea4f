"""Labels: how they are written, which ones rows have, and whether there is enough of each to learn from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from inlay.data.errors import DataError
from inlay.data.rows import Table, check_columns, is_missing
from inlay.data.task import Task

if TYPE_CHECKING:
    from inlay.data.examples import Example

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
"""A label that is one in every format; 01 is none, but a name."""
WHOLE = re.compile("-?[0-9]{1,300}")
"""A label that is ordered by its size; Python converts no number of thousands of digits."""
AT_MOST = 5
"""This many labels with a single row are named; the rest are counted."""


def label_text(value: Any) -> str:
    """A label as it is written everywhere: true and false in lower case, 1.0 as 1."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def label_index(task: Task, text: str) -> int | None:
    """Where a label stands among the task's: as it is, or else the only one that another kind of file writes so."""
    if text in task.labels:
        return task.labels.index(text)
    same = [i for i, label in enumerate(task.labels) if in_any_file(label) == in_any_file(text)]
    return same[0] if len(same) == 1 else None


def in_any_file(text: str) -> str:
    """A label whatever file it is from: CSV has True and 1.0 where JSON has true and 1."""
    if NUMBER.fullmatch(text):
        return text.rstrip("0").rstrip(".") if "." in text else text
    return text.lower() if text.lower() in ("true", "false") else text


def listed_labels(values: Any) -> list[Any]:
    """A list as it is, or the parts of a text between commas, as a CSV file has them."""
    if values is None:
        raise DataError("the labels are missing or null; if a row has no label, write an empty list")
    if isinstance(values, str):
        return [part for value in values.split(",") if (part := value.strip())]
    return list(values) if isinstance(values, list | tuple) else [values]


def find_labels(task: Task, table: Table) -> tuple[str, ...]:
    """The labels of the training rows in alphabetical order, numbers by size."""
    check_columns(table, task.columns())  # all that are missing at once
    given = [row[task.label] for row in table.rows if not is_missing(row.get(task.label))]
    if task.kind != "classification":
        given = [value for values in given for value in listed_labels(values)]
    else:
        lists = [i for i, row in enumerate(table.rows) if isinstance(row.get(task.label), list | dict)]
        if lists:
            raise DataError(
                f"{table.where(lists[0])}: {task.label!r} must be one label, got {table.rows[lists[0]][task.label]}"
            )
    values = {label_text(value) for value in given}
    by_name = sorted(values)  # first, so that 1 and 01, which are the same number, have one order in every process
    return tuple(sorted(by_name, key=int) if all(map(WHOLE.fullmatch, values)) else by_name)


def check_classes(task: Task, training: Sequence[Example], source: str, *, few: bool = False) -> None:
    """Nothing can be learned about a class from one row, and nothing at all from one class.

    few: whether somebody asked for few rows, and may get a single one of a class.
    """
    counts = Counter(example.target for example in training)
    if len(counts) < 2:
        only = task.labels[cast(int, next(iter(counts)))] if counts else "none"
        raise DataError(f"{source} has only one class ({only}); classification needs two or more.")
    lonely = sorted(task.labels[int(target)] for target, count in counts.items() if count == 1)  # type: ignore[arg-type]
    if lonely and not few:
        more = f" and {len(lonely) - AT_MOST} more" if len(lonely) > AT_MOST else ""
        numbers = " To predict a number, use `kind` regression." if len(lonely) > AT_MOST else ""
        raise DataError(
            f"{source} has a single row of the class {', '.join(map(repr, lonely[:AT_MOST]))}{more}. "
            f"Add rows of it, remove it, or merge it with another class.{numbers}"
        )
