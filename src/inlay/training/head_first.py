"""The head before the rest: the last linear layer of a new head, fitted to a few rows before the first step.

    min over W, b of  Σ_rows loss(W x + b) + s² ‖W‖² / (2 C)          x what reaches the layer, s² the mean of ‖x‖²

With cross-entropy that is logistic regression on the host's own features. It is convex, so a run from fifty rows begins
where a regression ends, whatever its seed, instead of at random weights that mislead the inlay. The factor s² makes C
mean the same on every host: it is that of features of length 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import last_linear
from inlay.host.setup import names_in
from inlay.host.verbs import active, evaluating, inlays_of
from inlay.training.batching import reading_batches
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.evaluate import BATCH, by_choice, scores
from inlay.training.tokens import on_device

C = 5.0
"""Where no validation rows choose: the best on the demo's sentiment tasks, without the rows that judge there."""
CHOICES = (0.05, 0.5, 5.0, 50.0)
"""What validation rows choose from. For two labels scikit-learn's C is twice ours: 0.1, 1, 10 and 100."""
STEPS = 200
"""Of L-BFGS, at most."""
ONE_ANSWER = ("classification", "regression", "choice", "multilabel")
"""Kinds whose answer is in the layer's outputs for a row, so that validation rows are read once for all C."""


@dataclass(frozen=True)
class _Reached:
    """A batch at the layer, in double precision: what the layer is given, the labels, which choices are there."""

    rows: list[int]
    x: Tensor
    labels: Tensor
    has_choice: Tensor | None

    def logits(self, weight: Tensor, bias: Tensor) -> Tensor:
        each = nn.functional.linear(self.x, weight, bias)
        return each if self.has_choice is None else by_choice(each, self.has_choice)


def fit_head(
    host: PreTrainedModel, codec: Codec, split: EncodedSplit, validation: EncodedSplit | None = None
) -> bool:  # fmt: skip
    """Fit the active setup's own head to labelled rows. False where there is none, or it does not train.

    validation: rows that choose C, by the task's main metric; of equally good ones the smallest. A head that gives all
    of them the same label is never chosen, though it may score best where labels are uneven: the inlay could not learn
    through it.
    """
    layer = last_layer(host)
    if codec.form != "labels" or layer is None or not layer.weight.requires_grad:
        return False
    reached = _what_reaches(host, layer, codec, split)
    asked = validation if codec.task.kind in ONE_ANSWER and validation is not None and validation.examples else None
    strengths = CHOICES if asked is not None else (C,)
    tried = {strength: _fitted(layer, codec, reached, strength) for strength in strengths}
    sound = {strength: found for strength, found in tried.items() if all(each.isfinite().all() for each in found)}
    if not sound:
        return False
    best = C if C in sound else max(sound)
    if asked is not None:
        seen = _what_reaches(host, layer, codec, asked)
        answers = {strength: _answers(codec, asked, seen, *found) for strength, found in sound.items()}
        telling = [each for each, said in answers.items() if codec.task.kind != "classification" or _tells(said)]
        best = max(telling, key=lambda strength: _value(codec, asked, answers[strength]), default=best)
    weight, bias = sound[best]
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return True


def _fitted(layer: nn.Linear, codec: Codec, reached: Sequence[_Reached], strength: float) -> tuple[Tensor, Tensor]:
    """The layer's weight and bias at the minimum."""
    rows = sum(part.x[..., 0].numel() for part in reached)
    scale = sum(float(part.x.square().sum()) for part in reached) / max(1, rows)
    weight = torch.zeros_like(layer.weight, dtype=torch.float64, device="cpu", requires_grad=True)
    bias = torch.zeros_like(layer.bias, dtype=torch.float64, device="cpu", requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        whole = scale * weight.square().sum() / (2 * strength)
        for part in reached:
            whole = whole + codec.loss(part.logits(weight, bias), part.labels)
        whole.backward()
        return whole

    optimizer.step(objective)
    return weight.detach(), bias.detach()


def _answers(
    codec: Codec, split: EncodedSplit, seen: Sequence[_Reached], weight: Tensor, bias: Tensor
) -> list[Answer]:  # fmt: skip
    """What a head says of rows that have been read."""
    found: dict[int, Answer] = {}
    for part in seen:
        found |= zip(part.rows, codec.answers(part.logits(weight, bias).float(), split, part.rows), strict=True)
    return [found[row] for row in range(len(split.examples))]


def _tells(answers: Sequence[Answer]) -> bool:
    """Whether rows are told apart."""
    return len({answer.prediction for answer in answers}) > 1


def _value(codec: Codec, split: EncodedSplit, answers: Sequence[Answer]) -> float:
    """The main metric."""
    value = codec.measure(split, answers)[codec.task.main]
    return value if math.isfinite(value) else -math.inf


def last_layer(host: PreTrainedModel) -> nn.Linear | None:
    """The layer that makes the logits of the active inlay's own head; of a stack the uppermost one's."""
    inlays = inlays_of(host)
    heads = [inlays[name] for name in names_in(active(host)) if inlays[name].head is not None]
    if not heads:
        return None
    part = heads[-1].part(list(inlays.anatomy.of_kind("head"))[-1])
    found = last_linear(part) if part is not None else None
    return found[1] if found is not None and found[1].bias is not None else None


@contextmanager
def reaching(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """What the layer is given, pass by pass."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


@torch.no_grad()
def _what_reaches(host: PreTrainedModel, layer: nn.Linear, codec: Codec, split: EncodedSplit) -> list[_Reached]:
    """Every batch of rows, without dropout."""
    found = []
    with evaluating(host):
        for rows in reading_batches(split.features.lengths, BATCH):
            batch = on_device(split.features.collate(rows), host.device)
            labels, has_choice = batch.pop("labels"), batch.get("has_choice")
            with reaching(layer) as seen:
                scores(host, batch, codec)
            x = seen[-1].double().cpu()
            found.append(_Reached(rows, x, labels.cpu(), None if has_choice is None else has_choice.cpu()))
    return found
