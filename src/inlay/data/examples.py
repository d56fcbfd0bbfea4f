"""Rows as examples: the texts that a host reads, and what is to be predicted.

kind              target
classification    index of the label
regression        a number
choice            index of the choice
multilabel        indices of the labels, in order
tags              index of the label of every word
spans             right answers as (text, where it begins in the context); none: there is no answer
text              a text; the first, where there are several right ones (`answers`)
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from inlay.data.errors import DataError
from inlay.data.labels import find_labels, in_any_file, label_index, label_text, listed_labels
from inlay.data.rows import Row, Table, check_columns, is_missing, text_in
from inlay.data.task import LABELLED, Task, fields_of, template
from inlay.data.templates import LINEARISED, around
from inlay.errors import nearest

Target = int | float | str | tuple[int, ...] | tuple[tuple[str, int], ...] | None
"""What a row asks for, by the kind of its task; None where it is not known."""
AT_MOST = 5
"""This many broken rows of a kind are named; the rest are counted."""


@dataclass(frozen=True)
class Example:
    """One row: a text or pair, several of them for `choice`, and what is to be predicted."""

    texts: tuple[tuple[str, str | None], ...]
    target: Target
    group: str | None = None
    prompt: str | None = None
    """What a host that answers in text reads, where the task says it."""
    choices: tuple[str, ...] = ()
    """The choices themselves, where the answers are among them in words."""
    answers: tuple[str, ...] = ()
    """Every right answer, where there may be several; the target is the first."""
    before: str | None = None
    """What a template puts before the answer; its {bos} and {eos} are still marks."""
    after: str = ""
    """What it puts after it."""
    cloze: tuple[str, str] | None = None
    """What the template of masked language models puts before and after the answer."""
    words: tuple[str, ...] = ()
    """Kind tags: the words that the labels belong to; the text is all of them with spaces between."""


def settled(task: Task, table: Table) -> tuple[Task, list[str]]:
    """The task with what its training rows say about it, and what was found."""
    notes: list[str] = []
    if task.kind in LABELLED and not task.labels:
        task = task.model_copy(update={"labels": find_labels(task, table)})
        notes.append(f"labels found: {', '.join(task.labels)}")
    if task.kind == "tags" and task.main == "entity_f1" and not any(label[:2] == "B-" for label in task.labels):
        task = task.model_copy(update={"metrics": ("token_accuracy",)})
        notes.append("no label begins with B-: measured by token_accuracy, because there are no entities")
    if task.kind == "spans" and not task.unanswerable:
        none = sum(_has_no_answer(row.get(task.label)) for row in table.rows)
        task = task.model_copy(update={"unanswerable": bool(none)})
        notes += [f"{none} questions have no answer"] if none else []
    return task, notes


def check_metrics(task: Task) -> None:
    """F1 of one label says nothing of three: nobody has said which of them it is about. Groups need a column."""
    if "f1" in task.metrics and task.positive is None and len(task.labels) > 2:
        raise DataError(
            f"metric f1 is about one of two labels, but {task.name} has {len(task.labels)}: {', '.join(task.labels)}. "
            f"Use macro_f1."
        )
    if "group_exact_match" in task.metrics and task.group is None:
        raise DataError(f"metric group_exact_match is about groups of rows, and {task.name} has none. Leave it out.")


def examples(task: Task, table: Table, *, labelled: bool = True) -> list[Example]:
    """Every row as an example. All broken rows are reported at once."""
    check_columns(table, task.columns(labelled))
    made, problems = [], []
    listed = task.kind == "choice" and any(isinstance(row.get(task.label), list) for row in table.rows)
    for index, row in enumerate(table.rows):
        try:
            made.append(_example(task, row, labelled, listed))
        except DataError as error:
            problems.append((table.number(index), f"{table.where(index)}: {error}"))
    if problems:
        more = f"\n… and {len(problems) - AT_MOST} more" if len(problems) > AT_MOST else ""
        raise DataError("\n".join(told for _, told in sorted(problems)[:AT_MOST]) + more)
    return made


def _example(task: Task, row: Row, labelled: bool, listed: bool) -> Example:
    """listed: kind choice, and right answers are measured as such, because some rows have several."""
    if task.kind == "tags":
        return _with_tags(task, row, labelled)
    if task.kind == "spans":
        return _with_context(task, row, labelled)
    if task.linearise is not None and not is_missing(row.get(task.text)):
        row = row | {task.text: LINEARISED[task.linearise](row[task.text])}
    text = fill(task.text, row)
    pair = fill(task.pair, row) if task.pair else None
    if not text and not pair:
        raise DataError(f"the text ({task.text}) is empty")
    prompt = prompt_of(task, row) if task.prompt else None
    if task.kind == "choice":
        return _with_choices(task, row, text, prompt, labelled, listed)
    group = _group(task.group, row) if task.group and labelled else _part_name(task, row)
    before, after = _around_answer(task, "template", task.template, row) or (None, "")
    cloze = _around_answer(task, "cloze", task.cloze, row)
    answers = _texts(task, row.get(task.label)) if task.kind == "text" and labelled else ()
    target = None if not labelled else answers[0] if answers else _target(task, row)
    several = answers if len(answers) > 1 else ()
    return Example(((text, pair),), target, group, prompt, (), several, before, after, cloze)


def _with_choices(task: Task, row: Row, text: str, prompt: str | None, labelled: bool, listed: bool) -> Example:
    """A text with each of the row's choices: as its second text, or where the text has a blank."""
    choices = _choices(task, row)
    texts: tuple[tuple[str, str | None], ...]
    if task.blank is None:
        texts = tuple((text, str(choice)) for choice in choices)
    else:
        texts = tuple((text.replace(task.blank, str(choice)), None) for choice in choices)
    right = _right(row.get(task.label), choices) if labelled else []
    answers = tuple(str(choices[i]) for i in right) if listed else ()
    own = tuple(map(str, choices)) if answers or task.answers == "text" else ()
    return Example(texts, right[0] if right else None, None, prompt, own, answers)


