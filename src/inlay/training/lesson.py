"""What the loop learns from: one task with its rows, and what acts on the host meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inlay.host.setup import Setup
from inlay.training.codec import Codec, EncodedSplit
from inlay.training.objectives import Objective, plain_loss
from inlay.training.recipe import Recipe


def as_it_is() -> None:
    """What acts stays as it is."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """One task of a training."""

    name: str
    codec: Codec
    train: EncodedSplit
    validation: EncodedSplit
    """Empty: nothing chooses among states, and the last one is the result."""
    recipe: Recipe
    """Says which of the task's metrics chooses the best state."""
    objective: Objective = plain_loss
    """The loss of a step's portion."""
    setup: Setup = None
    """Several tasks: what acts while this one is learned, as a rule its inlay."""
    enter: Callable[[], None] = as_it_is
    """Lets it act."""
    prefix: str = ""
    """Stands in front of its metrics' names, where there are several tasks."""
