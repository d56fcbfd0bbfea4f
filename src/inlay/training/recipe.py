"""How to train: the settings of the loop, and the papers' values for each method."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from inlay.config import Config

Mode = Literal["inlay", "head", "full", "fusion"]


class Recipe(Config):
    """Settings of the loop. What is left open comes from the method's paper; see `filled`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; without it the one of the method's paper."""
    epochs: int | None = Field(default=None, ge=1)
    """Most passes over the training rows; without it 30, for a fusion 10."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after so many steps, whatever `epochs` says."""
    batch_size: int = Field(default=32, ge=1)
    """Rows per optimiser step, over all processes."""
    accumulate: int = Field(default=1, ge=1)
    """In how many portions a step's rows are run, to save memory; the result is the same."""
    warmup: float = Field(default=0.06, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's weight decay; none for biases and norms."""
    clip: float = Field(default=1.0, ge=0)
    """Longest gradient; 0 does not clip."""
    patience: int = Field(default=3, ge=0)
    """Evaluations without a better main metric before stopping; 0 never stops early."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; without it once per epoch."""
    save_every: int = Field(default=200, ge=1)
    """Steps between checkpoints; one is also written at each evaluation."""
    max_length: int = Field(default=256, ge=2)
    """Longest input in tokens; longer ones are cut."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision, where the device has it."""
    seed: int = Field(default=0, ge=0)
    """Everything that is left to chance follows from it."""


RATES: dict[str, float] = {
    "houlsby": 1e-4, "pfeiffer": 1e-4, "parallel": 1e-4, "bapna": 1e-4,
    "phm": 3e-3, "compacter": 3e-3, "compacter++": 3e-3, "lowrank": 3e-3,
    "bitfit": 3e-4, "mixture": 4e-4, "lora": 2e-4,
    "fusion": 5e-5, "head": 1e-3, "full": 2e-5,
}  # fmt: skip
"""Learning rates on encoders: AdapterFusion, AdaMix; full and head as usual for BERT."""
TEXT_RATES = RATES | {"houlsby": 3e-4, "pfeiffer": 3e-4, "parallel": 3e-4, "bapna": 3e-4, "full": 3e-4}
"""Learning rates on sequence-to-sequence hosts: Compacter."""
USUAL_RATE = 1e-4


def filled(recipe: Recipe, kind: str, *, text: bool = False) -> Recipe:
    """A recipe with nothing left open, for a method's kind or the mode 'head', 'full' or 'fusion'."""
    rates = TEXT_RATES if text else RATES
    open_ones: dict[str, Any] = {}
    if recipe.lr is None:
        open_ones["lr"] = rates.get(kind, USUAL_RATE)
    if recipe.epochs is None:
        open_ones["epochs"] = 10 if kind == "fusion" else 30
    return recipe.model_copy(update=open_ones)
