"""What a request asks, as a task's examples.

    "It rains."                               a text
    {"text": "…", "pair": "…"}                a text and a second one; for spans a question and its context
    {"text": "…", "choices": ["…", "…"]}      a text and the choices
    {"words": ["…", "…"]}                     the words of a text, for tags; a plain text is split at spaces
    {"row": {"premise": "…", …}}              a row with the columns that the model was trained on

A pair is an object and never a list of two, which another server would read as two texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.data.errors import DataError
from inlay.data.examples import Example, examples
from inlay.data.rows import Table, check_text
from inlay.data.task import Task, fields_of, template
from inlay.data.templates import MARKS, TARGET
from inlay.serve.errors import Invalid

FORMS = {
    "classification": '{"text": "…"}',
    "choice": '{"text": "…", "choices": ["…", "…"]}',
    "tags": '{"words": ["…", "…"]}',
    "spans": '{"text": "a question", "pair": "its context"}',
}
AT_MOST = 5
"""This many wrong inputs are told; the rest are counted."""


def read_inputs(task: Task, inputs: Sequence[Any], *, prompted: bool = False) -> list[Example]:
    """Every input as an example; all that are wrong are told at once.

    prompted: whether the host reads the task's prompt, which is made of the columns of a row.
    """
    made: list[Example] = []
    problems: list[str] = []
    for i, given in enumerate(inputs):
        try:
            made.append(_example(task, given, prompted))
        except DataError as error:
            problems.append(f"inputs[{i}]: {str(error).removeprefix('input, row 1: ').removeprefix('input ')}")
    if problems:
        more = f"\n… and {len(problems) - AT_MOST} more" if len(problems) > AT_MOST else ""
        raise Invalid("\n".join(problems[:AT_MOST]) + more)
    return made


def _example(task: Task, given: Any, prompted: bool) -> Example:
    fields: Mapping[str, Any] = {"text": given} if isinstance(given, str) else given
    fields = {name: value for name, value in fields.items() if value is not None}
    if "row" in fields:
        if len(fields) > 1:
            raise DataError(f"a row stands alone, but there is {', '.join(sorted(set(fields) - {'row'}))} beside it")
        row = dict(fields["row"])
    else:
        task, row = _by_role(task, fields, prompted)
    check_text((*row, *row.values()), "input")
    return examples(task, Table([row], "input"), labelled=False)[0]


def _by_role(task: Task, fields: Mapping[str, Any], prompted: bool) -> tuple[Task, dict[str, Any]]:
    """Texts by what they are to the task, and the task that reads them by these names."""
    wanted = {"tags": {"words"}, "choice": {"text", "choices"}}.get(task.kind, {"text"})
    wanted |= {"pair"} if task.pair is not None else set()
    given = {"words" if name == "text" and task.kind == "tags" else name for name in fields}
    if given != wanted:
        form = FORMS.get(task.kind, FORMS["classification"]) if task.pair is None or task.kind == "spans" else ""
        form = form or '{"text": "…", "pair": "…"}'
        raise DataError(
            f"{task.name} ({task.kind}) reads {' and '.join(sorted(wanted))}, "
            f"got {' and '.join(sorted(fields)) or '{}'}. Give {form}."
        )
    if task.kind == "tags":
        return task, {task.text: fields.get("words", fields.get("text"))}
    if not prompted or task.prompt is None:
        task = task.model_copy(update={"prompt": None, "choices": "choices"})
    if others := _beside_texts(task):
        row = ", ".join(f'"{column}": "…"' for column in task.columns(labelled=False))
        raise DataError(f'{task.name} also reads {" and ".join(others)} by name. Give {{"row": {{{row}}}}}.')
    named = task.reading(text="text", pair="pair" if task.pair is not None else None)
    return named, {task.choices if name == "choices" else name: value for name, value in fields.items()}


def _beside_texts(task: Task) -> list[str]:
    """Columns that the task's prompt and templates name and that are neither a whole text of it nor its choices."""
    texts = "|".join(re.escape(template(column)) for column in (task.text, task.pair) if column is not None)
    shapes = [re.sub(texts, "", shape) for shape in (task.prompt or "", *task.asked)]
    known = (TARGET, *MARKS, task.choices)
    return list(dict.fromkeys(name for shape in shapes for name in fields_of(shape) if name not in known))
