"""Inputs of a request as the examples that the same rows would be."""

from __future__ import annotations

import pytest

from inlay.data.builtin import builtin_tasks
from inlay.data.task import Task
from inlay.serve.errors import Invalid
from inlay.serve.inputs import read_inputs

WORDS = {"labels": ("negative", "positive"), "answer_with": "words", "label_words": ("bad", "good")}
TASKS = {
    "template": (Task(kind="text", text="question", template="{question}{eos} {target}"), "a"),
    "whole": (Task(kind="text", text="{a} {b}", template="{a} {b} = {target}"), None),
    "linearised": (builtin_tasks()["e2e"], "name[Aromi], eatType[pub]"),
    "words": (Task(text="said", cloze="{said} {target}.", template="{said} {target}", **WORDS), "a"),
    "prompt": (builtin_tasks()["rte"], "a"),
    "turned": (Task(kind="text", text="pair", pair="text", template="{text} | {pair} {target}"), "a"),
    "choices": (Task(kind="choice", text="query", choices="names", prompt="{query} of {names}, {names[1]}"), "a"),
}


@pytest.mark.parametrize("name", TASKS)
def test_texts_stand_where_prompts_and_templates_name_their_columns(name):
    task, text = TASKS[name]
    row = {"a": "x", "b": "y"} if text is None else {task.text: text}
    given = {"text": text or "x y"}
    if task.pair is not None:
        row, given = row | {task.pair: "b"}, given | {"pair": "b"}
    if task.kind == "choice":
        row, given = row | {task.choices: ["c", "d"]}, given | {"choices": ["c", "d"]}
    by_role, by_column = read_inputs(task, [given, {"row": row}], prompted=True)
    assert by_role == by_column


def test_columns_that_are_a_part_of_a_text_are_asked_for():
    """The prompt of WiC names the word, which its text holds beside a sentence."""
    wic = builtin_tasks()["wic"]
    given = {"text": "w: a", "pair": "b"}
    with pytest.raises(
        Invalid, match=r'also reads sentence1 and word by name\. Give \{"row": \{"word": "…", "sentence1"'
    ):
        read_inputs(wic, [given], prompted=True)
    assert read_inputs(wic, [given])[0].texts == (("w: a", "b"),), "a host with a head reads no prompt"
    with pytest.raises(Invalid, match="also reads text by name"):
        read_inputs(Task(kind="text", text="question", template="{text} {question} {target}"), ["a"], prompted=True)


def test_choices_of_several_columns_are_a_list_unless_a_prompt_names_them():
    task, given = Task(kind="choice", choices="a,b"), {"text": "x", "choices": ["c", "d", "e"]}
    assert [choice for _, choice in read_inputs(task, [given], prompted=True)[0].texts] == ["c", "d", "e"]
    with pytest.raises(Invalid, match="also reads a and b by name"):
        read_inputs(task.model_copy(update={"prompt": "{text}: {a} or {b}"}), [given], prompted=True)
