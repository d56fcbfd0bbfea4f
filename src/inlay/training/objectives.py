"""What one portion of a step adds to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.compose.fuse import penalty
from inlay.compose.mix import mixture_loss
from inlay.host.verbs import inlays_of
from inlay.training.codec import Language
from inlay.training.evaluate import scores
from inlay.training.tokens import IGNORED

Objective = Callable[[Any, PreTrainedModel, Language, dict[str, Tensor], float, float], Tensor]
"""(model, host, language, batch, weight of a row, share of the step) → loss of the portion."""


def plain_loss(
    model: Any, host: PreTrainedModel, language: Language, batch: dict[str, Tensor], weight: float, share: float
) -> Tensor:
    """The task's loss and the active setup's regulariser, which is 0 where there is none."""
    labels = batch["labels"]
    if language.form != "text":  # the decoder's inputs are made from the labels
        batch = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return language.loss(scores(model, batch), labels) * weight + penalty(host) * share


def consistent_loss(
    model: Any, host: PreTrainedModel, language: Language, batch: dict[str, Tensor], weight: float, share: float
) -> Tensor:
    """AdaMix: the task's loss of one draw, and how far another draw is from it."""
    there = batch.pop("there", None)
    counted = int((batch["labels"] != IGNORED).sum()) if language.form == "text" else len(batch["labels"])

    def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
        if there is not None:
            logits = logits.masked_fill(~there, torch.finfo(logits.dtype).min)
        return language.loss(logits, labels) * weight

    return mixture_loss(model, batch, task_loss, weight=counted * weight).loss


def objective_for(host: PreTrainedModel, name: str | None) -> Objective:
    """The objective of what trains."""
    if name is not None and inlays_of(host)[name].method.compared_passes() > 1:
        return consistent_loss
    return plain_loss
