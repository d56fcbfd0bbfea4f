"""report.html of a run: the config, the curve, the metrics, the confusion matrix, and the fusion's heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.compose.activations import FusionActivations
from inlay.data.task import Task
from inlay.report.pages import page
from inlay.report.plots import confusion, curve, fusion_svg, scatter
from inlay.storage.plain_json import number
from inlay.training.codec import Answer, EncodedSplit
from inlay.training.progress import clock

MOST_MISTAKES, LONGEST_TEXT = 10, 200
MOST_LABELS = 30
"""A confusion matrix of more labels cannot be read."""


def run_page(
    record: Mapping[str, Any],
    history: Sequence[Mapping[str, float | None]],
    config: str,
    task: Task,
    judged: EncodedSplit,
    answers: Sequence[Answer],
    attention: FusionActivations | None,
) -> str:
    """The page of a run whose record is complete."""
    splits = {"validation": record["validation"], record["judged"]: record["scores"]}
    scores = [(name, *(number(of.get(name)) for of in splits.values())) for name in record["scores"]]
    return page(
        "run",
        title=f"{record['name'] or task.name}: {task.main} {scores[0][-1]:.4f}",
        facts=_facts(record, task),
        scores=scores,
        splits=list(splits),
        curve=curve(history, task.main) if history else None,  # a pruned fusion was not trained
        confusion=confusion_of(task, judged, answers),
        scatter=scatter_of(task, judged, answers),
        mistakes=mistakes_of(task, judged, answers),
        attention=fusion_svg(attention) if attention is not None else None,
        config=config,
        versions=list(record["versions"].items()),
    )


def _facts(record: Mapping[str, Any], task: Task) -> list[tuple[str, str]]:
    return [
        ("task", f"{task.name} ({task.kind})"),
        ("host", record["host"]),
        ("mode", record["mode"]),
        ("method", record["method"] or "—"),
        ("trained parameters", f"{record['trained_parameters']:,}"),
        ("host parameters", f"{record['host_parameters']:,}"),
        ("rows", ", ".join(f"{split} {count:,}" for split, count in record["rows"].items())),
        ("seed", str(record["seed"])),
        ("steps", f"{record['steps']:,}, the best after {record['best_step']:,}"),
        ("time", f"{clock(record['seconds'])}, {record.get('examples_per_second') or 0:,.0f} rows per second"),
        ("memory", f"{record['peak_megabytes']:,.0f} MB at most" if record.get("peak_megabytes") else "—"),
        ("cost", f"{record['seconds'] * record.get('processes', 1) / 3600:.3f} process hours"),
        ("padding", f"{record['padding']:.1%}"),
        *(("note", note) for note in record["notes"]),
    ]


def scatter_of(task: Task, judged: EncodedSplit, answers: Sequence[Answer]) -> str | None:
    pairs = [(example.target, answer.prediction) for example, answer in zip(judged.examples, answers, strict=True)]
    if task.kind != "regression":
        return None
    targets, said = [float(target) for target, _ in pairs], [float(one) for _, one in pairs]  # type: ignore[arg-type]
    if not all(map(math.isfinite, (*targets, *said))) or math.isinf(4 * (max(*targets, *said) - min(*targets, *said))):
        return None  # there are no axes for them
    return scatter(targets, said)


def mistakes_of(task: Task, judged: EncodedSplit, answers: Sequence[Answer]) -> list[tuple[str, str, str, float]]:
    """The rows that it was surest about and wrong: text, label, what it said, its share of certainty."""
    if task.kind != "classification":
        return []
    wrong = [
        (example, answer) for example, answer in zip(judged.examples, answers, strict=True)
        if answer.probabilities and answer.prediction != example.target
    ]  # fmt: skip
    wrong.sort(key=lambda pair: -max(pair[1].probabilities or (0.0,)))
    return [
        (
            " / ".join(text for text in example.texts[0] if text)[:LONGEST_TEXT],
            task.labels[int(example.target)],  # type: ignore[arg-type]
            task.labels[int(answer.prediction)],  # type: ignore[arg-type]
            max(answer.probabilities or (0.0,)),
        )
        for example, answer in wrong[:MOST_MISTAKES]
    ]


def confusion_of(task: Task, judged: EncodedSplit, answers: Sequence[Answer]) -> str | None:
    if task.kind != "classification" or len(task.labels) > MOST_LABELS:
        return None
    targets = [int(example.target) for example in judged.examples]  # type: ignore[arg-type]
    return confusion(task.labels, targets, [int(answer.prediction) for answer in answers])  # type: ignore[arg-type]
