"""Average: one inlay whose weights are the mean of others' (a model soup)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from inlay.errors import ConfigError, SetupError
from inlay.host.offload import check_here
from inlay.host.registry import Inlay
from inlay.host.verbs import bare, free_name, inlays_of


def average(host: nn.Module, names: Sequence[str], *, name: str, weights: Sequence[float] | None = None) -> None:
    """A new inlay whose weights are the mean of others' that were trained apart (a model soup)."""
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    if isinstance(names, str):
        raise ConfigError(f"names is a list of names, got the text {names!r}")
    chosen = [inlays[n] for n in names]
    shares = _shares(chosen, weights)
    first = chosen[0]
    for other in chosen:
        check_here(other.name, other)
        if reason := other.method.why_not_plain(other.name):
            raise SetupError(f"only plain inlays have a mean: {reason}")
        if other.method != first.method or other.head != first.head or other.norms != first.norms:
            raise SetupError(
                f"{first.name!r} and {other.name!r} differ in {', '.join(_differences(first, other))}, so their "
                f"weights have no mean. inlay.Average is the mean of what inlays of any method compute."
            )
    mean = copy.deepcopy(first)
    mean.name = name
    tensors = [inlay.tensors() for inlay in chosen]
    with torch.no_grad():
        for key, tensor in mean.tensors().items():
            exact = torch.promote_types(tensor.dtype, torch.float32)  # rounded once, at the end
            parts = [share * own[key].to(tensor.device, exact) for share, own in zip(shares, tensors, strict=True)]
            tensor.copy_(torch.stack(parts).sum(0))
    inlays.admit(model, mean)


def _shares(chosen: list[Inlay], weights: Sequence[float] | None) -> list[float]:
    if not chosen:
        raise ConfigError("average needs at least one inlay")
    given = [1.0] * len(chosen) if weights is None else [float(w) for w in weights]
    if len(given) != len(chosen) or not 0 < sum(given) < float("inf") or min(given) < 0:
        raise ConfigError(f"average needs {len(chosen)} weights of at least 0 that do not all vanish, got {given}")
    return [w / sum(given) for w in given]


def _differences(one: Inlay, other: Inlay) -> list[str]:
    """Where two inlays are not of one kind: a method's single settings, else the whole of it."""
    pairs: list[tuple[str, Any, Any]] = [("method", one.method.kind, other.method.kind)]
    if one.method.kind == other.method.kind:
        theirs = dict(other.method)  # every field; `describe` leaves out some that have their usual value
        pairs = [(name, said, theirs[name]) for name, said in one.method]
    found = [f"{name} ({said!r} and {theirs!r})" for name, said, theirs in pairs if said != theirs]
    return found + [name for name in ("head", "norms") if getattr(one, name) != getattr(other, name)]
