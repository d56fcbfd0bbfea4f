"""report.html of a run: the config, the curve, the metrics, the confusion matrix, and the fusion's heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inlay.learning import charts
from inlay.learning.attention import attention_on, heat_map
from inlay.learning.files import write_whole
from inlay.learning.material import Answer, Split
from inlay.learning.page import code, page, section, table
from inlay.learning.run import CONFIG, Run

if TYPE_CHECKING:
    from inlay.learning.job import Job

MOST_LABELS = 30
"""A confusion matrix of more labels cannot be read."""


def write_report(run: Run, job: Job, judged: Split, answers: Sequence[Answer]) -> None:
    """Write the page into the run's folder."""
    record, task = run.record(), job.prepared.task
    facts = [
        ("task", f"{task.name} ({task.kind})"),
        ("host", record["host"]),
        ("mode", record["mode"]),
        ("method", record["method"] or "—"),
        ("trained parameters", record["trained_parameters"]),
        ("host parameters", record["host_parameters"]),
        ("rows", ", ".join(f"{split} {count:,}" for split, count in record["rows"].items())),
        ("seed", str(record["seed"])),
        ("steps", record["steps"]),
        ("best step", record["best_step"]),
        ("seconds", record["seconds"]),
        ("padding", f"{record['padding']:.1%}"),
        *(("note", note) for note in record["notes"]),
    ]
    scores = [(name, record["validation"].get(name), value) for name, value in record["scores"].items()]
    parts = [
        table(facts),
        section("Metrics", table(scores, ("metric", "validation", record["judged"]))),
        section("Curve", charts.curve(run.history(), task.main)),
    ]
    if task.kind == "classification" and len(task.labels) <= MOST_LABELS:
        targets = [int(example.target) for example in judged.examples]  # type: ignore[arg-type]
        parts.append(
            section("Confusion matrix", charts.confusion(task.labels, targets, [int(a.prediction) for a in answers]))
        )
    if job.settings.mode == "fusion":
        parts.append(section("What the fusion listens to", heat_map(attention_on(job.host, str(job.name), judged))))
    parts += [
        section("Config", code((run.folder / CONFIG).read_text(encoding="utf-8"))),
        section("Versions", table(list(record["versions"].items()))),
    ]
    write_whole(run.report, page(f"{record['name'] or task.name}: {task.main} {scores[0][2]:.4f}", parts))
