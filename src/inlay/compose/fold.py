"""Fold a LoRA inlay into the host's own weights, and take it out again, bit for bit; or leave it there for good."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.errors import SetupError
from inlay.host.heads import PooledHead
from inlay.host.offload import quantised
from inlay.host.registry import Folded, id_of
from inlay.host.verbs import bare, inlays_of, strip
from inlay.methods.bitfit import Bias
from inlay.methods.lora import LoRA, LowRankChange, part_rows

WITHOUT = "Fold without for_good: then the inlay keeps it."


def fold(host: nn.Module, name: str, *, for_good: bool = False) -> None:
    """Add a LoRA inlay's changes to the host's own weights: it acts at no extra cost until `unfold`.

    The old weights are kept, so that `unfold` is exact. Until then the inlay is active and no other setup can be, in
    whatever thread. `save_pretrained` writes the changed weights, but nothing else that the inlay has, such as a head.

    for_good: make the host what it is with the inlay: its weights, and where the inlay has them its biases, norms, head
              and labels. All inlays come off, and `unfold` is no longer possible. What is left is a plain transformers
              model, which `save_pretrained` writes and transformers reads without Inlay.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    if inlays.folded is not None:
        raise SetupError(f"{inlays.folded.name!r} is folded already. inlay.unfold(host) first.")
    if reason := inlay.method.why_not_plain(name):
        raise SetupError(reason)
    if not isinstance(inlay.method, LoRA):
        raise SetupError(f"{name!r} is a {inlay.method.kind} inlay; only LoRA can be folded into the host's weights.")
    parts = {inlays.anatomy.places[id_of(key)]: part for key, part in inlay.parts.items()}
    changes = {place: part for place, part in parts.items() if isinstance(part, LowRankChange)}
    others = {place: part for place, part in parts.items() if place not in changes}
    for place in changes:
        _check_foldable(model, place)
    if for_good:
        for place, part in others.items():
            _check_replaceable(model, place, part)
    inlays.activate(model, name)
    kept = {} if for_good else {place.module: _weight(model, place).detach().clone() for place in changes}
    with torch.no_grad():
        for place, change in changes.items():
            _add(model, place, change)
    if for_good:
        for place, part in sorted(others.items(), key=lambda entry: isinstance(entry[1], Bias)):
            _replace(model, place, part)  # biases last: some belong to a norm that is replaced
        inlays.labels.keep()
        strip(model)
        return
    inlays.folded = Folded(name, kept)
    inlays.acting.forget_threads()  # what another one activated would act on weights that have changed already
    inlays.activate(model, name)


def _weight(model: nn.Module, place: Place) -> Tensor:
    module: Any = model.get_submodule(place.module)
    return module.weight


def _add(model: nn.Module, place: Place, part: LowRankChange) -> None:
    """W + scale · B A, in the rows of the module that are this place's."""
    weight = _weight(model, place)
    if not isinstance(model.get_submodule(place.module), nn.Linear):
        weight = weight.T  # (D_out, D_in)
    rows = part_rows(place, weight.shape[0]).to(weight.device)
    change = part.weight()  # may be more exact than the weight: the sum is rounded once
    weight[rows] = (weight[rows].to(torch.promote_types(weight.dtype, change.dtype)) + change).to(weight.dtype)


def _replace(model: PreTrainedModel, place: Place, part: nn.Module) -> None:
    """Give the host's own module the numbers of a bias, norm or head of the inlay's, in the dtype of what was there.

    The module stays, and with it the hooks that others have set on it.
    """
    module: Any = model.get_submodule(place.module)
    if isinstance(part, Bias):
        with torch.no_grad():
            module.bias.add_(part.bias)
        return
    for name, parameter in part.named_parameters():
        old = module.get_parameter(name)
        old.data = parameter.detach().to(old.device, old.dtype)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.out_features = layer.weight.shape[0]  # a head may have other labels


def _check_replaceable(model: nn.Module, place: Place, part: nn.Module) -> None:
    if isinstance(part, PooledHead):
        raise SetupError(
            f"{type(model).__name__} cannot have this head for good, because it pools tokens itself. {WITHOUT} "
            f"Or train with a copy of the host's own head: a Head without `pooling`."
        )
    module = model.get_submodule(place.module)
    if isinstance(part, Bias):
        if getattr(module, "bias", None) is None:
            raise SetupError(
                f"{place.id} cannot be folded: {place.module} has no bias that it could be added to. {WITHOUT}"
            )
        return
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise SetupError(
                f"{place.id} cannot be replaced: it is elsewhere until the host runs (offloaded). {WITHOUT}"
            )
        if len(_owners(model, parameter)) > 1:
            raise SetupError(f"{place.id} cannot be replaced: its {name} is tied to another module's. {WITHOUT}")


def _owners(model: nn.Module, weight: Tensor) -> list[str]:
    return [name for name, m in model.named_modules() if any(p is weight for p in m._parameters.values())]


def _check_foldable(model: nn.Module, place: Place) -> None:
    weight = _weight(model, place)
    if weight.is_meta:
        raise SetupError(f"{place.id} cannot be folded: its weight is elsewhere until the host runs (offloaded).")
    if quantised(weight):
        kept = f"{type(weight).__name__}, {weight.dtype}"
        raise SetupError(f"{place.id} cannot be folded: its weight is quantised ({kept}).")
    if len(owners := _owners(model, weight)) > 1:
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
