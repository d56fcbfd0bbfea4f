"""report.html of a run: the config, the curve, the metrics, the confusion matrix, and the fusion's heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.compose.attention import FusionActivations
from inlay.data.task import Task
from inlay.report.page import code, page, section, table
from inlay.report.plots import confusion, curve, fusion_svg
from inlay.training.codec import Answer, Split
from inlay.training.progress import clock

MOST_LABELS = 30
"""A confusion matrix of more labels cannot be read."""


def run_page(
    record: Mapping[str, Any],
    history: Sequence[dict[str, Any]],
    config: str,
    task: Task,
    judged: Split,
    answers: Sequence[Answer],
    attention: FusionActivations | None,
) -> str:
    """The page of a run whose record is complete."""
    facts = [
        ("task", f"{task.name} ({task.kind})"),
        ("host", record["host"]),
        ("mode", record["mode"]),
        ("method", record["method"] or "—"),
        ("trained parameters", f"{record['trained_parameters']:,}"),
        ("host parameters", f"{record['host_parameters']:,}"),
        ("rows", ", ".join(f"{split} {count:,}" for split, count in record["rows"].items())),
        ("seed", str(record["seed"])),
        ("steps", f"{record['steps']:,}, the best after {record['best_step']:,}"),
        ("time", clock(record["seconds"])),
        ("padding", f"{record['padding']:.1%}"),
        *(("note", note) for note in record["notes"]),
    ]
    splits = {"validation": record["validation"], record["judged"]: record["scores"]}
    scores = [(name, *(_number(of[name]) for of in splits.values())) for name in record["scores"]]
    parts = [
        table(facts),
        section("Metrics", table(scores, ("metric", *splits))),
    ]
    if history:  # a pruned fusion was not trained
        parts.append(section("Curve", curve(history, task.main)))
    if task.kind == "classification" and len(task.labels) <= MOST_LABELS:
        targets = [int(example.target) for example in judged.examples]  # type: ignore[arg-type]
        parts.append(section("Confusion matrix", confusion(task.labels, targets, [int(a.prediction) for a in answers])))
    if attention is not None:
        parts.append(section("What the fusion listens to", fusion_svg(attention)))
    parts += [
        section("Config", code(config)),
        section("Versions", table(list(record["versions"].items()))),
    ]
    return page(f"{record['name'] or task.name}: {task.main} {scores[0][-1]:.4f}", parts)


def _number(value: float | None) -> float:
    """A score from the record, where one that is not defined is null."""
    return math.nan if value is None else value
