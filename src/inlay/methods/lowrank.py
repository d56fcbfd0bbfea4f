"""LowRank adapters: each projection is a product of two thin factors (a baseline of Karimi Mahabadi et al. 2021).

W = s t        s (k, r), t (r, d), rank one by default        r(k + d) parameters per projection
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from inlay.methods.base import register
from inlay.methods.bottleneck import Bottleneck, Layer


class LowRankLinear(nn.Module):
    """k → d through r."""

    def __init__(self, k: int, d: int, rank: int) -> None:
        super().__init__()
        self.in_features = k
        self.left = nn.Parameter(torch.empty(k, rank))
        self.right = nn.Parameter(torch.empty(rank, d))
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:  # (…, k) -> (…, d)
        return x @ self.left @ self.right + self.bias

    def weight(self) -> Tensor:
        """The map as one matrix (k, d)."""
        return self.left @ self.right


@register("lowrank")
class LowRank(Bottleneck):
    """Adapters with rank-one projections."""

    trains_norms: ClassVar[bool] = True
    rate: ClassVar[float] = 3e-3
    text_rate: ClassVar[float | None] = 3e-3

    sites: tuple[Literal["attention", "ffn"], ...] = ("attention", "ffn")
    reduction: float | dict[Layer, float] = 32
    activation: str = "gelu_new"
    before_dropout: bool = True
    rank: int = Field(default=1, ge=1)
    """Rank of each projection."""

    def weights_of(self, k: int, d: int, p: int) -> tuple[str, int, str]:
        return "P·r(k+d)", p * self.rank * (k + d), f", r={self.rank}"

    def linear(self, d_in: int, d_out: int, shared: nn.Module) -> nn.Module:
        return LowRankLinear(d_in, d_out, self.rank)

    def initialise(self, down: nn.Module, up: nn.Module) -> None:
        assert isinstance(down, LowRankLinear)
        assert isinstance(up, LowRankLinear)
        for factor in (down.left, down.right, up.left, up.right):
            nn.init.xavier_uniform_(factor, gain=math.sqrt(2))
        if self.init == "identity":
            nn.init.zeros_(up.right)
