"""Bottleneck adapters: down to b, an activation, up again.

    x ──[norm]── down ── act ── up ── ·scale ── δ          δ = s·A(x), A(x) = U act(D x + d) + u
        (Bapna)  D→b            b→D

One module, five placements (h = branch output, r = residual, LN = the host's norm; post-LN hosts | pre-LN hosts):

    Houlsby    attention, ffn   LN(A(h) + h + r)           | A(h) + h + r           Houlsby et al. 2019
    Pfeiffer   ffn              LN(A(LN(h + r)) + h + r)   | A(h + r) + h + r       Pfeiffer et al. 2021
    Parallel   ffn              LN(s·A(r) + h + r)         | s·A(r) + h + r         He et al. 2022
    Bapna      ffn              LN(A(LN'(h + r)) + h + r)  | A(LN'(h + r)) + h + r  Bapna & Firat 2019, LN' its own

Shapes: x (B, T, D), D x (B, T, b), δ (B, T, D).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers.activations import ACT2FN

from inlay.anatomy.places import Place, in_layers
from inlay.anatomy.survey import Anatomy
from inlay.config import each_once
from inlay.errors import ConfigError, nearest
from inlay.methods.acting import Draw, Reads
from inlay.methods.adapterdrop import FirstLayers
from inlay.methods.base import BottleneckForm, Method, register

Layer = int | str
"""3 is layer 3 of every stack; 'decoder.3' is that of one stack only."""


def known_activation(name: str) -> str:
    """For validators: an activation that transformers knows."""
    if name not in ACT2FN:
        raise ValueError(f"unknown activation.{nearest(name, ACT2FN)}")
    return name


class Adapter(nn.Module):
    """δ = scale · up(act(down(x))), with a norm of its own first if it has one."""

    def __init__(
        self, down: nn.Module, up: nn.Module, activation: str, scale: float | nn.Parameter = 1.0, dropout: float = 0.0,
        norm: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm = norm
        self.down = down
        self.activation = activation
        self.act = ACT2FN[activation]
        self.up = up
        self.dropout = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        if self.norm is not None:
            x = self.norm(x)
        delta = self.up(self.act(self.down(x)))
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            delta = delta * self.scale
        return self.dropout(delta)

    def form(self, reads: Reads) -> BottleneckForm:
        """The same as plain matrices, whatever the linear maps are made of; an own norm is folded in."""
        down, up = matrix(self.down), matrix(self.up).T
        bias: Any = self.down.bias
        up_bias: Any = self.up.bias
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            up, up_bias = up * self.scale, up_bias * self.scale
        if self.norm is not None:
            norm: Any = self.norm
            down, bias = down * norm.weight, bias + down @ norm.bias
        return BottleneckForm(reads, self.norm is not None, self.activation, down, bias, up, up_bias)


def matrix(linear: nn.Module) -> Tensor:
    """The weight (d_out, d_in) of any linear map."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight().T  # type: ignore[operator]


