"""IA3: rescale keys, values and the inner activations of the FFN (Liu et al. 2022).

    k' = k ⊙ l_k        v' = v ⊙ l_v        FFN(x) = W_out (l_ff ⊙ act(W_in x)) + b

    h' = h + h ⊙ (l − 1)          l (width,) starts at 1, so that a fresh inlay changes nothing, bit for bit

Keys and values are what their projections give, also as parts of one fused module; the inner activation is what goes
into the FFN's last projection. Three vectors per layer, five where there is cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import INPUTS, Anatomy
from inlay.errors import ConfigError, nearest
from inlay.methods.acting import Reads
from inlay.methods.base import Method, register
from inlay.methods.bottleneck import Layer


class Vector(nn.Module):
    """x ⊙ (l − 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # l

    def forward(self, x: Tensor) -> Tensor:  # (…, width) -> (…, width)
        return x * (self.weight - 1)


class Rescaling(nn.Module):
    """δ = h ⊙ (l − 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Vector(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


@register("ia3")
class IA3(Method):
    """Learned vectors that rescale keys, values and the FFN's inner activations."""

    rate: ClassVar[float] = 3e-3
    mixes: ClassVar[tuple[str, ...]] = ("scale",)

    outputs: tuple[str, ...] = ("k", "v", "cross_k", "cross_v")
    """Projections whose output is rescaled, by their role; cross_ ones as far as the host has them."""
    inputs: tuple[str, ...] = ("ffn_out",)
    """Projections whose input is rescaled: ffn_out, o or cross_o."""
    leave_out: tuple[Layer, ...] = ()
    """Layers that are left as they are."""

    @field_validator("outputs", "inputs")
    @classmethod
    def _each_once(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(roles)) != len(roles):
            raise ValueError("name each projection once")
        return roles

    @field_validator("inputs")
    @classmethod
    def _at_the_end(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(roles) - set(INPUTS):
            raise ValueError(f"only {', '.join(INPUTS)} have an input that can be rescaled, not {', '.join(unknown)}")
        return roles

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        anatomy.check_layers(self.leave_out)
        wanted = [*self.outputs, *(f"{role}.input" for role in self.inputs)]
        roles = {
            place.kind for place in anatomy.places.values() if place.projection is not None or place.acts == "input"
        }
        for role in wanted:
            if role not in roles and not role.startswith("cross_"):
                raise ConfigError(f"this host has no projection {role!r}.{nearest(role, roles)}")
        for place in anatomy.of_kind(*wanted):
            if in_layers(place, self.leave_out) is None:
                yield place

    def reads_at(self, place: Place) -> Reads:
        return "own"

    def build(self, place: Place, shared: nn.Module) -> Rescaling:
        return Rescaling(place.d_out)
