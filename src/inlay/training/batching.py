"""Batches by length: rows of like length together, so that little is padded; the order follows from the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POOL = 50
"""Rows are sorted within pools of this many batches: enough to save padding, few enough that epochs differ."""


def training_batches(lengths: Tensor, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch: shuffled, sorted by length within pools, cut into batches, and the batches shuffled."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator)
    pool = batch_size * max(1, min(POOL, len(lengths) // (batch_size * 4)))
    batches: list[list[int]] = []
    for part in order.split(pool):
        by_length = part[lengths[part].argsort(stable=True)]
        batches += [batch.tolist() for batch in by_length.split(batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def reading_batches(lengths: Tensor, batch_size: int) -> list[list[int]]:
    """Every row once, the longest first, so that a lack of memory shows at once."""
    return [batch.tolist() for batch in lengths.argsort(descending=True, stable=True).split(batch_size)]


def padding_share(lengths: Tensor, batches: Sequence[Sequence[int]]) -> float:
    """The share of all positions that is padding."""
    real = sum(int(lengths[torch.tensor(batch)].sum()) for batch in batches)
    run = sum(len(batch) * int(lengths[torch.tensor(batch)].max()) for batch in batches)
    return 1 - real / run if run else 0.0


def portion(rows: Sequence[int], part: int, parts: int) -> list[int]:
    """The share of one process or one accumulation step of a batch's rows."""
    return list(rows[part::parts])
