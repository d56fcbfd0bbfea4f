"""Setups as steps: what several parts make of one module's output.

Two kinds of trees share the same branches. *Changing* trees add to the output (adapters, LoRA); *stand-in* trees give
another output in its place (norms, heads). The leaves of changing trees come from the methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.errors import SetupError
from inlay.methods.acting import Seen, Step, in_dtype_of


@dataclass(frozen=True)
class StandIn:
    """Another module's output instead of the host's, from the same inputs and in the same dtype."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        args = (in_dtype_of(self.module, x) if _is_stream(x) else x for x in seen.args)
        return self.module(*args).to(h.dtype)


@dataclass(frozen=True)
class PooledStandIn:
    """A head that pools the last hidden states itself; its logits get the shape that the host expects."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        assert seen.hidden is not None
        hidden = in_dtype_of(self.module, seen.hidden.to(h.device))  # a host may have its head on another device
        logits = self.module(hidden, seen.mask).to(h.dtype)  # (B, labels), or (B, T, labels)
        if h.dim() == 2 or logits.dim() == 3:
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
    """What the host gave."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return h


@dataclass(frozen=True)
class InTurn:
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


Index = tuple[list[Tensor | slice], Tensor | None]
"""The parts of the batch that each step has, and the way back to its order; None: they are in order."""


@dataclass(frozen=True)
class ByRow:
    """Rows: the rows of each step, together; then back in the batch's order."""

    steps: tuple[Step, ...]
    index: tuple[tuple[int, ...], ...]
    """For each step the parts of the batch that are its own."""
    kept: dict[torch.device, Index] = field(default_factory=dict, compare=False, repr=False)
    """The index as tensors and slices."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        index, back = self._made(h.device) if torch.compiler.is_compiling() else self._kept(h.device)
        parts = sum(map(len, self.index))
        if h.shape[0] % parts:
            raise SetupError(
                f"Rows has {parts} parts, but a module that an inlay changes gave out {tuple(h.shape)}. Either the "
                f"batch has another size, or all rows share this, like DeBERTa's relative positions: inlays that "
                f"change it cannot act in Rows."
            )
        if back is None and torch.is_grad_enabled():
            return self._split(h, seen, parts)
        results = []
        for step, at, mine in zip(self.steps, index, self.index, strict=True):

            def take(x: Tensor, at: Tensor | slice = at) -> Tensor:
                if x.shape[0] == parts:
                    return x[at]
                return x.unflatten(0, (parts, -1))[at].flatten(0, 1)  # one part is several rows: beams, choices

            results.append(step(take(h), seen.rows(take)).unflatten(0, (len(mine), -1)))
        whole = torch.cat(_same_shape(results))
        return (whole if back is None else whole[back]).flatten(0, 1)

    def _split(self, h: Tensor, seen: Seen, parts: int) -> Tensor:
        """Rows that lie in order, in training: the gradient of a slice is a whole tensor of zeros, for each step."""
        sizes = [len(mine) for mine in self.index]
        given: list[tuple[Tensor, ...]] = []

        def share_out(x: Tensor) -> Tensor:
            each = x.shape[0] // parts
            given.append(x.split([size * each for size in sizes]))
            return x

        share_out(h)
        seen.rows(share_out)
        results = []
        for number, step in enumerate(self.steps):
            own, *rest = (each[number] for each in given)
            mine = iter(rest)
            result = step(own, seen.rows(lambda x, mine=mine: next(mine)))  # type: ignore[misc]
            results.append(result.unflatten(0, (sizes[number], -1)))
        return torch.cat(_same_shape(results)).flatten(0, 1)

    def _made(self, device: torch.device) -> Index:
        """The parts of each step, and the way back to the batch's order. What lies side by side need not be copied."""
        order = [part for mine in self.index for part in mine]
        back = sorted(range(len(order)), key=order.__getitem__)
        index = [_slice(mine) or torch.tensor(mine, device=device) for mine in self.index]
        return index, None if back == order == sorted(order) else torch.tensor(back, device=device)

    def _kept(self, device: torch.device) -> Index:
        """The same, made once: a GPU waits for every list that is sent to it."""
        if device not in self.kept:
            with torch.inference_mode(False):
                self.kept[device] = self._made(device)
        return self.kept[device]


def _is_stream(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _slice(rows: tuple[int, ...]) -> slice | None:
    """Rows that follow each other as a slice."""
    return slice(rows[0], rows[-1] + 1) if rows == tuple(range(rows[0], rows[-1] + 1)) else None


def _same_shape(results: list[Tensor]) -> list[Tensor]:
    """Heads with fewer labels are filled up with the lowest number, which no softmax and no argmax chooses.

    Beside rows with logits for every token (…, T, labels), rows with logits for the text (…, labels) have the same at
    each of them.
    """
    most = max(x.dim() for x in results)
    deepest = next(x for x in results if x.dim() == most)
    if deepest.dim() > 3:
        results = [x if x.dim() > 3 else x.unsqueeze(2).expand(-1, -1, deepest.shape[2], -1) for x in results]
    widest = max(x.shape[-1] for x in results)
    return [F.pad(x, (0, widest - x.shape[-1]), value=torch.finfo(x.dtype).min) for x in results]


def unpooled_rows(step: Step, rows: int) -> list[int]:
    """Which of a batch's rows have a head that gives each token logits from its own hidden state, as a copied one."""
    if isinstance(step, InTurn):  # what stands in comes first
        return unpooled_rows(step.steps[0], rows)
    if not isinstance(step, ByRow):
        return [] if any(isinstance(leaf, PooledStandIn) for leaf in leaves(step)) else list(range(rows))
    each = rows // sum(map(len, step.index))
    parts = [at for part, mine in zip(step.steps, step.index, strict=True) if unpooled_rows(part, 1) for at in mine]
    return [at * each + row for at in sorted(parts) for row in range(each)]


def in_turn(steps: list[Step]) -> Step | None:
    """One step for several; None for none."""
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else InTurn(tuple(steps))


def leaves(step: Step) -> Iterator[Step]:
    """Every step that is not made of others."""
    if isinstance(step, InTurn | Mean | ByRow):
        for part in step.steps:
            yield from leaves(part)
    else:
        yield step