class Bottleneck(Method):
    """Base of every method that squeezes a branch through a narrow layer. Use one of the named placements."""

    text_rate: ClassVar[float | None] = 3e-4
    mixes: ClassVar[tuple[str, ...]] = ("down", "up")
    widest: ClassVar[float] = 1
    """The largest bottleneck, in hidden sizes."""

    reads: Literal["output", "residual", "stream", "normed"] = "output"
    """What the modules read: h, r, h + r, or the normed h + r; see `Reads`."""
    own_norm: bool = False
    """Whether each module has a LayerNorm of its own in front."""
    sites: tuple[Literal["attention", "ffn"], ...] = ("ffn",)
    """Which branches of a layer have a module."""
    reduction: float | dict[Layer, float] = 16
    """Hidden size over bottleneck size; or one per layer, {1: 8, 'decoder.3': 4, 'default': 16}."""
    size: int | dict[Layer, int] | None = Field(default=None)
    """The bottleneck itself, instead of `reduction`; or one per layer."""
    activation: str = "relu"
    """Any activation that transformers knows by name."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on δ."""
    scale: float | Literal["learned"] = 1.0
    """A number that multiplies δ, or 'learned' for a parameter that starts at 1."""
    init: Literal["normal", "identity"] = "normal"
    """'normal': N(0, init_std); 'identity': down Kaiming-uniform and up zero, so that a fresh inlay changes nothing."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the 'normal' start."""
    leave_out: tuple[Layer, ...] = ()
    """Layers without a module (AdapterDrop)."""
    drop_first: int = Field(default=0, ge=0)
    """In training, leave out the first n layers in each step, n drawn evenly from 0 to this (robust AdapterDrop)."""
    before_dropout: bool = False
    """Act on h before the branch's dropout instead of after it."""

    _known_activation = field_validator("activation")(known_activation)

    @field_validator("sites")
    @classmethod
    def _some_site(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(sites, "site")

    @field_validator("reduction", "size")
    @classmethod
    def _numbered(cls, table: Any) -> Any:
        """Layers by number as numbers, also from a file, in which every key is a text."""
        if not isinstance(table, dict):
            return table
        return {int(layer) if str(layer).isdecimal() else layer: value for layer, value in table.items()}

    @model_validator(mode="after")
    def _sizes_positive(self) -> Bottleneck:
        for name, value in (("reduction", self.reduction), ("size", self.size)):
            each = value.values() if isinstance(value, dict) else [value]
            if any(x is not None and not x > 0 for x in each):
                raise ValueError(f"{name} must be above 0")
            if isinstance(value, dict) and name == "reduction" and "default" not in value and self.size is None:
                raise ValueError("a map of reductions needs a 'default'")
        return self

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        anatomy.check_layers(self.leave_out)
        for table in (self.reduction, self.size):
            if isinstance(table, dict):
                anatomy.check_layers(tuple(layer for layer in table if layer != "default"))
        deepest = max(anatomy.depth.values())
        if self.drop_first > deepest:
            raise ConfigError(f"drop_first is {self.drop_first}, but the host has {deepest} layers")
        suffix = ".raw" if self.before_dropout else ""
        for place in anatomy.branch_places(*(site + suffix for site in self.sites)):
            if in_layers(place, self.leave_out) is None:
                yield place

    def bottleneck(self, place: Place, width: int) -> int:
        """b at this place, for a host of hidden size `width`."""
        size = _for_layer(self.size, place)
        if size is None:
            size = max(1, int(width // (_for_layer(self.reduction, place) or 1)))
        if size > width * self.widest:
            raise ConfigError(
                f"{place.id}: a bottleneck of {size} is wider than the host's hidden size {width}. "
                f"Use a size of at most {width}, or a reduction of at least 1."
            )
        return int(size)

    def reads_at(self, place: Place) -> Reads:
        return self.reads

    def make_draw(self, parts: nn.Module) -> Draw:
        return FirstLayers(self.drop_first) if self.drop_first else Draw()

    def build(self, place: Place, shared: nn.Module) -> Adapter:
        width = place.d_out
        b = self.bottleneck(place, width)
        self.check_size(b, width)
        down, up = self.linear(width, b, shared), self.linear(b, width, shared)
        self.initialise(down, up)
        scale = nn.Parameter(torch.ones(())) if self.scale == "learned" else float(self.scale)
        norm = nn.LayerNorm(width) if self.own_norm else None
        return Adapter(down, up, self.activation, scale, self.dropout, norm)

    def closed_form(self, places: Sequence[Place]) -> str | None:
        """P projections of k × d each: the paper writes P as 4L, two modules in each of L layers."""
        sizes = {(place.d_out, self.bottleneck(place, place.d_out)) for place in places}
        if len(sizes) != 1:
            return None
        k, d = sizes.pop()
        p = 2 * len(places)
        words, value, more = self.weights_of(k, d, p)
        return f"{words} = {value:,}   (P={p}, k={k}, d={d}{more})"

    def weights_of(self, k: int, d: int, p: int) -> tuple[str, int, str]:
        """The closed form for p projections of k × d: in words, its value, and further sizes."""
        return "P·kd", p * k * d, ""

    def check_size(self, b: int, width: int) -> None:
        """Refuse a bottleneck that the linear map cannot have."""

    def linear(self, d_in: int, d_out: int, shared: nn.Module) -> nn.Module:
        """The linear map of both projections. Another method of this kind is another map."""
        return nn.Linear(d_in, d_out)

    def initialise(self, down: nn.Module, up: nn.Module) -> None:
        """The start of both projections."""
        assert isinstance(down, nn.Linear)
        assert isinstance(up, nn.Linear)
        if self.init == "identity":
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
            nn.init.zeros_(up.weight)
        else:
            nn.init.normal_(down.weight, std=self.init_std)
            nn.init.normal_(up.weight, std=self.init_std)
        nn.init.zeros_(down.bias)
        nn.init.zeros_(up.bias)


V = TypeVar("V")


def _for_layer(table: dict[Layer, V] | V | None, place: Place) -> V | None:
    if not isinstance(table, dict):
        return table
    by_name = {str(layer): value for layer, value in table.items()}
    return by_name.get(in_layers(place, by_name) or "default")


@register("houlsby")
class Houlsby(Bottleneck):
    """After attention and after the FFN, on the branch's own output (Houlsby et al. 2019)."""

    sites: tuple[Literal["attention", "ffn"], ...] = ("attention", "ffn")
    activation: str = "silu"


@register("adapterdrop")
class AdapterDrop(Houlsby):
    """Houlsby without the lowest five layers of each stack (Rücklé et al. 2021, as compared in Compacter)."""

    leave_out: tuple[Layer, ...] = (0, 1, 2, 3, 4)


@register("pfeiffer")
class Pfeiffer(Bottleneck):
    """After the FFN, on the normed residual stream (Pfeiffer et al. 2021)."""

    reads: Literal["output", "residual", "stream", "normed"] = "normed"


@register("parallel")
class Parallel(Bottleneck):
    """Beside the FFN, on the branch's input (He et al. 2022). `scale="learned"` makes the scale a parameter."""

    reads: Literal["output", "residual", "stream", "normed"] = "residual"
    reduction: float | dict[Layer, float] = 2
    scale: float | Literal["learned"] = 4.0
    init: Literal["normal", "identity"] = "identity"


@register("bapna")
class Bapna(Bottleneck):
    """After the FFN, on the residual stream through a LayerNorm of its own (Bapna & Firat 2019)."""

    reads: Literal["output", "residual", "stream", "normed"] = "stream"
    own_norm: bool = True


@register("wide")
class Wide(Bottleneck):
    """A bottleneck of any width: what `inlay.collapse` makes of a fusion."""

    standalone: ClassVar[bool] = False
    widest: ClassVar[float] = math.inf
