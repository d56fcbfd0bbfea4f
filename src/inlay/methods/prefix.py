"""Prefix tuning: learned keys and values in front of those that an attention sees (Li & Liang 2021).

    attention(q, [P_K; K], [P_V; V])          P_K, P_V (P, heads · size) for every attention

    flat             P_K | P_V = a table (P, 2 W)
    reparametrised   P_K | P_V = W_l tanh(W E + b) + b_l      E (P, D), W (m, D) shared by all layers of a stack,
                                                             W_l (2 W, m) of each layer's own; `merge` makes it flat

Real tokens keep their positions, and the prefix never enters the cache. It is seen by every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import Anatomy
from inlay.config import each_once
from inlay.errors import ConfigError
from inlay.methods.acting import Reads, in_dtype_of
from inlay.methods.base import Method, register
from inlay.methods.bottleneck import Layer

KINDS = {"encoder": "self_attention", "decoder": "self_attention", "cross": "cross_attention"}


class Table(nn.Module):
    """P learned vectors, the same for every row."""

    def __init__(self, length: int, width: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) * std)

    def forward(self, x: Tensor) -> Tensor:  # (B, …) -> (B, P, W)
        return self.weight.expand(x.shape[0], -1, -1)


class Control(nn.Module):
    """tanh(W E + b): what the layers of a stack share."""

    def __init__(self, length: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(length, width))
        self.inner = nn.Linear(width, hidden)

    def forward(self) -> Tensor:  # (P, m)
        return torch.tanh(self.inner(self.embedding))


class Controlled(nn.Module):
    """A layer's own map of what its stack shares."""

    def __init__(self, control: Control, width: int) -> None:
        super().__init__()
        self.control = (control,)  # in a tuple: it is the inlay's, not the layer's own
        self.out = nn.Linear(control.inner.out_features, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, …) -> (B, P, W)
        shared = self.control[0]().to(self.out.weight.device)  # (P, m)
        return self.out(in_dtype_of(self.out, shared)).expand(x.shape[0], -1, -1)


class Keys(nn.Module):
    """Keys and values side by side, (rows, P, 2 W)."""

    def __init__(self, table: nn.Module, length: int) -> None:
        super().__init__()
        self.table = table
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)

    def flatten(self) -> None:
        """Keep what the table gives, and not how it is made."""
        if isinstance(self.table, Controlled):
            weight = self.table(torch.zeros(1, device=self.table.out.weight.device))[0].detach()
            flat = Table(self.length, weight.shape[1]).to(weight.device, weight.dtype)
            flat.weight.data.copy_(weight)
            self.table = flat.requires_grad_(self.table.out.weight.requires_grad).train(self.training)


@register("prefix")
class Prefix(Method):
    """Learned keys and values in front of those of the host."""

    rate: ClassVar[float] = 2e-4
    mixes: ClassVar[tuple[str, ...]] = ("table",)

    length: int = Field(default=30, ge=1)
    """P, the vectors in front."""
    at: tuple[Literal["encoder", "decoder", "cross"], ...] = ("encoder", "decoder", "cross")
    """Which attentions have one, as far as the host has them."""
    reparametrised: bool = False
    """Whether a small network makes the vectors in training; `inlay.merge` keeps what it gives."""
    hidden: int = Field(default=512, ge=1)
    """m, the width of that network."""
    shift: bool = False
    """Whether real tokens move by P positions, as they do in peft."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the vectors at the start."""
    leave_out: tuple[Layer, ...] = ()
    """Layers without a prefix."""

    @field_validator("at")
    @classmethod
    def _each_once(cls, at: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(at, "attention")

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        anatomy.check_layers(self.leave_out)
        one = len(anatomy.depth) == 1  # two stacks have positions of their own
        if self.shift and not (one and anatomy.positions is not None and anatomy.told_positions):
            raise ConfigError("shift=True needs a host that is told its tokens' positions; this one is not.")
        if self.shift and anatomy.positions is not None and self.length >= anatomy.positions:
            raise ConfigError(f"a prefix of {self.length} leaves none of the host's {anatomy.positions} positions")
        wanted = [
            place for place in anatomy.attention_places(*KINDS.values())
            if (place.stack if place.kind == "self_attention" else "cross") in self.at
        ]  # fmt: skip
        if not wanted:
            raise ConfigError(f"this host has none of {', '.join(self.at)}; it has {', '.join(anatomy.depth)}")
        for place in wanted:
            if in_layers(place, self.leave_out) is None:
                yield place

    def reads_at(self, place: Place) -> Reads:
        return "output"

    def moves(self, anatomy: Anatomy) -> int:
        return self.length if self.shift else 0

    def build(self, place: Place, shared: nn.Module) -> Keys:
        width = 2 * place.d_out
        if not self.reparametrised:
            return Keys(Table(self.length, width, self.init_std), self.length)
        key = place.stack if place.kind == "self_attention" else "cross"
        if not hasattr(shared, key):
            shared.add_module(key, Control(self.length, place.d_in, self.hidden))
        return Keys(Controlled(getattr(shared, key), width), self.length)

    def merged(self, parts: Iterable[nn.Module]) -> Method | None:
        if not self.reparametrised:
            return None
        for part in parts:
            if isinstance(part, Keys):
                part.flatten()
        return self.model_copy(update={"reparametrised": False})

    def needed_of(self, shared: nn.Module) -> nn.Module:
        return shared if self.reparametrised else nn.Module()

    def closed_form(self, places: Sequence[Place]) -> str | None:
        if self.reparametrised or len({place.d_out for place in places}) != 1:
            return None
        width, count = places[0].d_out, len(places)
        return f"2·P·L·d = {2 * self.length * count * width:,}   (P={self.length}, L={count}, d={width})"
