"""Rows as examples: the texts that a host reads, and the target as a number or a text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.data.errors import DataError
from inlay.data.rows import Row, Table
from inlay.data.task import Task, fields_of, template
from inlay.errors import nearest

Target = int | float | str | None
"""What an example asks for: the index of a label or choice, a number, a text; None where it is not known."""
AT_MOST = 5
"""This many broken rows of a kind are named; the rest are counted."""


@dataclass(frozen=True)
class Example:
    """One row: a text or pair, several of them for `choice`, and what is to be predicted."""

    texts: tuple[tuple[str, str | None], ...]
    target: Target
    group: str | None = None


def label_text(value: Any) -> str:
    """A label as it is written everywhere: true and false in lower case, 1.0 as 1."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def is_missing(value: Any) -> bool:
    """Null, an empty cell of a CSV file, or what pandas writes for it."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def find_labels(task: Task, table: Table) -> tuple[str, ...]:
    """The labels of the training rows in alphabetical order, numbers by size."""
    check_columns(table, [task.label])
    values = {label_text(row[task.label]) for row in table.rows if not is_missing(row.get(task.label))}
    if all(re.fullmatch("-?[0-9]+", value) for value in values):
        return tuple(sorted(values, key=int))
    return tuple(sorted(values))


def check_columns(table: Table, columns: Sequence[str]) -> None:
    """Every column that is read must be there; all that are not are named, with the nearest."""
    there = table.columns
    missing = [column for column in columns if column not in there]
    if missing:
        raise DataError(
            "\n".join(f"{table.source} has no column {column!r}.{nearest(column, there)}" for column in missing)
        )


def examples(task: Task, table: Table, *, labelled: bool = True) -> list[Example]:
    """Every row as an example. All broken rows are reported at once."""
    check_columns(table, task.columns(labelled))
    made, problems = [], []
    for index, row in enumerate(table.rows):
        try:
            made.append(_example(task, row, labelled))
        except DataError as error:
            line = table.lines[index] if table.lines else index
            problems.append((line, f"{table.where(index)}: {error}"))
    if problems:
        more = f"\n… and {len(problems) - AT_MOST} more" if len(problems) > AT_MOST else ""
        raise DataError("\n".join(told for _, told in sorted(problems)[:AT_MOST]) + more)
    return made


def _example(task: Task, row: Row, labelled: bool) -> Example:
    text = fill(task.text, row)
    pair = fill(task.pair, row) if task.pair else None
    if not text and not pair:
        raise DataError(f"the text ({task.text}) is empty")
    if task.kind != "choice":
        group = fill(task.group, row) if task.group and labelled else None
        return Example(((text, pair),), _target(task, row) if labelled else None, group)
    choices = _choices(task, row)
    texts: tuple[tuple[str, str | None], ...]
    if task.blank is None:
        texts = tuple((text, str(choice)) for choice in choices)
    else:
        texts = tuple((text.replace(task.blank, str(choice)), None) for choice in choices)
    return Example(texts, _choice(row.get(task.label), choices) if labelled else None)


def _choices(task: Task, row: Row) -> list[Any]:
    several = task.choice_columns
    if len(several) > 1:
        return [fill(column, row) for column in several]
    choices = row.get(task.choices)
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{task.choices!r} must be a list of two or more choices, got {choices!r}")
    return choices


def fill(text: str, row: Row) -> str:
    """A template with a row's columns in it."""
    shape = template(text)
    values = {name: row.get(name) for name in fields_of(shape)}
    for name, value in values.items():
        if value is None:
            raise DataError(f"column {name!r} is missing or null")
    return shape.format_map(values).strip()


def _choice(value: Any, choices: list[Any]) -> int:
    if isinstance(value, list):  # ReCoRD: the answers themselves
        found = [choices.index(answer) for answer in value if answer in choices]
        if not found:
            raise DataError(f"none of the answers {value!r} is among the choices")
        return found[0]
    text = label_text(value)
    if not text.isdigit() or int(text) >= len(choices):
        raise DataError(f"label {value!r} is not the index of one of {len(choices)} choices (0 to {len(choices) - 1})")
    return int(text)


def _target(task: Task, row: Row) -> int | float | str:
    value: Any = row.get(task.label)
    if task.kind == "text" and value == "":
        return ""
    if is_missing(value):
        raise DataError(f"column {task.label!r} is missing, null or empty")
    if task.kind == "text":
        return str(value)
    if task.kind == "regression":
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{task.label!r} must be a number, got {value!r}")
        return number
    text = label_text(value)
    if text not in task.labels:
        raise DataError(f"label {text!r} was not seen in training.{nearest(text, task.labels)}")
    return task.labels.index(text)


def check_classes(task: Task, training: Sequence[Example], source: str) -> None:
    """Nothing can be learned about a class from one row, and nothing at all from one class."""
    counts = Counter(example.target for example in training)
    if len(counts) < 2:
        only = task.labels[int(next(iter(counts)) or 0)] if counts else "none"
        raise DataError(f"{source} has only one class ({only}); classification needs two or more.")
    lonely = sorted(task.labels[int(target)] for target, count in counts.items() if count == 1)  # type: ignore[arg-type]
    if lonely:
        more = f" and {len(lonely) - AT_MOST} more" if len(lonely) > AT_MOST else ""
        numbers = " To predict a number, use kind: regression." if len(lonely) > AT_MOST else ""
        raise DataError(
            f"{source} has a single row of the class {', '.join(map(repr, lonely[:AT_MOST]))}{more}. "
            f"Add rows of it, remove it, or merge it with another class.{numbers}"
        )
