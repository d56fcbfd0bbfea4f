"""Evaluate a mixture by another way than its mean: a random module, the first, or an ensemble of passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import ConfigError
from inlay.host.verbs import activated, evaluating, inlays_of
from inlay.methods.mixture import Routing, alternatives, as_mixture


@contextmanager
def routing(host: nn.Module, name: str, how: Routing) -> Iterator[None]:
    """For the length of a `with` block, evaluate a mixture by 'random' modules or the 'first', not by their mean."""
    inlay = inlays_of(host)[name]
    as_mixture(name, inlay.method)
    choices = alternatives(inlay)
    if how not in ("merged", "random", "first", "learned"):
        raise ConfigError(f"a mixture is routed 'merged', 'random', 'first' or 'learned', got {how!r}")
    if how == "learned" and any(choice.gate is None for choice in choices):
        raise ConfigError(f"{name!r} has no gate that could route it; add it with routing='learned'")
    before = [choice.routing for choice in choices]
    for choice in choices:
        choice.routing = how
    try:
        yield
    finally:
        for choice, old in zip(choices, before, strict=True):
            choice.routing = old


def ensemble(host: nn.Module, name: str, batch: Mapping[str, Any], passes: int = 4) -> Tensor:
    """The mean logits of several random passes through a mixture, one of the paper's ablations."""
    if passes < 1:
        raise ConfigError(f"an ensemble needs at least one pass, got {passes}")
    with evaluating(host), activated(host, name), routing(host, name, "random"), torch.no_grad():
        return torch.stack([host(**batch).logits for _ in range(passes)]).mean(0)
