"""What a cell answered about every judged row, kept small: labels as digits, numbers, or each row's own score.

No text of a row is in it; the digest of the judged rows says which rows they were, so that two cells can be compared
row by row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inlay.data.metrics import score
from inlay.data.task import Task

if TYPE_CHECKING:
    from inlay.data.examples import Example

NONE = "x"
"""Stands for an answer that is no label."""
MEANS = ("accuracy", "exact_match", "token_f1")
"""Metrics that are a mean over rows."""


def judged_facts(task: Task, examples: Sequence[Example], said: Sequence[Any]) -> dict[str, Any]:
    """The answers to the judged rows as cell.json holds them."""
    found: dict[str, Any] = {"judged_sha256": rows_digest(examples)}
    if task.kind in ("classification", "choice") and not any(example.answers for example in examples):
        targets = [int(example.target) for example in examples]  # type: ignore[arg-type]
        return found | {"right": packed(targets), "said": packed([int(one) for one in said])}
    if task.kind == "regression":
        right = [round(float(example.target), 5) for example in examples]  # type: ignore[arg-type]
        return found | {"right": right, "said": [round(float(one), 5) for one in said]}
    task, points = task.model_copy(update={"metrics": (task.main,)}), []
    for example, one in zip(examples, said, strict=True):
        words = example.choices[one] if example.answers and isinstance(one, int) and one >= 0 else one
        value = score(task, [example.answers or example.target], [words], [example.group])[task.main]
        points.append(round(value, 4) if math.isfinite(value) else 0.0)
    return found | {"points": points}


def packed(labels: Sequence[int]) -> str | list[int]:
    """Up to ten labels as one digit each, -1 as x; more as a list."""
    if all(-1 <= label <= 9 for label in labels):
        return "".join(NONE if label < 0 else str(label) for label in labels)
    return list(labels)


def unpacked(labels: str | Sequence[int]) -> list[int]:
    return [-1 if label == NONE else int(label) for label in labels]


def rows_digest(examples: Sequence[Example]) -> str:
    found = hashlib.sha256()
    for row in examples:
        found.update(repr((row.texts, row.target, row.group)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:20]
