"""Merge: a mixture becomes a plain inlay with the mean of its modules."""

from __future__ import annotations

from torch import nn

from inlay.host.verbs import bare, inlays_of
from inlay.methods.mixture import as_mixture, merge_module


def merge(host: nn.Module, name: str) -> None:
    """Turn a mixture into a plain inlay of its base method with the mean of its modules, under the same name."""
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    mixture = as_mixture(name, inlay.method)
    for part in inlay.parts.values():
        merge_module(part)
    inlay.take_method(mixture.method)
    inlays.activate(model, inlays.active)
