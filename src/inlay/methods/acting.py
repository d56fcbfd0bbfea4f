"""How a module acts at its place: what it reads, and h' = h + δ(x)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.anatomy.places import Place
from inlay.methods.base import Reads


@dataclass(frozen=True)
class Seen:
    """What a hook sees in one call beside the output."""

    args: tuple[Any, ...]
    """The hooked module's own inputs."""
    residual: Tensor | None = None
    hidden: Tensor | None = None
    """Heads: the last hidden states (B, T, D)."""
    mask: Tensor | None = None
    """Heads: 1 at real tokens, 0 at padding (B, T)."""

    def rows(self, take: Callable[[Tensor], Tensor]) -> Seen:
        """The same for some rows of the batch only."""
        args = tuple(take(x) if isinstance(x, Tensor) else x for x in self.args)
        rest = {k: take(x) for k in ("residual", "hidden", "mask") if (x := getattr(self, k)) is not None}
        return replace(self, args=args, **rest)


class Step(Protocol):
    def __call__(self, h: Tensor, seen: Seen) -> Tensor: ...


@dataclass(frozen=True)
class Change:
    """h + δ(x): one module acts."""

    module: nn.Module
    reads: Reads
    place: Place
    owner: Any
    """The inlay, which knows whether this step leaves out the first layers."""
    norm: Step | None = None
    """Post-LN hosts: the norm of h + r as this setup has it."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        if self.owner.training and 0 <= self.place.layer < self.owner.left_out:
            return h
        x = fitting(read(self.reads, h, seen, self.norm), self.module)
        return h + spread(self.module(x).to(h.dtype), self.place)


def spread(delta: Tensor, place: Place) -> Tensor:
    """A change to one part of a fused projection, with zeros for the other parts."""
    projection = place.projection
    if projection is None or projection.parts == 1:
        return delta
    if not projection.per_head:
        width = delta.shape[-1]
        return F.pad(delta, (projection.part * width, (projection.parts - 1 - projection.part) * width))
    by_head = delta.unflatten(-1, (place.heads, 1, -1))  # (…, heads, 1, head size)
    before, after = projection.part, projection.parts - 1 - projection.part
    return F.pad(by_head, (0, 0, before, after)).flatten(-3)


def fitting(x: Tensor, module: nn.Module) -> Tensor:
    """x in the dtype of a module's parameters: some hosts keep a part of themselves in another. Autocast sees to it."""
    parameter = next(module.parameters())
    return x if x.dtype == parameter.dtype or torch.is_autocast_enabled(x.device.type) else x.to(parameter.dtype)


def read(reads: Reads, h: Tensor, seen: Seen, norm: Step | None) -> Tensor:
    """What a module reads at its place; see `Reads`."""
    if reads == "output":
        return h
    if reads == "input":
        return seen.args[0]
    assert seen.residual is not None
    if reads == "residual":
        return seen.residual
    x = h + seen.residual
    return x if reads == "stream" or norm is None else norm(x, Seen((x,)))
