"""Rows as examples: the texts that a host reads, and the target as a number or a text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.data.errors import DataError
from inlay.data.rows import Row, Table
from inlay.data.task import Task, fields_of, template
from inlay.errors import nearest

AT_MOST = 5
"""This many broken rows of a kind are named; the rest are counted."""


@dataclass(frozen=True)
class Example:
    """One row: a text or pair, several of them for `choice`, and what is to be predicted."""

    texts: tuple[tuple[str, str | None], ...]
    target: int | float | str | None
    """Index of the label or choice, a number, or a text; None where it is not known."""
    group: str | None = None
    prompt: str | None = None
    """What a host that answers in text reads, where the task says it."""
    choices: tuple[str, ...] = ()
    """The choices themselves, where the answers are among them in words."""
    answers: tuple[str, ...] = ()
    """Every right answer, where there may be several; the target is the first."""


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
    prompt = prompt_of(task, row) if task.prompt else None
    if task.kind != "choice":
        group = fill(task.group, row) if task.group and labelled else None
        return Example(((text, pair),), _target(task, row) if labelled else None, group, prompt)
    choices = _choices(task, row)
    texts: tuple[tuple[str, str | None], ...]
    if task.blank is None:
        texts = tuple((text, str(choice)) for choice in choices)
    else:
        texts = tuple((text.replace(task.blank, str(choice)), None) for choice in choices)
    right = _right(row.get(task.label), choices) if labelled else []
    answers = tuple(str(choices[i]) for i in right) if isinstance(row.get(task.label), list) else ()
    own = tuple(map(str, choices)) if answers or task.answers == "text" else ()
    return Example(texts, right[0] if right else None, None, prompt, own, answers)


def one_per_answer(example: Example) -> list[Example]:
    """To train on: a row with several right answers is a row for each of them (ReCoRD)."""
    if len(example.answers) < 2:
        return [example]
    return [replace(example, target=example.choices.index(answer), answers=(answer,)) for answer in example.answers]


def _choices(task: Task, row: Row) -> list[Any]:
    several = task.choice_columns
    if len(several) > 1:
        return [fill(column, row) for column in several]
    choices = row.get(task.choices)
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{task.choices!r} must be a list of two or more choices, got {choices!r}")
    value = row.get(task.label)
    in_words = isinstance(value, list) or (value is None and task.answers == "text")
    return list(dict.fromkeys(choices)) if in_words else choices  # an entity may stand there twice


def fill(text: str, row: Row) -> str:
    """A template with a row's columns in it."""
    shape = template(text)
    values = {name: row.get(name) for name in fields_of(shape)}
    for name, value in values.items():
        if value is None:
            raise DataError(f"column {name!r} is missing or null")
    return shape.format_map(values).strip()


class _Listed(list[Any]):
    """A list that stands in a text as its parts with commas between them."""

    def __format__(self, form: str) -> str:
        return ", ".join(map(str, dict.fromkeys(self)))


def prompt_of(task: Task, row: Row) -> str:
    """What a host that answers in text reads."""
    shape = task.prompt or ""
    values = {name: row.get(name) for name in fields_of(shape)}
    values = {name: _Listed(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in values.items():
        if value is None:
            raise DataError(f"column {name!r} is missing or null")
    try:
        text = shape.format_map(values)
    except (IndexError, KeyError, AttributeError, ValueError, TypeError):
        raise DataError(f"the prompt {shape!r} does not fit this row: {row!r:.200}") from None
    return re.sub(r"</?b>", "", text.replace("<br>", " ")).strip() if task.markup else text.strip()


def _right(value: Any, choices: list[Any]) -> list[int]:
    """The indices of the right choices."""
    if isinstance(value, list):  # ReCoRD: the answers themselves
        if not value:
            raise DataError("there is no answer: the answers of these rows are hidden, so they cannot be used")
        found = [choices.index(answer) for answer in dict.fromkeys(value) if answer in choices]
        if not found:
            raise DataError(f"none of the answers {value!r} is among the choices")
        return found
    text = label_text(value)
    if not text.isdigit() or int(text) >= len(choices):
        raise DataError(f"label {value!r} is not the index of one of {len(choices)} choices (0 to {len(choices) - 1})")
    return [int(text)]


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
        only = task.labels[next(iter(counts))] if counts else "none"  # type: ignore[call-overload]
        raise DataError(f"{source} has only one class ({only}); classification needs two or more.")
    lonely = sorted(task.labels[int(target)] for target, count in counts.items() if count == 1)  # type: ignore[arg-type]
    if lonely:
        more = f" and {len(lonely) - AT_MOST} more" if len(lonely) > AT_MOST else ""
        numbers = " To predict a number, use kind: regression." if len(lonely) > AT_MOST else ""
        raise DataError(
            f"{source} has a single row of the class {', '.join(map(repr, lonely[:AT_MOST]))}{more}. "
            f"Add rows of it, remove it, or merge it with another class.{numbers}"
        )
