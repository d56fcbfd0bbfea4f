"""Several tasks in one training: how often each of them is drawn.

    p_n ∝ |D_n|^α          |D_n| the training rows of task n, at most `cap`

    annealed       α = 1 − 0.8·(e − 1)/(E − 1) in epoch e of E     by size at first, nearly evenly at the end
    a number       0 evenly, 1 by size, ½ between them
    temperature    α = 1/T
    weights        p_n ∝ w_n, whatever the sizes

The annealed α is that of Stickland & Murray 2019: large tasks teach the shared weights first, small ones are not
forgotten at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from inlay.config import Config
from inlay.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

FALL = 0.8
"""By how much the annealed α falls from the first epoch to the last."""


class Sampling(Config):
    """How tasks are drawn."""

    alpha: float | Literal["annealed"] = "annealed"
    """α, from 0 (evenly) to 1 (by size), or annealed over the epochs."""
    temperature: float | None = Field(default=None, ge=1)
    """T, which gives α = 1/T: 1 by size, the higher the more evenly."""
    cap: int | dict[str, int] | None = None
    """The most rows that a task counts as; or one number per task."""
    weights: dict[str, float] | None = None
    """p_n in proportion to these numbers instead."""

    @field_validator("alpha")
    @classmethod
    def _a_share(cls, alpha: float | str) -> float | str:
        if not isinstance(alpha, str) and not 0 <= alpha <= 1:
            raise ValueError("lies between 0 (evenly) and 1 (by size), or is annealed")
        return alpha

    @field_validator("cap")
    @classmethod
    def _some_rows(cls, cap: int | dict[str, int] | None) -> int | dict[str, int] | None:
        given = cap.values() if isinstance(cap, dict) else () if cap is None else (cap,)
        if any(most < 1 for most in given):
            raise ValueError("a task counts as one row at least")
        return cap

    @field_validator("weights")
    @classmethod
    def _above_zero(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None and not (weights and all(weight > 0 for weight in weights.values())):
            raise ValueError("every task needs a number above 0; leave out a task that should never be drawn")
        return weights

    @model_validator(mode="after")
    def _one_way(self) -> Sampling:
        said = [name for name in ("temperature", "weights") if getattr(self, name) is not None]
        said += [] if self.alpha == "annealed" else ["alpha"]
        if len(said) > 1:
            raise ValueError(f"tasks are drawn in one way only, but {' and '.join(said)} are given")
        if self.weights is not None and self.cap is not None:
            raise ValueError("weights hold whatever the sizes, so that a cap changes nothing; leave one of them out")
        return self

    def alpha_at(self, epoch: int, epochs: int) -> float:
        """α in epoch e of E, counted from 1."""
        if self.temperature is not None:
            return 1 / self.temperature
        if self.alpha != "annealed":
            return self.alpha
        return 1 - FALL * (epoch - 1) / (epochs - 1) if epochs > 1 else 1.0

    def sizes(self, rows: Mapping[str, int]) -> dict[str, int]:
        """How many rows each task counts as."""
        caps = self.cap if isinstance(self.cap, dict) else dict.fromkeys(rows, self.cap)
        return {task: min(count, most) if (most := caps.get(task)) else count for task, count in rows.items()}

    def check(self, tasks: Mapping[str, object]) -> None:
        """Refuse numbers for tasks that there are not, and weights that leave one out."""
        for what in ("cap", "weights"):
            given = getattr(self, what)
            odd = sorted(set(given) - set(tasks)) if isinstance(given, dict) else []
            if odd:
                raise ConfigError(f"{what} names {', '.join(odd)}; the tasks are {', '.join(tasks)}.")
        missing = [task for task in tasks if self.weights is not None and task not in self.weights]
        if missing:
            raise ConfigError(f"weights says nothing of {', '.join(missing)}; give every task a number.")

    def shares(self, rows: Mapping[str, int], epoch: int, epochs: int) -> dict[str, float]:
        """p_n of every task in epoch e of E, counted from 1. `rows`: the training rows of each."""
        self.check(rows)
        alpha = self.alpha_at(epoch, epochs)
        each = self.weights or {task: count**alpha for task, count in self.sizes(rows).items()}
        whole = sum(each[task] for task in rows)
        return {task: each[task] / whole for task in rows}


class TaskDraws:
    """Draws tasks from a generator of its own, whose state is a tensor that can be kept and put back."""

    def __init__(
        self, rows: Mapping[str, int], sampling: Sampling | None = None, *, epochs: int, seed: int = 0
    ) -> None:
        import torch  # here, because flags and settings do without it

        self.rows, self.sampling, self.epochs = dict(rows), sampling or Sampling(), epochs
        self.sampling.check(self.rows)
        empty = [task for task, count in self.rows.items() if count < 1]
        if empty:
            raise ConfigError(f"no training rows: {', '.join(empty)}.")
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int, epoch: int) -> list[str]:
        """This many tasks, drawn independently with the shares of an epoch (counted from 1)."""
        import torch

        names = list(self.rows)
        shares = torch.tensor(list(self.sampling.shares(self.rows, epoch, self.epochs).values()), dtype=torch.float64)
        drawn = torch.multinomial(shares, count, replacement=True, generator=self.generator)
        return [names[i] for i in drawn.tolist()]

    @property
    def state(self) -> Tensor:
        """What the draws to come depend on."""
        return self.generator.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        self.generator.set_state(state)
