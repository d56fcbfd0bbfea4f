"""Bottlenecks of several inlays at one module, each for rows of its own, in one product instead of one after the other.

    rows of a batch     a  a  b  b  c  c                 δ = act(x Dᵢᵀ + dᵢ) Uᵢ + uᵢ
    x as (3, 2T, D)     ──── bmm with (3, D, b) ──── act ──── bmm with (3, b, D)

A server's batch has rows of many inlays. Small products cost more to begin than to do, so what is alike is done at
once: modules that read the same and have the same sizes and the same activation. What comes out is what each would have
given alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from inlay.methods.acting import Add, Seen, Step, read
from inlay.methods.base import BottleneckForm
from inlay.methods.bottleneck import Adapter

Maps = tuple[Tensor, Tensor, Tensor, Tensor]
"""(G, D, b), (G, 1, b), (G, b, D), (G, 1, D), G inlays or rows."""


def likeness(step: Step) -> Hashable:
    """Steps for which this is the same act together; None: a step acts by itself."""
    if type(step) is not Add or not isinstance(step.module, Adapter):
        return None
    module, projection = step.module, step.place.projection
    if module.training or module.norm is not None or projection is not None:
        return None
    if not isinstance(module.down, nn.Linear) or not isinstance(module.up, nn.Linear):
        return None  # those of a Compacter are not built
    return step.reads, step.norm, module.activation, module.down.weight.shape, module.down.weight.dtype


@dataclass(frozen=True)
class Together:
    """h + δ, where each step has some rows side by side; all steps are alike."""

    steps: tuple[Add, ...]
    rows: tuple[int, ...]
    """How many parts of the batch each step has."""
    kept: list[Maps] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        first = self.steps[0]
        x = read(first.reads, h, seen, first.place, first.norm)  # (rows · k, …, D)
        down, bias, up, up_bias = self._maps()
        flat = x.to(down.dtype).reshape(len(down), -1, x.shape[-1])
        z = ACT2FN[first.module.activation](torch.baddbmm(bias, flat, down))
        return h + torch.baddbmm(up_bias, z, up).reshape(x.shape).to(h.dtype)

    def _maps(self) -> Maps:
        """The matrices of each step, or of each row where steps have differently many; made when the batch begins."""
        if not self.kept:
            forms = [_form(step) for step in self.steps]
            downs = torch.stack([form.down for form in forms]).transpose(1, 2)
            biases = torch.stack([form.down_bias for form in forms]).unsqueeze(1)
            ups = torch.stack([form.up for form in forms])
            up_biases = torch.stack([form.up_bias for form in forms]).unsqueeze(1)
            found = downs, biases, ups, up_biases
            if len(set(self.rows)) > 1:
                own = torch.repeat_interleave(torch.tensor(self.rows, device=found[0].device))
                found = found[0][own], found[1][own], found[2][own], found[3][own]
            self.kept.append(found)
        return self.kept[0]


def _form(step: Add) -> BottleneckForm:
    assert isinstance(step.module, Adapter)
    return step.module.form(step.reads)
