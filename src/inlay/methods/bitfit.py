"""BitFit: train the biases and nothing else (Ben Zaken et al. 2022).

    y = W x + b + δ        δ of the inlay's own, b the host's

The δ is added by the inlay, so that several of them live on one host. A host without biases, such as T5, gets them on
its linear maps and norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.methods.base import Method, Reads, register


class Bias(nn.Module):
    """δ, the same for every token; it starts at zero."""

    def __init__(self, width: int, after: int = 0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.shape = (width, *(1,) * after)

    @classmethod
    def at(cls, module: nn.Module) -> Bias:
        """As wide as what a module gives out."""
        bias = getattr(module, "bias", None)
        like: Any = bias if isinstance(bias, Tensor) else module.weight
        return cls(like.shape[0], len(getattr(module, "kernel_size", ())))  # a convolution's channels do not come last

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.view(self.shape)


@register("bitfit")
class BitFit(Method):
    """An additive bias for every bias of the host."""

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        return anatomy.of_kind("bias")

    def reads_at(self, place: Place) -> Reads:
        return "output"

    def build(self, place: Place, anatomy: Anatomy, host: nn.Module, shared: nn.Module) -> Bias:
        return Bias.at(host.get_submodule(place.module))
