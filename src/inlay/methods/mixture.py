"""AdaMix: train M alternatives of a method's projections, serve their mean (Wang et al. 2022).

    down ∈ {down_1 … down_M}          each training step draws one of the M for every layer and projection, for the
    up   ∈ {up_1 … up_M} or shared    whole batch; afterwards the M are averaged once into a plain inlay

A mixture is a modifier: it takes any method whose modules have a `down` and an `up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.methods.acting import Draw, Reads
from inlay.methods.base import Method, method_from, register

Routing = Literal["merged", "random", "first"]


class Alternatives(nn.Module):
    """M linear maps of one form, of which one acts at a time."""

    def __init__(self, maps: list[nn.Module]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        self.passes = 1
        """In training: into how many equal parts the batch falls, each with a draw of its own."""
        self.routing: Routing = "merged"
        """In evaluation: the mean of the maps, a random one, or the first."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.routing != "random":
            return (
                self.maps[0](x)
                if self.routing == "first"
                else torch.func.functional_call(self.maps[0], self.mean(), (x,))
            )
        drawn = self.draw()
        if len(drawn) == 1:
            return self.maps[drawn[0]](x)
        if x.shape[0] % len(drawn):
            raise SetupError(
                f"a mixture got {tuple(x.shape)}, which has no {len(drawn)} equal parts: the rows of the batch share "
                f"it, as DeBERTa's relative positions. Leave this projection out, or use mixture_loss(…, weight=0)."
            )
        return torch.cat([self.maps[m](part) for m, part in zip(drawn, x.chunk(len(drawn)), strict=True)])

    def draw(self) -> tuple[int, ...]:
        """Which map acts, for each part of the batch.

        Drawn where it is used and from torch's own generator: what gradient checkpointing restores before it
        recomputes a layer, and what training checkpoints keep.
        """
        parts = self.passes if self.training else 1
        return tuple(torch.randint(len(self.maps), (parts,), device="cpu").tolist())

    def mean(self) -> dict[str, Tensor]:
        """The parameters averaged over the maps; what they share, such as a rule of the first's own, has no mean."""
        names = [name for name, _ in self.maps[-1].named_parameters()]
        return {name: torch.stack([m.get_parameter(name) for m in self.maps]).mean(0) for name in names}

    def merged(self) -> nn.Module:
        """One map with the mean parameters."""
        with torch.no_grad():
            for name, value in self.mean().items():
                self.maps[0].get_parameter(name).copy_(value)
        return self.maps[0]


@register("mixture")
class Mixture(Method):
    """M alternatives of a method's projections."""

    standalone: ClassVar[bool] = False

    method: Any
    """The method to mix, such as inlay.Pfeiffer(size=48)."""
    modules: int = Field(default=4, ge=1, le=1024)
    """M, the alternatives of each projection."""
    share: Literal["up", "down"] | None = "up"
    """Which projection has one map for all M; None: neither."""

    def __init__(self, method: Any = None, **fields: Any) -> None:
        super().__init__(**{"method": method, **fields})

    @field_validator("method")
    @classmethod
    def _a_method(cls, method: Any) -> Method:
        method = method_from(method) if isinstance(method, dict) else method
        if not isinstance(method, Method) or not method.mixes:
            raise ValueError("a mixture takes a method with two projections, such as inlay.Pfeiffer() or inlay.LoRA()")
        return method

    def usual_rate(self, text: bool = False) -> float:
        """That of the method it mixes."""
        return float(self.method.usual_rate(text))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "method": self.method.describe(), "modules": self.modules, "share": self.share}

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        return self.method.places(anatomy)

    def reads_at(self, place: Place) -> Reads:
        return self.method.reads_at(place)

    def make_shared(self) -> nn.Module:
        return self.method.make_shared()

    def make_draw(self, parts: nn.Module) -> Draw:
        return Doubling(alternatives(parts), self.method.make_draw(parts))

    def owns_norms(self) -> bool:
        return bool(self.method.owns_norms())

    def compared_passes(self) -> int:
        return 2 if self.modules > 1 else 1

    def why_not_plain(self, name: str) -> str | None:
        return f"{name!r} is a mixture. Merge it first: inlay.merge(host, {name!r})."

    def build(self, place: Place, shared: nn.Module) -> nn.Module:
        made = [self.method.build(place, shared) for _ in range(self.modules)]
        for projection in self.method.mixes:
            if projection != self.share and hasattr(made[0], projection):  # a trained bias has neither, and is shared
                maps = [getattr(m, projection) for m in made]
                for other in maps[1:]:
                    if hasattr(other, "borrow"):  # a rule of its own is the first one's
                        other.borrow(maps[0])
                set_apart(maps)
                setattr(made[0], projection, Alternatives(maps))
        return made[0]


class Doubling(Draw):
    """How many parts of the batch have draws of their own: one, or the two passes that a loss compares.

    `doubled` says it for the next forward. The projections keep it until the one after that begins: gradient
    checkpointing may recompute this one meanwhile.
    """

    def __init__(self, choices: list[Alternatives], inner: Draw) -> None:
        self.choices, self.inner = choices, inner
        self.next = 1

    def draw(self) -> None:
        for choice in self.choices:
            choice.passes = self.next
        self.inner.draw()

    def skips(self, place: Place) -> bool:
        return self.inner.skips(place)


@contextmanager
def doubled(draws: Iterable[Draw], passes: int) -> Iterator[None]:
    """For the forwards in this block: a batch is this many passes below each other, each with draws of its own."""
    doubling = [draw for draw in draws if isinstance(draw, Doubling)]
    for draw in doubling:
        draw.next = passes
    try:
        yield
    finally:
        for draw in doubling:
            draw.next = 1


def set_apart(maps: list[nn.Module], std: float = 1e-3) -> None:
    """Let maps that start alike, as LoRA's zeros do, differ a little, and leave their mean where it is."""
    weights = [m.weight for m in maps if isinstance(m, nn.Linear)]
    if weights and not weights[0].is_meta and all(torch.equal(weights[0], other) for other in weights[1:]):
        noise = torch.stack([torch.randn_like(weight) for weight in weights]) * std
        with torch.no_grad():
            for weight, own in zip(weights, noise - noise.mean(0), strict=True):
                weight.add_(own)


def alternatives(module: nn.Module) -> list[Alternatives]:
    """Every choice inside a module, in a fixed order."""
    return [m for m in module.modules() if isinstance(m, Alternatives)]


def merge_module(module: nn.Module) -> nn.Module:
    """Put the mean in the place of every choice."""
    for projection in ("down", "up"):
        choice = getattr(module, projection, None)
        if isinstance(choice, Alternatives):
            setattr(module, projection, choice.merged())
    return module


def as_mixture(name: str, method: Method) -> Mixture:
    """The method of an inlay that has to be a mixture."""
    if not isinstance(method, Mixture):
        raise SetupError(f"{name!r} is a {method.kind} inlay, not a mixture")
    return method
