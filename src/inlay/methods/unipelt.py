"""UniPELT: LoRA, a prefix and a bottleneck in one inlay, each behind a gate of its own (Mao et al. 2022).

    h' = h + g · δ(x)          g = mean over the real tokens of σ(w·x + b), one number per text and place
    P_K' = g_K P_K    P_V' = g_V P_V          one gate for both, or two

Any of the three may be left out. A gate reads what its part reads. It is a mean over the whole text, which a decoder
does not have while it writes: the method acts in encoders only. Padding does not count, unless it is told to.

Two variants are published. In the authors' code LoRA changes q and v, and each has a gate; in the paper's figure it
changes q and k, which share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import SerializeAsAny, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import AnatomyError
from inlay.methods.acting import Reads, Seen, Spot, Step, in_dtype_of, read, shared_linear, spread
from inlay.methods.base import Method, method_from, register
from inlay.methods.bottleneck import Bottleneck, Pfeiffer
from inlay.methods.lora import LoRA
from inlay.methods.prefix import Control, Keys, Prefix


class Gate(nn.Module):
    """The mean over a text's tokens of σ(W x + b)."""

    def __init__(self, width: int, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # (B, T, D), (B, T) -> (B, 1, outputs)
        each = torch.sigmoid(shared_linear(x, self.linear))
        if mask is None or mask.shape != x.shape[:2]:
            return each.mean(1, keepdim=True)
        real = mask[..., None].to(each.device, each.dtype)
        return (each * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)


class Gated(nn.Module):
    """A part behind its gate."""

    masked = True
    """It takes the mask of real tokens too."""

    def __init__(self, part: nn.Module, gate: Gate, shared: bool = False, count_padding: bool = False) -> None:
        super().__init__()
        self.part, self.count_padding = part, count_padding
        if shared:
            self.common = (gate,)  # in a tuple: it is the inlay's, not this part's own
        else:
            self.gate = gate

    @property
    def length(self) -> int:
        """P, if the part is a prefix."""
        return self.part.length  # type: ignore[return-value]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        judge = self.common[0] if hasattr(self, "common") else self.gate
        gate, made = judge(x, None if self.count_padding else mask), self.part(x)
        if gate.shape[-1] == 2:  # keys and values side by side
            gate = gate.repeat_interleave(made.shape[-1] // 2, -1)
        return made * gate


@dataclass(frozen=True)
class AddGated:
    """h + g · δ(x)."""

    module: nn.Module
    reads: Reads
    place: Place
    norm: Step | None

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        x = in_dtype_of(self.module, read(self.reads, h, seen, self.place, self.norm))
        return h + spread(self.module(x, seen.mask).to(h.dtype), self.place)


@register("unipelt")
class UniPELT(Method):
    """LoRA, a prefix and a bottleneck, each behind a gate."""

    rate: ClassVar[float] = 5e-4
    reads_texts: ClassVar[bool] = True

    variant: Literal["code", "paper"] = "code"
    """As in the authors' code, or in the figure: LoRA's projections have a gate each, or one in every layer."""
    lora: LoRA | None = LoRA(rank=8, alpha=8.0)
    """The LoRA part, or None; if not given it changes q and v, and with variant="paper" q and k."""
    prefix: Prefix | None = Prefix(length=10)
    """The prefix, or None."""
    bottleneck: SerializeAsAny[Bottleneck] | None = Pfeiffer()
    """The bottleneck, or None."""
    gates: Literal["one", "two"] = "one"
    """One gate for a prefix's keys and values together, or one for each."""
    count_padding: bool = False
    """Whether padding counts in a gate's mean, as it does in the authors' code and in `adapters`."""

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_figure(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("variant") == "paper" and "lora" not in fields:
            return {**fields, "lora": LoRA(rank=8, alpha=8.0, targets=("q", "k"))}
        return fields

    @field_validator("lora", "prefix", "bottleneck", mode="before")
    @classmethod
    def _a_method(cls, method: Any, info: ValidationInfo) -> Method | None:
        kinds: dict[str, type[Method]] = {"lora": LoRA, "prefix": Prefix, "bottleneck": Bottleneck}
        kind = kinds[str(info.field_name)]
        method = method_from(method) if isinstance(method, dict) else method
        if method is not None and not isinstance(method, kind):
            raise ValueError(f"takes {kind.__name__} or None, got {method!r}")
        if isinstance(method, LoRA) and method.bias != "none":
            raise ValueError("a trained bias has no gate: leave LoRA's bias at 'none'")
        if isinstance(method, Bottleneck) and method.drop_first:
            raise ValueError("a gate and drop_first together have no meaning; leave drop_first out")
        if isinstance(method, Prefix) and method.shift:
            raise ValueError("a gated prefix moves no positions: leave shift out")
        return method

    @model_validator(mode="after")
    def _some(self) -> UniPELT:
        if not self.parts():
            raise ValueError("needs at least one of lora, prefix and bottleneck")
        return self

    def parts(self) -> list[Method]:
        """The methods behind gates."""
        return [method for method in (self.lora, self.prefix, self.bottleneck) if method is not None]

    def describe(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("lora", "prefix", "bottleneck")}
        described = {name: None if method is None else method.describe() for name, method in parts.items()}
        settings = {"variant": self.variant, "gates": self.gates, "count_padding": self.count_padding}
        return {"kind": self.kind, **described, **settings}

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        if "encoder" not in anatomy.depth:
            raise AnatomyError(
                "a gate is a mean over a whole text, which a decoder does not have while it writes. UniPELT needs a "
                "host with an encoder; on this one use LoRA, a prefix and a bottleneck in a Stack."
            )
        for method in self.parts():
            yield from (place for place in method.places(anatomy) if place.stack == "encoder")

    def part_at(self, place: Place) -> Method:
        """Which of the three has a module at a place."""
        part = self.prefix if place.acts == "keys" else self.bottleneck if place.projection is None else self.lora
        assert part is not None, "it has no place there"
        return part

    def reads_at(self, place: Place) -> Reads:
        return self.part_at(place).reads_at(place)

    def build(self, place: Place, shared: nn.Module) -> Gated:
        two = place.acts == "keys" and self.gates == "two"
        part = self.part_at(place).build(place, shared)
        if self.variant == "paper" and place.projection is not None:  # what LoRA changes in a layer
            name = f"{place.stack}_{place.layer}"
            if not hasattr(shared, name):
                shared.add_module(name, Gate(place.d_in))
            return Gated(part, getattr(shared, name), shared=True, count_padding=self.count_padding)
        return Gated(part, Gate(place.d_in, 2 if two else 1), count_padding=self.count_padding)

    def step(self, spot: Spot) -> Step:
        return AddGated(spot.module, self.reads_at(spot.place), spot.place, spot.norm)

    def merged(self, parts: Iterable[nn.Module]) -> Method | None:
        if self.prefix is None or not self.prefix.reparametrised:
            return None
        for part in parts:
            if isinstance(part, Gated) and isinstance(part.part, Keys):
                part.part.flatten()
        return self.model_copy(update={"prefix": self.prefix.model_copy(update={"reparametrised": False})})

    def make_shared(self) -> nn.Module:
        return nn.Module() if self.bottleneck is None else self.bottleneck.make_shared()

    def needed_of(self, shared: nn.Module) -> nn.Module:
        if self.prefix is None or not self.prefix.reparametrised:
            for name in [name for name, module in shared.named_children() if isinstance(module, Control)]:
                delattr(shared, name)
        return shared
