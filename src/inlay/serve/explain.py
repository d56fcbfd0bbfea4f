"""Look inside a fusion: how it weighs its members at every place, for every token of one input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inlay.host.plan import Plan
from inlay.host.steps import leaves
from inlay.host.verbs import inlays_of
from inlay.methods.fusion import Fused
from inlay.serve.requests import Request
from inlay.serve.shelf import Shelf
from inlay.training.tokens import Features

DIGITS = 5
"""Of a weight."""


def explained(shelf: Shelf, request: Request) -> dict[str, Any]:
    """What the fusion says and how it weighs its members; the same again with members off or pinned, if any are."""
    model = request.model
    changed = shelf.plan_of(model, request.off, request.pin)
    usual = _looked(shelf, request, model.plan)
    found = {
        "model": model.name,
        "kind": model.codec.task.kind,
        "members": list(model.members),
        "places": usual.pop("places"),
        "texts": [_tokens(model.codec.tokenizer, request.split.features, i) for i in range(len(request.found))],
        **usual,
        "changed": None,
    }
    if changed is not model.plan:
        other = _looked(shelf, request, changed)
        del other["places"]
        found["changed"] = other | {"off": list(request.off), "pin": request.pin}
    return found


def _looked(shelf: Shelf, request: Request, plan: Plan) -> dict[str, Any]:
    """One pass over all rows of the input: answer, places, and weights by row, place, token and member."""
    model, host, features = request.model, shelf.host, request.split.features
    inputs = features.collate(range(len(request.split.examples)))
    inputs.pop("there", None)
    order = list(model.members.values())
    places = shelf_places(shelf, plan)
    for step in places.values():
        step.record = []
    inlays_of(host).switch(host, plan)
    try:
        logits = host(**{name: tensor.to(host.device) for name, tensor in inputs.items()}).logits.cpu()
        recorded = {place: _whole(step, order, logits.shape[0]) for place, step in places.items()}
    finally:
        for step in places.values():
            step.record = None
    weights = []
    for i, length in enumerate(features.inputs.lengths.tolist()):
        real = features.real(length, inputs["input_ids"].shape[1])
        request.found[i] = (logits[i, real] if model.per_token else logits[i])[..., : model.outputs]
        weights.append([_rounded(recorded[place][i, real]) for place in places])
    return {"answer": request.said(request.answers())[0], "places": list(places), "weights": weights}


def shelf_places(shelf: Shelf, plan: Plan) -> dict[str, Fused]:
    """Place to the fusion's step there, from the first layer to the last."""
    steps = [leaf for step in plan.steps.values() for leaf in leaves(step)]
    found = {step.place.id: step for step in steps if isinstance(step, Fused)}
    order = list(inlays_of(shelf.host).anatomy.places)
    return {place: found[place] for place in sorted(found, key=order.index)}


def _whole(step: Fused, order: list[str], rows: int) -> Tensor:
    """(B, T, N) in the order of the members; one that was pruned there has no weight."""
    weights = torch.cat(step.record or []).cpu()
    if weights.dim() == 2:  # hosts that flatten (B, T)
        weights = weights.unflatten(0, (rows, -1))
    whole = weights.new_zeros(*weights.shape[:-1], len(order))
    whole[..., [order.index(name) for name in step.names]] = weights
    return whole


def _rounded(weights: Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in token] for token in weights.tolist()]


def _tokens(tokenizer: Any, features: Features, sequence: int) -> list[str]:
    """The tokens of a sequence as people read them."""
    begin, end = int(features.inputs.starts[sequence]), int(features.inputs.starts[sequence + 1])
    ids = features.inputs.columns["input_ids"][begin:end].tolist()
    return [str(token).replace("▁", " ").replace("Ġ", " ") for token in tokenizer.convert_ids_to_tokens(ids)]
