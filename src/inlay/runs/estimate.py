"""What a job will cost, measured on one of its own batches."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from inlay.host.recompute import checkpoint_layers
from inlay.host.verbs import summary
from inlay.runs.facts import peak_megabytes
from inlay.runs.job import Job
from inlay.training.batching import padding_share, portion, training_batches
from inlay.training.evaluate import BATCH, ask
from inlay.training.objectives import Portion, objective_for
from inlay.training.tokens import on_device

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    return {
        "task": job.prepared.task.name,
        "kind": job.prepared.task.kind,
        "rows": {split: len(getattr(job.prepared, split)) for split in ("train", "validation", "test")},
        "labels": _labels(job),
        "notes": list(job.prepared.notes),
        "longest_row_tokens": int(lengths.max()),
        "max_length": limit,
        "rows_at_max_length": int((lengths >= limit).sum()),
        "padding": round(padding_share(lengths, batches), 4),
        "host_parameters": summary(job.host).host_parameters,
        "trained_parameters": trained,
        "steps_at_most": steps,
        "batch_size": settings.batch_size,
        "seconds_per_step": round(seconds, 4),
        "evaluation_seconds": round(judging, 2),
        "seconds_at_most": round(steps * seconds + judging, 2),
        "memory_megabytes_at_least": peak_megabytes(),
    }


def _labels(job: Job) -> dict[str, int] | None:
    """Training rows by label."""
    task = job.prepared.task
    if task.kind != "classification":
        return None
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
    """As the loop takes it: in as many portions, with its precision and its checkpointing."""
    train, times, settings, device = job.split("train"), [], job.settings, job.host.device
    if settings.gradient_checkpointing:
        checkpoint_layers(job.host)
    objective = objective_for(job.host, job.name, job.settings)
    for _ in range(2):  # the first one warms up
        began = time.monotonic()
        for i in range(min(settings.accumulate, len(rows))):
            mine = portion(rows, i, settings.accumulate)
            batch = on_device(train.features.collate(mine), device)
            with torch.autocast(device.type, HALVES.get(settings.precision), enabled=settings.precision in HALVES):
                loss = objective(job.host, job.host, job.codec, Portion(batch, 1 / len(rows), len(mine) / len(rows)))
            loss.backward()
        job.host.zero_grad(set_to_none=True)
        times.append(time.monotonic() - began)
    return times[-1]
