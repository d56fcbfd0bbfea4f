"""Merge: what only training needs is served as something plainer, such as a mixture as the mean of its modules."""

from __future__ import annotations

from torch import nn

from inlay.errors import SetupError
from inlay.host.verbs import bare, inlays_of


def merge(host: nn.Module, name: str) -> None:
    """Turn a mixture into a plain inlay of its base method with the mean of its modules, under the same name.

    A reparametrised prefix becomes the vectors that its network gives.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    plain = inlay.method.merged(inlay.parts.values())
    if plain is None:
        raise SetupError(f"{name!r} is a {inlay.method.kind} inlay, not a mixture, and has nothing to merge")
    inlay.take_method(plain)
    inlay.shared = plain.needed_of(inlay.shared)
    inlays.activate(model, inlays.active)
