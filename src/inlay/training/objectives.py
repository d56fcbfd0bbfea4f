"""What one portion of a step adds to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.compose.consistency import mixture_loss
from inlay.compose.fuse import penalty
from inlay.host.verbs import inlays_of
from inlay.training.codec import Codec
from inlay.training.evaluate import by_choice, scores
from inlay.training.head_first import last_layer, reaching
from inlay.training.label_words import at_masks, take_masks
from inlay.training.pairs import pair_loss
from inlay.training.recipe import Recipe


@dataclass(frozen=True)
class Portion:
    """Some of a step's rows, run at once."""

    batch: dict[str, Tensor]
    """Their inputs and labels."""
    row_weight: float
    """What the loss of one row, or of one target token, counts in the step's mean."""
    step_share: float
    """The part of a once-per-step term, such as a penalty, that this portion adds."""


class Objective(Protocol):
    """The loss of a portion. `model` is what runs: the host itself, or the host as accelerate wraps it."""

    def __call__(self, model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion) -> Tensor: ...


def plain_loss(model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion) -> Tensor:
    """The task's loss and the active setup's regulariser, which is 0 where there is none."""
    batch, labels = host_inputs(host, codec, portion.batch), portion.batch["labels"]
    if codec.form != "text" or codec.decoder:  # encoder-decoders make the decoder's inputs from the labels
        del batch["labels"]
    return codec.loss(scores(model, batch, codec), labels) * portion.row_weight + penalty(host) * portion.step_share


def consistent_loss(
    model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion, *, weight: float = 1.0, detach: bool = True
) -> Tensor:
    """AdaMix: the task's loss of one draw, and how far another draw is from it. Absent choices count in neither."""
    batch = host_inputs(host, codec, portion.batch)
    has_choice, labels = batch.pop("has_choice", None), batch["labels"]
    masks = take_masks(batch)

    def compared(logits: Tensor) -> Tensor:
        if masks and codec.words is not None:
            return at_masks(logits, masks, codec.words)
        return codec.compared(codec.aligned(logits, labels)) if has_choice is None else by_choice(logits, has_choice)

    def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return codec.loss(codec.compared(logits), labels) * portion.row_weight  # swapped a second time: as they were

    whole = codec.counted(labels) * portion.row_weight * weight
    return mixture_loss(
        model, batch, task_loss, weight=whole, detach=detach, compared=compared, problem=codec.problem(),
        aligned=True,
    ).loss  # fmt: skip


def paired_loss(
    model: nn.Module, host: PreTrainedModel, codec: Codec, portion: Portion, *, objective: Objective, weight: float
) -> Tensor:
    """Another objective, and the pairs of the portion's texts, where a text has one label and one vector."""
    layer = last_layer(host) if codec.form == "labels" and codec.task.kind == "classification" else None
    if layer is None:
        return objective(model, host, codec, portion)
    with reaching(layer) as seen:
        loss = objective(model, host, codec, portion)
    features, labels = seen[-1], portion.batch["labels"]
    if features.dim() != 2:  # a copy of a decoder's head reads every token
        return loss
    labels = labels.repeat(len(features) // len(labels))  # a mixture answers twice
    return loss + weight * portion.step_share * pair_loss(features, labels)


def host_inputs(host: PreTrainedModel, codec: Codec, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a host is given; of decoders that can leave logits out, only those that are needed are asked for."""
    if codec.decoder and "logits_to_keep" in signature(host.forward).parameters:
        return batch | {"logits_to_keep": batch["labels"].shape[1] + 1}
    return dict(batch)


def objective_for(host: PreTrainedModel, name: str | None, recipe: Recipe | None = None) -> Objective:
    """The loss that fits what trains: with a consistency loss for mixtures, and with `pairs` if the recipe says so."""
    recipe = recipe or Recipe()
    plain = _of_task(host, name, recipe)
    return partial(paired_loss, objective=plain, weight=recipe.pairs) if recipe.pairs else plain


def _of_task(host: PreTrainedModel, name: str | None, recipe: Recipe) -> Objective:
    if name is not None and inlays_of(host)[name].method.compared_passes() > 1:
        weight = 1.0 if recipe.consistency is None else recipe.consistency
        return partial(consistent_loss, weight=weight, detach=recipe.consistency_detach is not False)
    return plain_loss
