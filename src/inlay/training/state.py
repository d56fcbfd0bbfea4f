"""Where a training run is: everything that the rest of it depends on, in one file that is whole or not there.

checkpoint.safetensors   now.<parameter>, best.<parameter>, optimizer.<parameter>.<state>, rng.<process>[.cuda],
                         draws.<name> where tasks are drawn, and, as JSON in the header, the position
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import CheckpointError
from inlay.storage.files import write_whole
from inlay.storage.tensor_file import Damaged, pack, unpack


@dataclass(frozen=True)
class Standing:
    """How good a state is: by its metric or, while that says nothing, by its loss."""

    value: float
    """-inf: the metric says nothing."""
    loss: float | None = None

    @classmethod
    def of_loss(cls, loss: float) -> Standing:
        return cls(-math.inf, loss)

    def beats(self, other: Standing | None) -> bool:
        if other is None or self.loss is None:
            return other is None or self.value > other.value
        return other.value == -math.inf and (other.loss is None or self.loss < other.loss)


def together(standings: Sequence[Standing]) -> Standing:
    """The mean over tasks: of their losses if all have one, or else of their metrics; one that says nothing is 0."""
    losses = [each.loss for each in standings if each.loss is not None]
    if len(losses) == len(standings):
        return Standing.of_loss(sum(losses) / len(losses))
    values = [each.value if math.isfinite(each.value) else 0.0 for each in standings]
    return Standing(sum(values) / len(values))


@dataclass
class Position:
    """How far a run is, and how well it did."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """The next batch of this epoch."""
    best: float | None = None
    best_loss: float | None = None
    """Of the best state's validation rows, while no metric has said anything."""
    best_step: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    waited: int = 0
    """Evaluations since the best."""
    stopped: bool = False
    """Early stopping has spoken."""
    loss_sum: float = 0.0
    """Over the steps since the last evaluation."""
    loss_steps: int = 0
    streams: dict[str, Any] = field(default_factory=dict)
    """Several tasks: how far the rows of each have been read when the epoch began."""
    task_losses: dict[str, list[float]] = field(default_factory=dict)
    """Several tasks: the loss of each and its share of rows, summed over the steps since the last evaluation."""
    best_of: dict[str, float] = field(default_factory=dict)
    """Tasks that share nothing: the value of each one's best state."""
    best_losses: dict[str, float | None] = field(default_factory=dict)
    """The loss of that state, while no metric has said anything."""
    best_steps: dict[str, int] = field(default_factory=dict)
    """Its step."""


class Learned:
    """The parameters that train, by name: as they are now and as they were at the best evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.now = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.best: dict[str, Tensor] = {}
        self.more: dict[str, Tensor] = {}
        """What the batches to come depend on, where tasks are drawn."""

    def is_finite(self) -> bool:
        """Whether every number that was learned is one."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.now.values())

    def keep(self, names: Collection[str] | None = None) -> None:
        """Keep what is there now as the best state: all of it, or only some parameters."""
        self.best |= {name: self.now[name].detach().clone() for name in (self.now if names is None else names)}

    def restore(self) -> None:
        _pour(self.now, self.best)


def save_state(
    path: Path, position: Position, learned: Learned, optimizer: torch.optim.Optimizer, rng: list[dict[str, Tensor]]
) -> None:
    """Write the whole state of a run."""
    tensors = {f"now.{name}": parameter.detach() for name, parameter in learned.now.items()}
    tensors |= {f"best.{name}": tensor for name, tensor in learned.best.items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in learned.now.items()}
    for parameter, entries in optimizer.state.items():
        tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in entries.items()}
    tensors |= {f"draws.{name}": tensor for name, tensor in learned.more.items()}
    for process, states in enumerate(rng):
        tensors |= {f"rng.{process}.{device}": state for device, state in states.items()}
    write_whole(path, pack(tensors, position=json.dumps(asdict(position))))


def load_state(path: Path, learned: Learned, optimizer: torch.optim.Optimizer, process: int) -> Position:
    """Put a run back to where it was."""
    try:
        tensors, notes = unpack(path, signed=False)  # earlier versions wrote no digest
        position = Position(**json.loads(notes["position"]))
    except (Damaged, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is cut or altered, so this run cannot continue from it: {error}. "
            f"Delete it and resume to train from the first step, or start a new run."
        ) from None
    now, best = _under("now.", tensors), _under("best.", tensors)
    odd = sorted(now.keys() ^ learned.now.keys()) or sorted(best.keys() - now.keys())
    odd = odd or [name for name, value in (*now.items(), *best.items()) if value.shape != learned.now[name].shape]
    if odd:
        raise CheckpointError(f"{path} belongs to another setup: it and this run differ in {', '.join(odd[:4])}.")
    _pour(learned.now, now)
    learned.best, learned.more = best, _under("draws.", tensors)
    optimizer_state = _under("optimizer.", tensors)
    for name, parameter in learned.now.items():
        entries = _under(f"{name}.", optimizer_state)
        if entries:
            optimizer.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in entries.items()}
    set_random_state(_under(f"rng.{process}.", tensors))
    return position


def random_state() -> dict[str, Tensor]:
    """The random numbers to come, per device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _pour(into: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            into[name].copy_(tensor)
