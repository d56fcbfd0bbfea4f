"""Merge: a mixture becomes a plain inlay with the mean of its modules."""

from __future__ import annotations

from torch import nn

from inlay.compose.mix import mixture_of
from inlay.host.verbs import bare, inlays_of
from inlay.methods.mixture import merge_module


def merge(host: nn.Module, name: str) -> None:
    """Turn a mixture into a plain inlay of its base method with the mean of its modules, under the same name."""
    model, inlays = bare(host), inlays_of(host)
    inlay = mixture_of(host, name)
    for part in inlay.parts.values():
        merge_module(part)
    inlay.method = inlay.method.method  # type: ignore[attr-defined]
    inlays.activate(model, inlays.active)
