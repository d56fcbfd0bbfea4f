"""LoRA: a low-rank change beside a projection (Hu et al. 2022).

    x ──┬── W ─────────────────(+)── y          δ = scale · B A x        A (r, D_in), B (D_out, r) starts at zero
        └── [dropout] A ── B ──·scale           scale = alpha / r, or alpha / √r when rank-stabilised

Where a host has one module for q, k and v, the change is added to the named part only; `qkv` is the whole module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import Anatomy
from inlay.config import each_once
from inlay.errors import ConfigError, nearest
from inlay.methods.acting import Reads
from inlay.methods.base import BottleneckForm, Method, register
from inlay.methods.bitfit import Bias
from inlay.methods.bottleneck import Layer


class LowRankChange(nn.Module):
    """scale · B A x."""

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.down = nn.Linear(d_in, rank, bias=False)  # A
        self.up = nn.Linear(rank, d_out, bias=False)  # B
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:  # (…, D_in) -> (…, D_out)
        return self.up(self.down(self.dropout(x))) * self.scale

    def weight(self) -> Tensor:
        """The change as one matrix (D_out, D_in)."""
        return self.up.weight @ self.down.weight * self.scale

    def form(self, reads: Reads) -> BottleneckForm:
        down, up = self.down.weight, self.up.weight.T * self.scale
        return BottleneckForm(
            reads, False, "linear", down, down.new_zeros(down.shape[0]), up, up.new_zeros(up.shape[1])
        )


@register("lora")
class LoRA(Method):
    """Low-rank changes of the projections named by `targets`."""

    rate: ClassVar[float] = 2e-4
    mixes: ClassVar[tuple[str, ...]] = ("down", "up")

    rank: int = Field(default=8, ge=1)
    """r, the inner size."""
    alpha: float = Field(default=8.0, gt=0)
    """Scales the change: alpha / r."""
    targets: tuple[str, ...] = ("q", "v")
    """Roles (q, k, v, o, ffn_in, ffn_out, cross_q …, qkv for a fused module), or places such as 'encoder.3.q'."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on x."""
    rank_stabilised: bool = False
    """Scale by alpha / √r instead."""
    leave_out: tuple[Layer, ...] = ()
    """Layers without a change."""
    ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Another rank at single places, by their id."""
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Another alpha at single places."""
    bias: Literal["none", "targets", "all"] = "none"
    """Whose biases change too: nobody's, those of the changed modules, or every bias of the host and its head."""

    @field_validator("targets")
    @classmethod
    def _some(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(targets, "target")

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        anatomy.check_layers(self.leave_out)
        projections = {place.id: place for place in anatomy.places.values() if place.projection is not None}
        for target in self.targets:
            if not any(target in (place.kind, place.id) for place in projections.values()):
                roles = {place.kind for place in projections.values()}
                raise ConfigError(f"this host has no projection {target!r}.{nearest(target, roles)}")
        for name in (*self.ranks, *self.alphas):
            if name not in projections:
                known = next(iter(projections))
                raise ConfigError(f"this host has no place {name!r}; ranks and alphas are by place: {known}")
            if not {projections[name].kind, name} & set(self.targets):
                raise ConfigError(
                    f"ranks and alphas name {name!r}, which is none of the targets {', '.join(self.targets)}."
                )
        changed = set()
        for place in projections.values():
            if {place.kind, place.id} & set(self.targets) and in_layers(place, self.leave_out) is None:
                changed.add(place.module)
                yield place
        if self.bias != "none":
            for place in anatomy.of_kind("bias", "head_bias"):
                if self.bias == "all" or place.module in changed:
                    yield place

    def reads_at(self, place: Place) -> Reads:
        return "input" if place.projection is not None else "output"

    def build(self, place: Place, shared: nn.Module) -> nn.Module:
        if place.projection is None:
            return Bias(place.d_out, place.trailing)
        d_in, d_out = place.d_in, place.d_out
        rank, alpha = self.ranks.get(place.id, self.rank), self.alphas.get(place.id, self.alpha)
        if rank > max(d_in, d_out):
            raise ConfigError(f"{place.id}: a rank of {rank} is above the projection's {d_in} to {d_out}")
        scale = alpha / (math.sqrt(rank) if self.rank_stabilised else rank)
        return LowRankChange(d_in, d_out, rank, scale, self.dropout)


def part_rows(place: Place, rows: int) -> Tensor:
    """The output rows of a module that belong to a place's part."""
    projection = place.projection
    assert projection is not None
    everything = torch.arange(rows)
    if projection.parts == 1:
        return everything
    if projection.per_head:
        return everything.view(place.heads, projection.parts, -1)[:, projection.part].flatten()
    return everything.view(projection.parts, -1)[projection.part]
