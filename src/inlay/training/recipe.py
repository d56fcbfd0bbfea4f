"""How to train: the settings of the loop. What is left open comes from the method's paper."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from inlay.config import Config
from inlay.errors import ConfigError, nearest

Mode = Literal["inlay", "head", "full", "fusion"]


class Recipe(Config):
    """Settings of the loop; `filled` closes what is left open."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; by default the one of the method's paper."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training rows, at most; by default 30, and 10 for a fusion."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps, whatever `epochs` says."""
    batch_size: int = Field(default=32, ge=1)
    """Rows per optimiser step, over all processes."""
    accumulate: int = Field(default=1, ge=1)
    """Run the rows of a step in this many portions, to save memory; the result is the same."""
    warmup: float = Field(default=0.06, ge=0, lt=1)
    """The share of all steps during which the learning rate rises."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's weight decay; biases and norms have none."""
    clip: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to at most this norm; 0 does not clip."""
    patience: int = Field(default=3, ge=0)
    """Stop after this many evaluations without a better main metric; 0 never stops early."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; by default one evaluation per epoch."""
    save_every: int = Field(default=200, ge=1)
    """Steps between checkpoints; each evaluation writes one, too."""
    max_length: int = Field(default=256, ge=2)
    """Inputs are cut after this many tokens."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision, if the device has it."""
    seed: int = Field(default=0, ge=0)
    """The seed of everything that is left to chance."""


MODE_RATES: dict[str, tuple[float, float]] = {"head": (1e-3, 1e-3), "full": (2e-5, 3e-4)}
"""Learning rates of the modes without a method: on encoders, as usual for BERT, and on hosts that answer in text."""
MODE_EPOCHS = 30


def filled(recipe: Recipe, kind: str, *, text: bool = False) -> Recipe:
    """A recipe with nothing left open, for a method's kind or for the mode 'head' or 'full'.

    text: whether the host answers in text. A method says itself what its paper used.
    """
    lr, epochs = _usual(kind, text)
    return recipe.model_copy(update={"lr": recipe.lr or lr, "epochs": recipe.epochs or epochs})


def _usual(kind: str, text: bool) -> tuple[float, int]:
    """Learning rate and epochs."""
    if kind in MODE_RATES:
        return MODE_RATES[kind][text], MODE_EPOCHS
    from inlay.methods import METHODS  # here, because it imports torch, which flags and settings do without

    if kind not in METHODS:
        raise ConfigError(f"unknown method {kind!r}.{nearest(kind, METHODS)}")
    method = METHODS[kind]
    return method.text_rate if text and method.text_rate is not None else method.rate, method.epochs
