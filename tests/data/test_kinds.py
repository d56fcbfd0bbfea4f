"""Rows of tags, spans and several labels: what is read, and what is wrong with them, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay.data import Data, DataError, Task, prepare
from inlay.data.examples import examples
from inlay.data.metrics import entities
from inlay.data.rows import Table
from tests.training.small import rows_of, write_rows

CONTEXT = "Ada met Bob in Paris."


def test_tags_are_found_and_belong_to_the_words(tmp_path):
    found = prepare(Data(kind="tags", train_file=write_rows(tmp_path / "t.jsonl", rows_of("tags", 20))))
    assert found.task.labels == ("B-NEG", "B-POS", "I-NEG", "I-POS", "O")
    assert found.task.metrics == ("entity_f1", "token_accuracy")
    for example in found.train:
        assert len(example.target) == len(example.words)
        assert example.texts[0][0].split() == list(example.words)


def test_tags_without_entities_are_measured_by_accuracy(tmp_path):
    rows = [{"tokens": ["a", "b"], "tags": ["NOUN", "VERB"]}] * 12
    found = prepare(Data(kind="tags", train_file=write_rows(tmp_path / "t.jsonl", rows)))
    assert found.task.metrics == ("token_accuracy",)
    assert any("no entities" in note for note in found.notes)


def test_answers_are_read_with_several_right_ones_and_none(tmp_path):
    several = {"text": ["Bob", "Bob in Paris"], "answer_start": [8, 8]}
    rows = [{"question": "who?", "context": CONTEXT, "answers": several}] * 11
    rows.append({"question": "why?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}})
    found = prepare(
        Data(kind="spans", train_file=write_rows(tmp_path / "t.jsonl", rows), validation_file=tmp_path / "t.jsonl")
    )
    assert found.task.unanswerable
    assert "1 questions have no answer" in found.notes
    assert found.train[0].target == (("Bob", 8), ("Bob in Paris", 8))
    assert found.train[-1].target == ()


def test_several_labels_come_as_a_list_or_between_commas(tmp_path):
    task = Task(kind="multilabel", labels=("a", "b"))
    rows = [
        {"text": "x", "labels": ["b", "a"]},
        {"text": "x", "labels": "b"},
        {"text": "x", "labels": ""},
        {"text": "x", "labels": []},
    ]
    assert [example.target for example in examples(task, Table(rows, "rows"))] == [(0, 1), (1,), (), ()]
    (tmp_path / "t.csv").write_text("text,labels\n" + 'x,"a,b"\ny,a\nz,\n' * 5)
    assert prepare(Data(kind="multilabel", train_file=tmp_path / "t.csv")).task.labels == ("a", "b")


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    good = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}
    files = {
        "train_file": write_rows(
            tmp_path / "t.jsonl",
            [
                good,
                {"tokens": ["a"], "tags": ["O", "O"]},
                {"tokens": ["a", ""], "tags": ["O"]},
                {"tokens": "a b", "tags": ["O"]},
            ],
        ),
        "validation_file": write_rows(tmp_path / "v.jsonl", [{"tokens": ["a"], "tags": ["B-Y"]}]),
    }
    with pytest.raises(DataError) as told:
        prepare(Data(kind="tags", **files))
    for words in (
        "line 2: 2 tags for 1 tokens",
        "line 3: word 1 is ''; 1 tags for 2 tokens",
        "line 4: 'tokens' must be a list of words, got 'a b'",
        "v.jsonl, line 1: label 'B-Y' was not seen in training",
    ):
        assert words in str(told.value)


def test_an_answer_that_is_not_in_the_context():
    def row(text: str, start: object) -> dict:
        return {"question": "who?", "context": CONTEXT, "answers": {"text": [text], "answer_start": [start]}}

    rows = [
        row("Bob", 8),
        row("Bob", 3),
        row("Eve", 0),
        row("Bob", -1),
        {"question": "q", "context": CONTEXT, "answers": "Bob"},
    ]
    with pytest.raises(DataError) as told:
        examples(Task(kind="spans"), Table(rows, "rows"))
    for words in (
        "row 2: answer 'Bob' is not in the context at 3, where ' me' stands; it is at 8",
        "row 3: answer 'Eve' is not in the context at 0, where 'Ada' stands, and it is nowhere in it",
        "row 4: answer 'Bob' begins at -1, which is no position",
        'row 5: answers are {"text": [...], "answer_start": [...]} with one start per text, got \'Bob\'',
    ):
        assert words in str(told.value)
    assert "row 1" not in str(told.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "tags", "text": "{a} {b}"}, "tags belong to the words of one column"),
        ({"kind": "spans", "pair": None}, "name its column as pair"),
        ({"kind": "multilabel", "metrics": ("accuracy",)}, "does not measure multilabel; use macro_f1, micro_f1, subset_accuracy"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be(fields, message):
    with pytest.raises(Exception, match=message):
        Task(**fields)


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("B-X I-X O B-Y", [("X", 0, 1), ("Y", 3, 3)]),
        ("B-X B-X I-X", [("X", 0, 0), ("X", 1, 2)]),
        ("I-X I-X O I-Y", [("X", 0, 1), ("Y", 3, 3)]),
        ("B-X I-Y I-Y", [("X", 0, 0), ("Y", 1, 2)]),
        ("O I B I", [("", 1, 1), ("", 2, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 1)]),
    ],
)
def test_entities_as_seqeval_finds_them(tags: str, wanted):
    """Worked out by hand from conlleval's rules, which seqeval follows by default."""
    assert entities(tags.split()) == wanted


def test_the_command_line_refuses_bad_rows_and_writes_nothing(tmp_path: Path, monkeypatch, capsys):
    from inlay.cli import main

    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "t.jsonl", [{"tokens": ["a"], "tags": ["O", "O"]}, {"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(SystemExit) as left:
        main(["train", "--host", "nowhere", "--kind", "tags", "--train-file", "t.jsonl", "--validation-file", "t.jsonl", "--out", "out"])  # fmt: skip
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "2 tags for 1 tokens" in told
    assert "1 tags for 2 tokens" in told
    assert "no host 'nowhere'" in told
    assert not (tmp_path / "out").exists()
