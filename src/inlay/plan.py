"""A setup resolved at one place: a small tree of steps that a hook runs.

Two kinds of trees share the same branches. *Changing* trees add to the place's output (adapters, LoRA); *stand-in*
trees give another output in its place (norms, heads). Steps are plain objects and not modules, so that a module is
registered once, in its inlay, however many setups use it; `deepcopy` of a host copies them along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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
    layer: int
    owner: Any
    """The inlay, which knows whether this step leaves out the first layers."""
    norm: Step | None = None
    """Post-LN hosts: the norm of h + r as this setup has it."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        if self.owner.training and self.layer < self.owner.left_out:
            return h
        return h + self.module(read(self.reads, h, seen, self.norm)).to(h.dtype)


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


@dataclass(frozen=True)
class StandIn:
    """Another module's output instead of the host's, from the same inputs."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return self.module(*seen.args)


@dataclass(frozen=True)
class PooledStandIn:
    """A head that pools the last hidden states itself; its logits get the shape that the host expects."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        logits = self.module(seen.hidden, seen.mask)  # (B, labels)
        if h.dim() == 2:
            return logits
        return logits.unsqueeze(1).expand(-1, h.shape[1], -1)  # the host picks a token: all of them say the same


@dataclass(frozen=True)
class HostNorm:
    """The host's own norm, called without its hooks."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return self.module.forward(*seen.args)


@dataclass(frozen=True)
class Unchanged:
    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return h


@dataclass(frozen=True)
class Chain:
    """Stack: each step acts on the result of the one before."""

    steps: tuple[Step, ...]

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        for step in self.steps:
            h = step(h, seen)
        return h


@dataclass(frozen=True)
class Mean:
    """Average: Σ w_i step_i(h)."""

    steps: tuple[Step, ...]
    weights: tuple[float, ...]

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        first, *rest = (step(h, seen) * w for step, w in zip(self.steps, self.weights, strict=True))
        return sum(rest, first)


@dataclass(frozen=True)
class Split:
    """Rows: the rows of each step, together; then back in the batch's order."""

    steps: tuple[Step, ...]
    index: tuple[tuple[int, ...], ...]
    """For each step the parts of the batch that are its own."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        parts = sum(map(len, self.index))
        results = []
        for step, mine in zip(self.steps, self.index, strict=True):
            at = torch.tensor(mine, device=h.device)

            def take(x: Tensor, at: Tensor = at) -> Tensor:  # one part may be several rows: beams, choices
                return x.unflatten(0, (parts, -1))[at].flatten(0, 1)

            results.append(step(take(h), seen.rows(take)).unflatten(0, (len(mine), -1)))
        order = torch.tensor([i for mine in self.index for i in mine], device=h.device)
        return torch.cat(_same_width(results))[order.argsort()].flatten(0, 1)


def _same_width(results: list[Tensor]) -> list[Tensor]:
    """Heads with fewer labels are filled up with the lowest number, which no softmax and no argmax chooses."""
    widest = max(x.shape[-1] for x in results)
    return [nn.functional.pad(x, (0, widest - x.shape[-1]), value=torch.finfo(x.dtype).min) for x in results]
