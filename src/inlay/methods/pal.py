"""PAL: a small attention beside every layer (Stickland & Murray 2019).

    x ──┬── attention ── ffn ──(+)── the layer's output          δ = U MH_l(D x)
        └── D ── MH_l ── U ─────┘                                 D (s, d), U (d, s) shared by all layers

    MH_l(z) = [head_1 … head_H]      head_i = softmax(Q_i z (K_i z)ᵀ / √(s/H)) V_i z      Q, K, V (s, s) of each layer

x is what the whole layer is given, and δ joins the sum at its end: LN(ffn + r + δ) in post-LN hosts, ffn + r + δ in
pre-LN hosts. The heads stand side by side, with no matrix after them. Padding is not attended to; in decoders a token
sees itself and those before it. Weights: 2ds + 3Ls².

Shapes: x (B, T, D), D x (B, T, s), a head (B, T, s/H), δ (B, T, D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import Anatomy
from inlay.config import each_once
from inlay.errors import AnatomyError, ConfigError
from inlay.methods.acting import Reads, Seen, Spot, Step, in_dtype_of, read, shared_linear
from inlay.methods.base import Method, register
from inlay.methods.bottleneck import Layer, known_activation

SHARE = 204 / 768
"""The published size over BERT-base's hidden size."""


class Projections(nn.Module):
    """D and U, which all layers share."""

    def __init__(self, width: int, size: int, bias: bool) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, bias=bias)
        self.up = nn.Linear(size, width, bias=bias)


class ProjectedAttention(nn.Module):
    """U MH(D x): one layer's attention between the projections that it shares with the others."""

    def __init__(
        self, projections: Projections, heads: int, activation: str, dropout: float, causal: bool, bias: bool
    ) -> None:  # fmt: skip
        super().__init__()
        size = projections.down.out_features
        self.projections = (projections,)  # in a tuple: they are the inlay's, not the layer's own
        self.query, self.key, self.value = (nn.Linear(size, size, bias=bias) for _ in range(3))
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.act = ACT2FN[activation]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D), mask 1 at real tokens (B, T) -> (B, T, D)."""
        z = shared_linear(x, self.projections[0].down)
        q, k, v = (
            each(z).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )  # (B, H, T, s/H)
        made = F.scaled_dot_product_attention(
            q, k, v, self._hidden(q, mask), self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )  # fmt: skip
        return self.act(shared_linear(made.transpose(1, 2).flatten(2), self.projections[0].up))

    def _hidden(self, q: Tensor, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores; the lowest number and not -inf, so that padding that sees nothing is no NaN."""
        if mask is None:
            return None
        seen = mask[:, None, None, :].bool()  # (B, 1, 1, T)
        if self.causal:
            tokens = q.shape[2]
            seen = seen & torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        return torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min).to(q.device)


@dataclass(frozen=True)
class AddAttended:
    """h + δ(x), where δ sees the whole text."""

    module: nn.Module
    place: Place

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        x = in_dtype_of(self.module, read("layer", h, seen, self.place, None))
        mask = seen.mask if seen.mask is not None and seen.mask.shape == x.shape[:2] else None
        return h + self.module(x, mask).to(h.dtype).view_as(h)  # some hosts flatten their tokens in the FFN (OPT)


@register("pal")
class PAL(Method):
    """A projected attention beside every layer (Stickland & Murray 2019)."""

    rate: ClassVar[float] = 2e-5
    reads_texts: ClassVar[bool] = True
    attends: ClassVar[bool] = True
    mixes: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    size: int | None = Field(default=None, ge=1)
    """s, the size of the attention; None: as many whole heads as 204 are of BERT-base's 768."""
    heads: int = Field(default=12, ge=1)
    """H, the heads of the attention."""
    at: tuple[Literal["encoder", "decoder"], ...] = ("encoder", "decoder")
    """Which stacks have one, as far as the host has them."""
    activation: str = "linear"
    """Applied to δ; the authors' code takes "gelu", their paper none."""
    bias: bool = False
    """Whether the maps have biases, as in the authors' code."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on what the attention looks at."""
    init: Literal["normal", "identity"] = "normal"
    """'normal': N(0, init_std); 'identity': U is zero, so that a fresh inlay changes nothing."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the start."""
    leave_out: tuple[Layer, ...] = ()
    """Layers without one."""

    @field_validator("at")
    @classmethod
    def _each_once(cls, at: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(at, "stack")

    _known_activation = field_validator("activation")(known_activation)

    @model_validator(mode="after")
    def _whole_heads(self) -> PAL:
        if self.size is not None and self.size % self.heads:
            raise ValueError(f"a size of {self.size} has no {self.heads} heads of one size; use a multiple of `heads`")
        return self

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        anatomy.check_layers(self.leave_out)
        places = [place for place in anatomy.branch_places("ffn") if place.stack in self.at]
        if not places:
            raise ConfigError(f"this host has none of {', '.join(self.at)}; it has {', '.join(anatomy.depth)}")
        for place in places:
            if f"{place.stack}.{place.layer}.attention" not in anatomy.branches:
                raise AnatomyError(f"{place.id}: it is not known what its layer is given, which a PAL reads.")
            if in_layers(place, self.leave_out) is None:
                yield place

    def reads_at(self, place: Place) -> Reads:
        return "layer"

    def size_in(self, width: int) -> int:
        """s, for a host of hidden size `width`."""
        if self.size is None:
            return max(1, int(width * SHARE) // self.heads) * self.heads
        if self.size > width:
            raise ConfigError(f"a PAL of size {self.size} is wider than the host's hidden size {width}.")
        return self.size

    def build(self, place: Place, shared: nn.Module) -> ProjectedAttention:
        if not hasattr(shared, "projections"):
            made = Projections(place.d_out, self.size_in(place.d_out), self.bias)
            self._start(made.down, made.up)
            if self.init == "identity":
                nn.init.zeros_(made.up.weight)
            shared.add_module("projections", made)
        projections: Projections = shared.projections  # type: ignore[assignment]
        causal = place.stack == "decoder"
        part = ProjectedAttention(projections, self.heads, self.activation, self.dropout, causal, self.bias)
        self._start(part.query, part.key, part.value)
        return part

    def _start(self, *maps: nn.Linear) -> None:
        for each in maps:
            nn.init.normal_(each.weight, std=self.init_std)
            if each.bias is not None:
                nn.init.zeros_(each.bias)

    def step(self, spot: Spot) -> Step:
        return AddAttended(spot.module, spot.place)

    def closed_form(self, places: Sequence[Place]) -> str | None:
        d, count = places[0].d_out, len(places)
        s = self.size_in(d)
        return f"2ds + 3Ls² = {2 * d * s + 3 * count * s * s:,}   (d={d}, s={s}, L={count})"
