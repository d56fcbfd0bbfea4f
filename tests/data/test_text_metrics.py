"""Metrics of generated texts: those of the official programs on texts of ours, whatever the order, also of nothing."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from inlay.data import DataError, Task, score, text_metrics
from inlay.data.text_metrics import NEEDS_JAVA, measurable, score_texts
from inlay.training.recipe import Recipe

pytest.importorskip("sacrebleu", reason="needs the extra nlg")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "text_metrics.json").read_text(encoding="utf-8"))
REFS, SAID = [row[:-1] for row in GOLDEN["rows"]], [row[-1] for row in GOLDEN["rows"]]
JAVA = pytest.mark.skipif(not text_metrics.has_java(), reason="there is no Java here")
PLAIN = ("bleu", "nist", "ter", "chrf")
UNEVEN = [row[: 1 + i % 3] for i, row in enumerate(REFS)]
"""Another number of references in each row."""


def task(*metrics: str, scoring: str = "e2e") -> Task:
    return Task(kind="text", metrics=metrics, scoring=scoring)


@JAVA
def test_they_are_those_of_the_official_programs():
    """tools/make_text_fixture.py ran pycocoevalcap's own tokenizer and scorers, and the challenge's NIST."""
    found = score_texts(task("meteor", "rouge_l", "cider", "nist"), REFS, SAID)
    assert found == pytest.approx(GOLDEN["e2e"], abs=1e-9)
    order = random.Random(0).sample(range(len(SAID)), len(SAID))
    moved = score_texts(task("meteor", "rouge_l", "cider"), [REFS[i][::-1] for i in order], [SAID[i] for i in order])
    assert moved == pytest.approx({name: found[name] for name in moved}, abs=1e-9)
    nothing = score_texts(task("meteor", "rouge_l", "cider"), REFS, [*SAID[:-1], ""])
    assert all(0 <= value < found[name] for name, value in nothing.items())


def nist_by_hand(references: list[list[str]], said: list[str]) -> float:
    """The paper's formula again, from lists instead of counters, with the row's tokens cut at spaces."""
    words = [[text.lower().split() for text in row] for row in references]
    spoken = [text.lower().split() for text in said]

    def runs(text: list[str], n: int) -> list[str]:
        return [" ".join(text[i : i + n]) for i in range(len(text) - n + 1)]

    every = {n: [run for row in words for text in row for run in runs(text, n)] for n in range(1, 6)}
    counts = {n: Counter(found) for n, found in every.items()}
    total = 0.0
    for n in range(1, 6):
        top = 0.0
        for row, text in zip(words, spoken, strict=True):
            for run in set(runs(text, n)):
                hits = min(runs(text, n).count(run), max(runs(ref, n).count(run) for ref in row))
                if hits:
                    before = len(every[1]) if n == 1 else counts[n - 1][run.rpartition(" ")[0]]
                    top += hits * math.log(before / counts[n][run], 2)
        bottom = sum(len(runs(text, n)) for text in spoken)
        total += top / bottom if bottom else 0.0
    length = sum(len(text) for row in words for text in row) / (sum(len(row) for row in words) / len(words))
    short = min(1.0, sum(map(len, spoken)) / length)
    return total * math.exp(math.log(0.5) * (math.log(short) / math.log(1.5)) ** 2)


def test_nist_is_that_of_an_independent_computation():
    plain = [[" ".join(word.strip(".,;:!()'£-") for word in text.split()) for text in row] for row in GOLDEN["rows"]]
    plain = [[text.replace("-", " ").replace("'", " ") for text in row] for row in plain]
    refs, said = [row[: 1 + i % 3] for i, row in enumerate(plain)], [row[-1] for row in plain]
    assert len({len(row) for row in refs}) > 1, "rows have different numbers of references"
    found = score_texts(task("nist"), refs, said)["nist"]
    assert found == pytest.approx(nist_by_hand(refs, said), abs=1e-9)
    short = [text.rpartition(" ")[0] for text in said]
    assert score_texts(task("nist"), refs, short)["nist"] == pytest.approx(nist_by_hand(refs, short), abs=1e-9)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    import sacrebleu

    streams = [list(row) for row in zip(*REFS, strict=True)]
    cased = score_texts(task("bleu", "chrf", scoring="webnlg"), REFS, SAID)
    assert cased["bleu"] == pytest.approx(sacrebleu.corpus_bleu(SAID, streams).score / 100)
    assert cased["chrf"] == pytest.approx(sacrebleu.corpus_chrf(SAID, streams, word_order=2).score / 100)
    lower = score_texts(task("bleu"), REFS, SAID)["bleu"]
    assert lower == pytest.approx(sacrebleu.corpus_bleu(SAID, streams, lowercase=True).score / 100)
    assert lower != cased["bleu"]


def test_ter_is_the_mean_over_rows_of_the_least_over_references():
    refs = [["a b c d", "a b"], ["x y z"]]
    assert score_texts(task("ter"), refs, ["a b c", "x z y"])["ter"] == pytest.approx((1 / 4 + 1 / 3) / 2)


def test_neither_the_order_of_rows_nor_that_of_references_matters():
    order = random.Random(1).sample(range(len(SAID)), len(SAID))
    found = score_texts(task(*PLAIN), UNEVEN, SAID)
    moved = score_texts(task(*PLAIN), [UNEVEN[i][::-1] for i in order], [SAID[i] for i in order])
    assert found == pytest.approx(moved, abs=1e-12)


def test_an_empty_text_is_scored():
    one = score_texts(task(*PLAIN), UNEVEN, [*SAID[:-1], ""])
    none = score_texts(task(*PLAIN), UNEVEN, [""] * len(SAID))
    assert all(math.isfinite(value) for found in (one, none) for value in found.values())
    assert (none["bleu"], none["nist"], none["ter"], none["chrf"]) == (0, 0, 1, 0)


def test_a_task_is_scored_once_against_all_references_in_its_own_order():
    found = score(task("bleu", "exact_match", "ter"), [tuple(row) for row in REFS], SAID)
    assert list(found) == ["bleu", "exact_match", "ter"]
    assert found["bleu"] == score_texts(task("bleu"), REFS, SAID)["bleu"]
    perfect = score(
        task("bleu", "ter"), ["The cat sat down here.", ("a b c d e", "b")], ["The cat sat down here.", "a b c d e"]
    )
    assert perfect == pytest.approx({"bleu": 1, "ter": 0})


def test_a_missing_java_is_said_and_the_others_are_still_computed(monkeypatch):
    monkeypatch.setattr(text_metrics.shutil, "which", lambda name: None)
    left, notes = measurable(task("bleu", "meteor", "cider"))
    assert left.metrics == ("bleu",)
    assert "there is no Java here, which meteor, cider need: they are left out" in notes[0]
    assert set(score_texts(task("bleu", *NEEDS_JAVA), REFS, SAID)) == {"bleu"}
    with pytest.raises(DataError, match="no Java here, which meteor need.*or choose other metrics"):
        measurable(task("meteor"))


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"bleu, ter: not to be computed without pyter, sacrebleu.*pip install 'inlay\[nlg\]'"
    ):
        measurable(task("bleu", "ter"))
    assert measurable(task("exact_match"))[1] == []


def test_the_best_state_has_the_lowest_ter():
    assert Recipe(select="ter").selected({"bleu": 0.5, "ter": 0.2}) == ("ter", -0.2)


def test_a_program_of_meteors_that_has_ended_is_named(monkeypatch):
    monkeypatch.setattr(text_metrics, "JAVA", (sys.executable, "-c", ""))
    monkeypatch.setattr(text_metrics, "_jar", lambda *parts: "")
    meteor = text_metrics.Meteor()
    meteor.process.wait()
    with pytest.raises(DataError, match="has ended by itself"):
        meteor.score(REFS, SAID)
