"""Look inside a fusion: how it weighs its members at every place, for every token of one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from inlay.compose.activations import fused_steps
from inlay.host.plan import Plan
from inlay.host.verbs import inlays_of
from inlay.methods.fusion import Fused, recording
from inlay.serve.requests import Request, Row
from inlay.serve.shelf import Shelf
from inlay.training.tokens import Features

DIGITS = 5
"""Of a weight."""


def look_inside(shelf: Shelf, batch: Sequence[Row], inputs: dict[str, Tensor]) -> None:
    """Run some rows of one request, as usual and with members off or pinned, if any are; what is seen stays with it."""
    request = batch[0].request
    if not request.looks:
        usual, changed = request.model.plan, shelf.plan_of(request.model, request.off, request.pin)
        plans = [usual] if changed is usual else [usual, changed]
        request.looks = [Look(plan, _by_layer(shelf, plan)) for plan in plans]
    for look in request.looks:
        look.at(shelf, batch, inputs)


def explained(request: Request) -> dict[str, Any]:
    """What the fusion says and how it weighs its members; the same again with members off or pinned, if any are."""
    model, usual = request.model, request.looks[0]
    sequences = range(len(request.found))
    found = {
        "model": model.name,
        "kind": model.codec.task.kind,
        "members": list(model.members),
        "places": list(usual.places),
        "texts": [_tokens(model.codec.tokenizer, request.split.features, i) for i in sequences],
        **usual.said(request),
        "changed": None,
    }
    for changed in request.looks[1:]:
        found["changed"] = changed.said(request) | {"off": list(request.off), "pin": request.pin}
    return found


@dataclass
class Look:
    """What is seen of one plan, row by row."""

    plan: Plan
    places: dict[str, Fused]
    logits: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, list[list[list[float]]]] = field(default_factory=dict)
    """By place, token and member."""

    def at(self, shelf: Shelf, batch: Sequence[Row], inputs: dict[str, Tensor]) -> None:
        """One pass over some rows."""
        model, features = batch[0].request.model, batch[0].request.split.features
        logits, recorded = self._pass(shelf.host, inputs, list(model.members.values()))
        for i, row in enumerate(batch):
            real = features.real(row.length, inputs["input_ids"].shape[1])
            own = logits[i, real] if model.codec.per_token else logits[i]
            self.logits[row.at] = own[..., : model.codec.outputs]
            self.weights[row.at] = [_rounded(whole[i, real]) for whole in recorded]

    def _pass(
        self, host: PreTrainedModel, inputs: dict[str, Tensor], members: list[str]
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits, and the weights at each place."""
        inlays_of(host).switch(host, self.plan)
        with recording(self.places.values()):
            logits: Tensor = host(**inputs).logits.cpu()
            return logits, [step.recorded(members, len(logits)) for step in self.places.values()]

    def said(self, request: Request) -> dict[str, Any]:
        """The answer and the weights, once all rows have run."""
        order = range(len(request.found))
        request.found = [self.logits[i] for i in order]
        return {"answer": request.said(request.answers())[0], "weights": [self.weights[i] for i in order]}


def _by_layer(shelf: Shelf, plan: Plan) -> dict[str, Fused]:
    """Place to the fusion's step there, from the first layer to the last."""
    found = fused_steps(plan)
    order = list(inlays_of(shelf.host).anatomy.places)
    return {place: found[place] for place in sorted(found, key=order.index)}


def _rounded(weights: Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in token] for token in weights.tolist()]


def _tokens(tokenizer: Any, features: Features, sequence: int) -> list[str]:
    """The tokens of a sequence as people read them."""
    begin, end = int(features.inputs.starts[sequence]), int(features.inputs.starts[sequence + 1])
    ids = features.inputs.columns["input_ids"][begin:end].tolist()
    return [str(token).replace("▁", " ").replace("Ġ", " ") for token in tokenizer.convert_ids_to_tokens(ids)]
