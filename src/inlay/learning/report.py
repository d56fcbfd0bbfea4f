"""report.html of a run: the config, the curve, the metrics, the confusion matrix, and the fusion's heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from inlay.learning import charts
from inlay.learning.attention import attention_on, heat_map
from inlay.learning.files import write_whole
from inlay.learning.material import Answer, Split
from inlay.learning.page import code, page, section, table
from inlay.learning.run import CONFIG, Run
from inlay.learning.watch import clock
from inlay.tasks.task import Task

MOST_LABELS = 30
"""A confusion matrix of more labels cannot be read."""


def write_report(run: Run, host: PreTrainedModel, task: Task, judged: Split, answers: Sequence[Answer]) -> None:
    """Write the page of a run whose record is complete; the host answers as it did when it was judged."""
    record, history = run.record(), run.history()
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
        parts.append(section("Curve", charts.curve(history, task.main)))
    if task.kind == "classification" and len(task.labels) <= MOST_LABELS:
        targets = [int(example.target) for example in judged.examples]  # type: ignore[arg-type]
        parts.append(
            section("Confusion matrix", charts.confusion(task.labels, targets, [int(a.prediction) for a in answers]))
        )
    if record["mode"] == "fusion":
        parts.append(section("What the fusion listens to", heat_map(attention_on(host, record["name"], judged))))
    parts += [
        section("Config", code((run.folder / CONFIG).read_text(encoding="utf-8"))),
        section("Versions", table(list(record["versions"].items()))),
    ]
    write_whole(run.report, page(f"{record['name'] or task.name}: {task.main} {scores[0][-1]:.4f}", parts))


def _number(value: float | None) -> float:
    """A score from the record, where one that is not defined is null."""
    return math.nan if value is None else value
