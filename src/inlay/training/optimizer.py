"""AdamW as a recipe has it, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from inlay.training.recipe import Recipe


def adamw(learned: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay for matrices only, and not for those that `no_decay` names."""
    assert recipe.lr is not None
    decay, none = list[Tensor](), list[Tensor]()
    for name, parameter in learned.items():
        free = parameter.dim() <= 1 or any(fnmatchcase(name, pattern) for pattern in recipe.no_decay)
        (none if free else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": none, "weight_decay": 0.0}]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


def rate_at(step: int, total: int, recipe: Recipe) -> float:
    """The schedule: the learning rate of a step, counted from 0. It rises linearly, then does as `schedule` says."""
    assert recipe.lr is not None
    rise = recipe.warmup_steps(total)
    if step < rise:
        return recipe.lr * (step + 1) / rise
    left = max(0.0, (total - step) / max(1, total - rise))  # 1 when it begins to fall, 0 at the end
    return recipe.lr * {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}[recipe.schedule]
