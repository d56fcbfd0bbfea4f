"""BitFit: train the biases and nothing else (Ben Zaken et al. 2022).

    y = W x + b + δ        δ of the inlay's own, b the host's

The δ is added by the inlay, so that several of them live on one host. A host without biases, such as T5, gets them on
its linear maps and norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.methods.acting import Reads
from inlay.methods.base import Method, register


class Bias(nn.Module):
    """δ, the same for every token; it starts at zero. `trailing`: a convolution's channels do not come last."""

    def __init__(self, width: int, trailing: int = 0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.shape = (width, *(1,) * trailing)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.view(self.shape)


@register("bitfit")
class BitFit(Method):
    """An additive bias for every bias of the host."""

    rate: ClassVar[float] = 3e-4

    head: bool = False
    """Also the biases of the host's head, such as T5's LM head; not together with a head of the inlay's own."""

    def describe(self) -> dict[str, Any]:
        """As it has always been written, unless the head's biases train too."""
        found = super().describe()
        return found if self.head else {name: value for name, value in found.items() if name != "head"}

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        return anatomy.of_kind("bias", *(["head_bias"] if self.head else []))

    def reads_at(self, place: Place) -> Reads:
        return "output"

    def build(self, place: Place, shared: nn.Module) -> Bias:
        return Bias(place.d_out, place.trailing)
