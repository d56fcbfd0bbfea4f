"""What one portion of a step adds to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.compose.consistency import mixture_loss
from inlay.compose.fuse import penalty
from inlay.host.verbs import inlays_of
from inlay.training.codec import Codec
from inlay.training.evaluate import scores
from inlay.training.tokens import IGNORED


@dataclass(frozen=True)
class Portion:
    """Some of a step's rows, run at once."""

    batch: dict[str, Tensor]
    """Their inputs and labels."""
    row_weight: float
    """What the loss of one row, or of one target token, counts in the step's mean."""
    step_share: float
    """What this portion bears of anything that a step adds once, such as a penalty."""


class Objective(Protocol):
    """The loss of a portion. `model` is what runs: the host itself, or the host as accelerate wraps it."""

    def __call__(self, model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion) -> Tensor: ...


def plain_loss(model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion) -> Tensor:
    """The task's loss and the active setup's regulariser, which is 0 where there is none."""
    batch, labels = dict(portion.batch), portion.batch["labels"]
    if codec.form != "text":  # the decoder's inputs are made from the labels
        del batch["labels"]
    return codec.loss(scores(model, batch), labels) * portion.row_weight + penalty(host) * portion.step_share


def consistent_loss(model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion) -> Tensor:
    """AdaMix: the task's loss of one draw, and how far another draw is from it."""
    batch = dict(portion.batch)
    there = batch.pop("there", None)
    counted = int((batch["labels"] != IGNORED).sum()) if codec.form == "text" else len(batch["labels"])

    def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
        if there is not None:
            logits = logits.masked_fill(~there, torch.finfo(logits.dtype).min)
        return codec.loss(logits, labels) * portion.row_weight

    return mixture_loss(model, batch, task_loss, weight=counted * portion.row_weight).loss


def objective_for(host: PreTrainedModel, name: str | None) -> Objective:
    """The objective of what trains."""
    if name is not None and inlays_of(host)[name].method.compared_passes() > 1:
        return consistent_loss
    return plain_loss
