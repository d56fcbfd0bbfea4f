"""Batches by length: rows of like length together, so that little is padded; the order follows from the seed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Batch = list[tuple[int, int]]
"""The rows of one step: the number of a row's task, and the row."""

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


def evenly(count: int, most: int | None) -> list[int]:
    """This many rows at even distances from each other, because files are often sorted by label."""
    if most is None or most >= count:
        return list(range(count))
    return [int(i * (count / most)) for i in range(most)]


def padding_share(lengths: Tensor, batches: Sequence[Sequence[int]]) -> float:
    """The share of all positions that is padding."""
    real = sum(int(lengths[torch.tensor(batch)].sum()) for batch in batches)
    run = sum(len(batch) * int(lengths[torch.tensor(batch)].max()) for batch in batches)
    return 1 - real / run if run else 0.0


def portion(rows: Sequence[T], part: int, parts: int) -> list[T]:
    """The share of one process or one accumulation step of a batch's rows."""
    return list(rows[part::parts])


def by_task(batch: Batch) -> dict[int, list[int]]:
    """The rows of each task of a batch, in their order."""
    found: dict[int, list[int]] = {}
    for task, row in batch:
        found.setdefault(task, []).append(row)
    return found


class Batches(Protocol):
    """Where the loop takes its batches from, epoch after epoch."""

    steps: int
    """Batches of an epoch."""

    def epoch(self, number: int) -> list[Batch]:
        """The batches of the next epoch, or of the one that was restored; counted from 0."""

    def state(self, *, begun: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the coming batches depend on besides the seed. `begun`: the epoch is not over, and is drawn again."""

    def restore(self, streams: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state."""

    def padding(self) -> float:
        """The share of all positions of the first epoch that is padding."""


class OneTask:
    """Batches of one task, which follow from the seed and the epoch."""

    def __init__(self, lengths: Tensor, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.steps = math.ceil(len(lengths) / batch_size)

    def epoch(self, number: int) -> list[Batch]:
        batches = training_batches(self.lengths, self.batch_size, self.seed, number)
        return [[(0, row) for row in rows] for rows in batches]

    def state(self, *, begun: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {}

    def restore(self, streams: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None: ...

    def padding(self) -> float:
        return padding_share(self.lengths, training_batches(self.lengths, self.batch_size, self.seed, 0))
