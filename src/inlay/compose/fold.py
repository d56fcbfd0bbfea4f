"""Fold a LoRA inlay into the host's own weights, and take it out again, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.errors import SetupError
from inlay.host.offload import quantised
from inlay.host.registry import Folded, id_of
from inlay.host.verbs import bare, inlays_of
from inlay.methods.lora import LoRA, LowRankChange, part_rows


def fold(host: nn.Module, name: str) -> None:
    """Add a LoRA inlay's changes to the host's own weights: it acts at no extra cost until `unfold`.

    The old weights are kept, so that `unfold` is exact. Until then the inlay is active and no other setup can be, in
    whatever thread.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    if inlays.folded is not None:
        raise SetupError(f"{inlays.folded.name!r} is folded already. inlay.unfold(host) first.")
    if reason := inlay.method.why_not_plain(name):
        raise SetupError(reason)
    if not isinstance(inlay.method, LoRA):
        raise SetupError(f"{name!r} is a {inlay.method.kind} inlay; only LoRA can be folded into the host's weights.")
    changes = {inlays.anatomy.places[id_of(key)]: part for key, part in inlay.parts.items()}
    for place, part in changes.items():
        if isinstance(part, LowRankChange):
            _check_foldable(model, place)
    inlays.activate(model, name)
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for place, part in changes.items():
            if isinstance(part, LowRankChange):
                module: Any = model.get_submodule(place.module)
                kept.setdefault(place.module, module.weight.detach().clone())
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.T  # (D_out, D_in)
                rows = part_rows(place, weight.shape[0]).to(weight.device)
                change = part.weight()  # may be more exact than the weight: the sum is rounded once
                weight[rows] = (weight[rows].to(torch.promote_types(weight.dtype, change.dtype)) + change).to(
                    weight.dtype
                )
    inlays.folded = Folded(name, kept)
    inlays.acting.forget_threads()  # what another one activated would act on weights that have changed already
    inlays.activate(model, name)


def _check_foldable(model: nn.Module, place: Place) -> None:
    weight: Any = model.get_submodule(place.module).weight
    if weight.is_meta:
        raise SetupError(f"{place.id} cannot be folded: its weight is elsewhere until the host runs (offloaded).")
    if quantised(weight):
        kept = f"{type(weight).__name__}, {weight.dtype}"
        raise SetupError(f"{place.id} cannot be folded: its weight is quantised ({kept}).")
    owners = [name for name, m in model.named_modules() if any(p is weight for p in m._parameters.values())]
    if len(owners) > 1:
        raise SetupError(f"{place.id} cannot be folded: its weight is tied, {' and '.join(owners)} share it.")


def unfold(host: nn.Module) -> None:
    """Give the host its own weights back, bit for bit."""
    model, inlays = bare(host), inlays_of(host)
    if inlays.folded is None:
        raise SetupError("nothing is folded into this host")
    with torch.no_grad():
        for path, weight in inlays.folded.weights.items():
            module: Any = model.get_submodule(path)
            module.weight.copy_(weight)
    name, inlays.folded = inlays.folded.name, None
    inlays.acting.forget_threads()  # what another one activated leaves out what the weights had
    inlays.activate(model, name)
