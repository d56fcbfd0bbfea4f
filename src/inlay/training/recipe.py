"""How to train: the settings of the loop. What is left open comes from the method's paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.config import Config
from inlay.data.task import METRICS
from inlay.errors import ConfigError, nearest

if TYPE_CHECKING:
    from inlay.methods import Method

Mode = Literal["inlay", "head", "full", "fusion"]
Schedule = Literal["linear", "cosine", "constant"]
FUSION_VALUES = "*.parts.*.value.weight"
"""V of a fusion by its name: decay would pull it to 0 while the penalty pulls it to the identity."""
LOWER_IS_BETTER = ("ter",)
"""Metrics of mistakes."""
MEAN, LOSS = "mean", "loss"
"""What `select` may name beside the task's metrics: the mean of them all, and the loss on the validation rows."""


class Generation(Config):
    """How hosts that answer in text write: the likeliest words, several beginnings at once, or words by chance."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    beams: int = Field(default=1, ge=1, le=1024)
    """Generation: the width of the beam search; 1 is greedy."""
    length_penalty: float = 1.0
    """Generation with beams: above 0 prefers longer texts, below 0 shorter ones."""
    no_repeat_ngram: int = Field(default=0, ge=0)
    """Generation: no sequence of this many tokens appears twice in an answer; 0 allows all."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Generation: the maximum length of an answer in tokens; by default that of the longest training answer plus 8."""
    sampling: float = Field(default=0.0, ge=0)
    """Generation: sample tokens at this temperature; 0 always takes the likeliest."""
    top_k: int = Field(default=0, ge=0)
    """Sampling: only among the k likeliest tokens; 0 samples among all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sampling: only among the likeliest tokens that together have this probability."""
    sampling_seed: int = Field(default=0, ge=0, le=(1 << 32) - 1)
    """Sampling: the seed. A row's text depends on it and on the row's number, not on the other rows of its batch."""

    @model_validator(mode="after")
    def _beams_or_chance(self) -> Self:
        if self.sampling and self.beams > 1:
            raise ValueError(f"sampling follows one beginning, but beams is {self.beams}; leave one of the two out")
        return self

    def generation(self) -> Generation:
        """These settings alone."""
        return Generation(**{name: getattr(self, name) for name in Generation.model_fields})


