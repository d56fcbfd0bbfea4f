"""Pairs of a step's rows: a second loss, by which texts of one label come close together and others part.

    mean over pairs of one label of (1 − cos)²  +  mean over pairs of two labels of cos²

cos is the cosine of what reaches the last layer of the head. From fifty rows a head is soon right about all of them,
and nothing is left to learn from; sixteen rows have 120 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pair_loss(features: Tensor, labels: Tensor) -> Tensor:
    """(B, D) and (B,) → how far the pairs are from where they should be; if one sort of pairs is missing, it adds 0."""
    unit = nn.functional.normalize(features.float(), dim=-1)
    cosines = unit @ unit.T
    same = labels[:, None] == labels
    alike = (same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)).float()
    apart = (~same).float()
    near = ((1 - cosines).square() * alike).sum() / alike.sum().clamp(min=1)
    return near + (cosines.square() * apart).sum() / apart.sum().clamp(min=1)
