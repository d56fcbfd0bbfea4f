"""What a job will cost, measured on one of its own batches."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from inlay.host.verbs import summary
from inlay.runs.train import Job, peak_megabytes
from inlay.training.batching import padding_share, training_batches
from inlay.training.evaluate import BATCH, ask
from inlay.training.objectives import Portion, objective_for
from inlay.training.progress import clock


def estimate(job: Job) -> dict[str, Any]:
    """Rows, labels, lengths, parameters, memory and time. One batch of middle length is run; nothing is written."""
    settings, train = job.settings, job.split("train")
    lengths, limit = train.features.lengths, job.codec.max_length
    batches = training_batches(lengths, settings.batch_size, settings.seed, 0)
    assert settings.epochs is not None
    steps = min(settings.max_steps or 1 << 60, settings.epochs * len(batches))
    seconds = _seconds_per_step(job, sorted(batches, key=lambda rows: int(lengths[rows].max()))[len(batches) // 2])
    judging = _seconds_to_validate(job) * (1 + steps // (settings.eval_every or len(batches)))
    trained = sum(p.numel() for p in job.host.parameters() if p.requires_grad)
    facts = {
        "task": f"{job.prepared.task.name} ({job.prepared.task.kind})",
        "rows": {split: len(getattr(job.prepared, split)) for split in ("train", "validation", "test")},
        "labels": _labels(job),
        "notes": list(job.prepared.notes),
        "longest_row": f"{int(lengths.max())} tokens (limit {limit}; {int((lengths >= limit).sum())} rows at it)",
        "padding": f"{padding_share(lengths, batches):.1%}",
        "host_parameters": summary(job.host).host_parameters,
        "trained_parameters": trained,
        "steps_at_most": steps,
        "time_at_most": f"{clock(steps * seconds + judging)} ({seconds:.2f} s per step of {settings.batch_size} rows; "
        f"evaluation {clock(judging)} of it)",
    }
    peak = peak_megabytes()
    return facts | ({"memory_at_least": f"{peak:,.0f} MB (peak of this check)"} if peak is not None else {})


def _labels(job: Job) -> dict[str, int] | str:
    task = job.prepared.task
    if task.kind != "classification":
        return "—"
    counts = Counter(task.labels[int(e.target)] for e in job.prepared.train)  # type: ignore[arg-type]
    return {label: counts[label] for label in task.labels}


def _seconds_to_validate(job: Job) -> float:
    """One evaluation, from the time of one batch of its rows; answers in text take longer than this."""
    rows = job.prepared.validation
    if not rows:
        return 0.0
    some = job.codec.encode(rows[:BATCH])
    began = time.monotonic()
    ask(job.host, job.codec, some)
    return (time.monotonic() - began) * len(rows) / max(1, len(some.examples))


def _seconds_per_step(job: Job, rows: list[int]) -> float:
    train, times = job.split("train"), []
    objective = objective_for(job.host, job.name, job.settings)
    for _ in range(2):  # the first one warms up
        began = time.monotonic()
        batch = {name: tensor.to(job.host.device) for name, tensor in train.features.collate(rows).items()}
        objective(job.host, job.host, job.codec, Portion(batch, 1 / len(rows), 1.0)).backward()
        job.host.zero_grad(set_to_none=True)
        times.append(time.monotonic() - began)
    return times[-1]