def one_per_answer(example: Example) -> list[Example]:
    """To train on: a row with several right answers is a row for each of them."""
    if len(example.answers) < 2:
        return [example]
    if isinstance(example.target, str):
        return [replace(example, target=answer, answers=()) for answer in example.answers]
    return [replace(example, target=example.choices.index(answer), answers=(answer,)) for answer in example.answers]


def grouped(rows: Sequence[Example]) -> list[Example]:
    """To measure on: rows of kind text that ask the same are one, with all their right answers.

    Where rows bring lists of right answers, somebody has grouped them already, and they stay as they are.
    """
    if any(row.answers for row in rows):
        return list(rows)
    found: dict[tuple[Any, ...], list[str]] = {}
    first: dict[tuple[Any, ...], Example] = {}
    for row in rows:
        key = (row.texts, row.prompt, row.before, row.after, row.group)
        first.setdefault(key, row)
        found.setdefault(key, []).append(str(row.target))
    return [
        replace(first[key], target=answers[0], answers=tuple(answers) if len(answers) > 1 else ())
        for key, answers in found.items()
    ]


def _texts(task: Task, value: Any) -> tuple[str, ...]:
    """Kind text: the right texts of a row. One that is there twice stays so: some metrics count how often."""
    texts = value if isinstance(value, list) else [value]
    if task.skip_empty and len(texts) > 1:
        texts = [text for text in texts if not is_missing(text) and str(text).strip()]
    if not texts or any(is_missing(text) or isinstance(text, list | dict) or not str(text).strip() for text in texts):
        raise DataError(
            f"{task.label!r} must be a text or a list of texts, none of them empty, got {str(value)[:80]!r}"
        )
    return tuple(str(text).strip() for text in texts)


def _around_answer(task: Task, name: str, shape: str | None, row: Row) -> tuple[str, str] | None:
    """What one of the task's templates puts around the answer, after the demonstrations, where it is in use."""
    if shape is None or shape not in task.asked:
        return None
    before, after = around(shape, row)
    return task.shown.get(name, "") + before, after


def _group(group: str, row: Row) -> str:
    """What groups a row; no host reads it, so that a list of numbers is as good as a text."""
    return fill(group, {name: str(value) if isinstance(value, list | dict) else value for name, value in row.items()})


def _part_name(task: Task, row: Row) -> str | None:
    """What the rows are called that this one is scored with, where there are such parts."""
    value = row.get(task.parts["column"]) if "column" in task.parts else None
    return None if value is None else task.parts.get(label_text(value))


def _with_tags(task: Task, row: Row, labelled: bool) -> Example:
    """Words and the label of each; everything that is wrong with them is said at once."""
    words = row.get(task.text)
    if isinstance(words, str) and not labelled:  # a text to be labelled, as from the command line
        words = words.split()
    if not isinstance(words, list) or not words:
        raise DataError(f"{task.text!r} must be a list of words, got {words!r}")
    odd = [i for i, word in enumerate(words) if not isinstance(word, str) or not word.strip()]
    problems = [f"word {i} is {words[i]!r}" for i in odd]
    target: tuple[int, ...] | None = None
    if labelled:
        tags = listed_labels(row.get(task.label))
        if len(tags) != len(words):
            problems.append(f"{len(tags)} {task.label} for {len(words)} {task.text}; each word needs one")
        target, unknown = _indices(task, tags)
        problems += unknown
    if problems:
        raise DataError("; ".join(problems[:AT_MOST]))
    return Example(((" ".join(words), None),), target, words=tuple(words))


