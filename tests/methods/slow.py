"""Slow forms of the papers' formulas, to test the fast ones against."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.methods.fusion import FusionLayer


def slow_fusion(layer: FusionLayer, x: Tensor, zs: list[Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Pfeiffer et al. 2021, equation by equation: every K z_n and V z_n is computed."""
    z = torch.stack(zs, dim=-2)  # (B, T, N, D)
    q = x @ layer.query.weight.T + layer.query.bias
    k = z @ layer.key.weight.T + layer.key.bias
    v = z if layer.value is None else z @ layer.value.weight.T
    p = ((q.unsqueeze(-2) * k).sum(-1) / temperature).softmax(-1)
    return (p.unsqueeze(-1) * v).sum(-2), p
