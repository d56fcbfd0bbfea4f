"""What a training step costs, measured on a few rows: floating-point operations by torch's own counter, and memory.

fixed bytes        4 for each weight, and 12 more for each that trains: its gradient and AdamW's two averages
bytes per row      all tensors that autograd keeps for the backward pass, each storage once, without the weights
largest batch      (memory − fixed bytes) / bytes per row
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from inlay.runs.job import Job

ROWS = 8
"""Rows of the measured step."""


def step_costs(job: Job) -> dict[str, float]:
    """One step on a few rows; nothing is learned from it."""
    from torch.utils.flop_counter import FlopCounterMode

    from inlay.training.objectives import Portion, objective_for

    some = job.codec.encode((job.prepared.validation or job.prepared.train)[:ROWS])
    rows = len(some.examples)
    batch = some.features.collate(list(range(rows)))
    batch = {name: tensor.to(job.host.device) for name, tensor in batch.items()}
    objective = objective_for(job.host, job.name, job.settings)
    weights = {p.untyped_storage().data_ptr() for p in job.host.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    training = job.host.training
    job.host.train()
    try:
        with (
            torch.random.fork_rng([]),
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            objective(job.host, job.host, job.codec, Portion(batch, 1 / rows, 1.0)).backward()
    finally:
        job.host.zero_grad(set_to_none=True)
        job.host.train(training)
    every = sum(p.numel() for p in job.host.parameters())
    trained = sum(p.numel() for p in job.host.parameters() if p.requires_grad)
    return {
        "flops_per_row": round(counter.get_total_flops() / rows),
        "bytes_per_row": round(sum(kept.values()) / rows),
        "fixed_bytes": 4 * every + 12 * trained,
    }


def largest_batch(costs: dict[str, float], gigabytes: float) -> int | None:
    """How many rows of a step fit into this much memory."""
    if not costs.get("bytes_per_row"):
        return None
    return max(0, int((gigabytes * 1024**3 - costs["fixed_bytes"]) / costs["bytes_per_row"]))