class Recipe(Generation):
    """Settings of the loop; `filled` closes what is left open."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float | None = Field(default=None, gt=0, le=1e30)
    """Peak learning rate; by default that of the method's paper."""
    epochs: int | None = Field(default=None, ge=1)
    """At most this many passes over the training rows; by default 30, or 10 for a fusion."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps, whatever `epochs` says."""
    batch_size: int = Field(default=32, ge=1)
    """Rows per optimiser step, over all processes."""
    accumulate: int = Field(default=1, ge=1, le=100_000)
    """Run the rows of a step in this many portions, to save memory. The result is the same, except with `pairs`."""
    warmup: float = Field(default=0.06, ge=0)
    """Warm-up: the fraction of all steps (below 1), or the number of steps, during which the learning rate rises."""
    schedule: Schedule = "linear"
    """What the learning rate does after the warm-up: fall to zero linearly or along a cosine, or stay constant."""
    weight_decay: float = Field(default=0.01, ge=0, le=1e6)
    """AdamW's weight decay; it does not apply to biases and norms."""
    no_decay: tuple[str, ...] = (FUSION_VALUES,)
    """Other parameters without weight decay, by name (* matches anything); by default a fusion's V, which has a
    penalty."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas: the decay rates of its running averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the denominator for numerical stability."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """The part of each target that is spread evenly over all labels, or over the whole vocabulary for texts."""
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    """The weight of a row of each label, in the labels' order; or balanced, so that all labels count the same in
    total."""
    consistency: float | None = Field(default=None, ge=0)
    """Mixtures: the weight of the consistency loss between two random passes; by default 1, and 0 turns it off."""
    consistency_detach: bool | None = None
    """Mixtures: whether each pass is a constant target for the other, as in the published code; by default yes."""
    head_first: bool = False
    """Fit the new head to the training rows before the first step, with everything else frozen."""
    pairs: float = Field(default=0.0, ge=0, le=1e6)
    """Classification: the weight of a second loss, which pulls texts of a batch together if they have the same label,
    and pushes them apart if not."""
    clip: float = Field(default=1.0, ge=0)
    """Clip the gradients to at most this norm; 0 turns clipping off."""
    patience: int = Field(default=3, ge=0)
    """Stop early after this many evaluations without improvement; 0 never does."""
    select: str | None = None
    """What chooses the best state: one of the task's metrics (by default the first), mean for all of them, or loss."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; by default one evaluation per epoch."""
    save_every: int = Field(default=200, ge=1)
    """Steps between checkpoints; every evaluation writes one as well."""
    max_length: int = Field(default=256, ge=2, le=1 << 24)
    """Inputs are truncated to this many tokens."""
    stride: int = Field(default=128, ge=0)
    """Kind spans: by how many tokens the windows of a long context overlap; at most a quarter of max_length."""
    answering: Literal["generation", "ranking"] = "generation"
    """Hosts that answer in text: let them generate the answer, or rank the labels by likelihood in one pass."""
    packing: bool = False
    """Decoders that answer in text: put several short rows into one sequence; refused if that would change a result."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision, if the device supports it."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing its activations: less memory, more time."""
    seed: int = Field(default=0, ge=0, le=(1 << 32) - 1)
    """The seed of everything random."""

    @field_validator("warmup")
    @classmethod
    def _share_or_steps(cls, warmup: float) -> float:
        if warmup >= 1 and warmup != int(warmup):
            raise ValueError("a share of the steps is below 1, a number of steps is whole")
        return warmup

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both are at least 0 and below 1")
        return betas

    @field_validator("class_weights", mode="before")
    @classmethod
    def _balanced(cls, given: Any) -> Any:
        """From the command line a word comes as a list of one."""
        return given[0] if isinstance(given, list | tuple) and list(given) == ["balanced"] else given

    @field_validator("class_weights")
    @classmethod
    def _positive(cls, weights: Any) -> Any:
        if isinstance(weights, tuple) and not (weights and all(weight > 0 for weight in weights)):
            raise ValueError("one number above 0 for each label, or balanced")
        return weights

    def warmup_steps(self, total: int) -> int:
        """For how many of all steps the learning rate rises."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total)

    def selected(self, scores: dict[str, float]) -> tuple[str, float]:
        """What chooses the best state: its name, and its value among the task's scores, the main one first.

        Of a metric of mistakes it is the negative value: more is always better.
        """
        name = self.select or next(iter(scores))
        if name == LOSS:
            return name, math.nan  # no metric is asked, so that the loss decides
        if name == MEAN:
            return name, mean_of(scores)
        if name not in scores:
            raise ConfigError(
                f"`select` is {name!r}, but this task has the metrics {', '.join(scores)}; or use {MEAN} or {LOSS}."
            )
        return name, -scores[name] if name in LOWER_IS_BETTER else scores[name]


def mean_of(scores: Mapping[str, float]) -> float:
    """The mean of a task's metrics, those of mistakes as negative values; those of parts of the rows do not count."""
    known = {metric for kind in METRICS.values() for metric in kind}
    values = [-value if name in LOWER_IS_BETTER else value for name, value in scores.items() if name in known]
    return sum(values) / len(values) if values else math.nan


MODE_RATES: dict[str, tuple[float, float]] = {"head": (1e-3, 1e-3), "full": (2e-5, 3e-4)}
"""Learning rates of the modes without a method: on encoders, as usual for BERT, and on hosts that answer in text."""
MODE_EPOCHS = 30


def filled(recipe: Recipe, kind: str | Method, *, text: bool = False, fixed: bool = False) -> Recipe:
    """A recipe with nothing left open, for a method or its kind, or for the mode 'head' or 'full'.

    text: whether the host answers in text. A method says itself what its paper used.
    fixed: whether max_steps is how long to train, however many passes that takes.
    """
    lr, epochs = _usual(kind, text)
    epochs = max(epochs, recipe.max_steps or 0) if fixed else epochs  # a pass has one step at least
    return recipe.model_copy(update={"lr": recipe.lr or lr, "epochs": recipe.epochs or epochs})


def _usual(kind: str | Method, text: bool) -> tuple[float, int]:
    """Learning rate and epochs."""
    if not isinstance(kind, str):
        return kind.usual_rate(text), kind.epochs
    if kind in MODE_RATES:
        return MODE_RATES[kind][text], MODE_EPOCHS
    from inlay.methods import METHODS  # here, because it imports torch, which flags and settings do without

    if kind not in METHODS:
        raise ConfigError(f"unknown method {kind!r}.{nearest(kind, METHODS)}")
    method = METHODS[kind]
    return method.text_rate if text and method.text_rate is not None else method.rate, method.epochs