def _with_context(task: Task, row: Row, labelled: bool) -> Example:
    """A question, its context as it stands (answers count its letters), and the right answers."""
    context = row.get(str(task.pair))
    if not isinstance(context, str) or not context.strip():
        raise DataError(f"the context ({task.pair}) is missing or empty")
    texts = ((fill(task.text, row), context),)
    if not labelled:
        return Example(texts, None)
    found, problems = [], []
    for text, start in _texts_of(row.get(task.label)):
        there = context[start : start + len(text)] if isinstance(start, int) and start >= 0 else None
        if there == text:  # no token is of the spaces at its ends alone
            found.append((text.strip(), cast(int, start) + len(text) - len(text.lstrip())))
        elif there is None:
            problems.append(f"answer {text!r} begins at {start!r}, which is no position")
        else:
            where = context.find(text)
            hint = f"; it is at {where}" if where >= 0 else ", and it is nowhere in it"
            problems.append(f"answer {text!r} is not in the context at {start}, where {there!r} stands{hint}")
    if problems:
        raise DataError("; ".join(problems[:AT_MOST]))
    return Example(texts, tuple(dict.fromkeys(found)))


def _has_no_answer(answers: Any) -> bool:
    try:
        return not _texts_of(answers)
    except DataError:  # said with its line when the row is read
        return False


def _texts_of(answers: Any) -> list[tuple[str, Any]]:
    """SQuAD's answers, {"text": […], "answer_start": […]}, as pairs; nothing, or an empty text, is no answer."""
    if is_missing(answers) or answers == []:
        return []
    texts, starts = (answers.get("text"), answers.get("answer_start")) if isinstance(answers, dict) else (None, None)
    texts, starts = ([one] if isinstance(one, str | int) else one for one in (texts, starts))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        form = '{"text": [...], "answer_start": [...]} with one start per text'
        raise DataError(f"answers are {form}, got {answers!r}")
    return [(str(text), start) for text, start in zip(texts, starts, strict=True) if text != ""]


def _indices(task: Task, values: Sequence[Any]) -> tuple[tuple[int, ...], list[str]]:
    """The labels' indices, and what is wrong with those that are none."""
    found = {text: label_index(task, text) for text in map(label_text, values)}
    unknown = [
        f"label {text!r} was not seen in training.{nearest(text, task.labels)}"
        for text, index in found.items() if index is None
    ]  # fmt: skip
    indices = (found[label_text(value)] for value in values)
    return tuple(index for index in indices if index is not None), unknown


def _choices(task: Task, row: Row) -> list[Any]:
    several = task.choice_columns
    if len(several) > 1:
        return [fill(column, row) for column in several]
    choices = row.get(task.choices)
    if not isinstance(choices, list) or len(choices) < 2 or any(isinstance(one, list | dict) for one in choices):
        raise DataError(f"{task.choices!r} must be a list of two or more choices, got {str(choices)[:80]}")
    value = row.get(task.label)
    in_words = isinstance(value, list) or (value is None and task.answers == "text")
    return list(dict.fromkeys(choices)) if in_words else choices  # an entity may stand there twice


def fill(text: str, row: Row) -> str:
    """A template with a row's columns in it."""
    parts = string.Formatter().parse(template(text))  # not format_map: a name with a dot is a column too
    return "".join(before + (text_in(row, name) if name else "") for before, name, _, _ in parts).strip()


class _Listed(list[Any]):
    """A list that stands in a text as its parts with commas between them."""

    def __format__(self, form: str) -> str:
        return ", ".join(map(str, dict.fromkeys(self)))


def prompt_of(task: Task, row: Row) -> str:
    """What a host that answers in text reads."""
    shape = task.prompt or ""
    values = {name: row.get(name) for name in fields_of(shape)}
    whole = [name for _, name, _, _ in string.Formatter().parse(shape)]
    for name, value in values.items():
        if not isinstance(value, list | dict) or (isinstance(value, dict) and name in whole):
            text_in(row, name)
    values = {name: _Listed(value) if isinstance(value, list) else value for name, value in values.items()}
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
    text = in_any_file(label_text(value))
    if not text.isdecimal() or int(text) >= len(choices):
        raise DataError(f"label {value!r} is not the index of one of {len(choices)} choices (0 to {len(choices) - 1})")
    return [int(text)]


def _target(task: Task, row: Row) -> Target:
    value: Any = row.get(task.label)
    if task.kind == "multilabel":
        found, unknown = _indices(task, listed_labels(value))
        if unknown:
            raise DataError("; ".join(unknown[:AT_MOST]))
        return tuple(sorted(set(found)))
    if is_missing(value):
        raise DataError(f"column {task.label!r} is missing, null or empty")
    if task.kind == "regression":
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{task.label!r} must be a number, got {value!r}")
        return number
    if isinstance(value, list | dict):
        raise DataError(f"{task.label!r} must be one label, got {str(value)[:60]}")
    text = label_text(value)
    index = label_index(task, text)
    if index is None:
        raise DataError(f"label {text!r} was not seen in training.{nearest(text, task.labels)}")
    return index
