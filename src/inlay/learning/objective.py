"""What one portion of a step adds to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from inlay.fusions import penalty
from inlay.learning.evaluate import scores
from inlay.learning.material import Language

Objective = Callable[[Any, PreTrainedModel, Language, dict[str, Tensor], float, float], Tensor]
"""(model, host, language, batch, weight of a row, share of the step) → loss of the portion."""


def plain_loss(model: Any, host: PreTrainedModel, language: Language, batch: dict[str, Tensor], weight: float, share: float) -> Tensor:
    """The task's loss and the active setup's regulariser, which is 0 where there is none."""
    labels = batch["labels"]
    if language.form != "text":  # the decoder's inputs are made from the labels
        batch = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return language.loss(scores(model, batch), labels) * weight + penalty(host) * share


def objective_for(host: PreTrainedModel, name: str | None) -> Objective:
    """The objective of what trains."""
    return plain_loss
