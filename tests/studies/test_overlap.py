"""Judged rows that the members of a fusion have learned from or been chosen by are counted, and the table says so."""

from __future__ import annotations

import json
import re

import pytest

from inlay.studies.formats import as_text
from inlay.studies.tables import tables
from tests.studies.tiny import place, run_here, study_in
from tests.training.small import write_rows

WAYS = {
    "source": {"tasks": ["a", "b"], "rows": ["all"], "seeds": [0], "options": {"size": 4}, "show": False},
    "single": {"tasks": ["c"], "options": {"size": 4}},
    "fused": {"tasks": ["c"], "kind": "fusion", "members": [{"way": "source", "tasks": ["a", "b"]}, {"way": "single"}]},
    "joint": {"tasks": ["a", "c"], "kind": "joint"},
    "beside": {"tasks": ["a", "c"], "kind": "joint", "joint": "inlay"},
    "of-joint": {"tasks": ["c"], "kind": "fusion", "members": [{"way": "joint", "tasks": ["a"]}, {"way": "joint"}]},
}


def texts(file):
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    """Seven judged texts of c are training texts of a, in other letters, and two choose; those of b are all its own."""
    folder = place(tmp_path_factory.mktemp("leaky"))
    for name in "abc":
        for split in ("train", "test"):
            file = folder / "data" / name / f"{split}.jsonl"
            said = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            told = [row | {"text": f"{row['text']} {name} {split} {number}"} for number, row in enumerate(said)]
            write_rows(file, told)
    taught, judged = (folder / "data" / name for name in ("a/train.jsonl", "c/test.jsonl"))
    told = [json.loads(line) for line in taught.read_text(encoding="utf-8").splitlines()]
    for row, text in zip((*told[40:47], *told[:2]), texts(judged), strict=False):
        row["text"] = f"  {text.upper()} !"
    write_rows(taught.with_name("validation.jsonl"), told[:40])  # so that none of the others is held out
    write_rows(taught, told[40:])
    view, _ = run_here(study_in(folder, ways=WAYS, seeds=[0], groups=None), folder / "out")
    return folder, view


def result(view, way):
    cell = next(cell for slot, cell in view.filled.items() if (slot.way, slot.task) == (way, "c"))
    return view.results[cell.name]


def plain(file):
    return {re.sub(r"\W", "", text.lower()) for text in texts(file)}


def test_rows_that_a_member_learned_from_or_was_chosen_by_are_counted(leaky):
    folder, view = leaky
    held_out = plain(folder / "data/c/test.jsonl")
    assert [len(held_out & plain(folder / f"data/a/{split}.jsonl")) for split in ("train", "validation")] == [7, 2]
    assert not view.failed
    assert result(view, "fused")["seen_before"] == {"a": 7 + 2}


def test_also_of_tasks_that_were_trained_together(leaky):
    assert 2 <= result(leaky[1], "joint")["seen_before"]["a"] < 7 + 2  # which learn from 32 rows
    assert result(leaky[1], "of-joint")["seen_before"] == result(leaky[1], "joint")["seen_before"]
    assert "seen_before" not in result(leaky[1], "beside"), "its tasks share nothing"


def test_what_is_built_on_nothing_has_seen_nothing(leaky):
    assert "seen_before" not in result(leaky[1], "single")


def test_the_table_says_so(leaky):
    said = "Judged rows that are also training or validation rows of what a way is built on: c 9 (a's)."
    assert said in " ".join(as_text(tables(leaky[1]), leaky[1]).split()), "whatever the lines that it is broken into"
