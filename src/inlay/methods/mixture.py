"""AdaMix: train M alternatives of a method's projections, serve their mean (Wang et al. 2022).

    down ∈ {down_1 … down_M}          each training step draws one of the M for every layer and projection, for the
    up   ∈ {up_1 … up_M} or shared    whole batch; afterwards the M are averaged once into a plain inlay

Learned routing is what stochastic routing is compared with: a gate sends each token, or each text, to the module that
it trusts most, and scales what that gives (Fedus et al. 2022):

    y = p_c · map_c(x)     p = softmax(W_g x), c = argmax p          loss + balance · M Σ_m f_m P_m

f_m is the share of tokens or texts that went to module m, P_m the mean of its p.

A mixture is a modifier: it takes any method that says which of its maps can have alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny, field_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import ConfigError, SetupError
from inlay.methods.acting import Draw, PerThread, Reads, Spot, Step, side_by_side, upcast
from inlay.methods.base import Method, method_from, register

Routing = Literal["merged", "random", "first", "learned"]


class Alternatives(nn.Module):
    """M linear maps of one form, of which one acts at a time."""

    def __init__(self, maps: list[nn.Module], gate: Gate | None = None) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        self.gate = gate
        self.passes = 1
        """In training: into how many equal parts the batch falls, each with a draw of its own."""
        self.routing: Routing = "merged" if gate is None else "learned"
        """In evaluation: the mean of the maps, a random one, the first, or the one that a gate chooses."""

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None and (self.training or self.routing == "learned"):
            return self.gate.route(x, self.maps)
        if not self.training and self.routing == "first":
            return self.maps[0](x)
        if not self.training and self.routing != "random":
            return torch.func.functional_call(self.maps[0], self.mean(), (x,))
        drawn = self.draw()
        if len(drawn) == 1:
            return self.maps[drawn[0]](x)
        if x.shape[0] % len(drawn):
            raise SetupError(
                f"a mixture got {tuple(x.shape)}, which has no {len(drawn)} equal parts: the rows of the batch share "
                f"it, like DeBERTa's relative positions. Leave this projection out, or use mixture_loss(…, weight=0)."
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


class Balance(PerThread[Tensor]):
    """What a forward leaves for the loss."""


class Gate(nn.Module):
    """Sends each token, or each text, to one of M maps."""

    def __init__(self, width: int, modules: int, by: Literal["token", "text"]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, modules, bias=False)
        nn.init.normal_(self.linear.weight, std=0.02)
        self.by = by
        self.real: PerThread[Tensor] | None = None
        """Where the host's hooks leave which tokens are real."""
        self.balance = Balance()

    def route(self, x: Tensor, maps: nn.ModuleList) -> Tensor:
        mask = self._mask(x)
        if self.by == "text":
            each = x if x.dim() == 2 else _mean(x, mask)  # (B, D)
            units, weight = x, None
        else:
            units = each = x.flatten(0, -2)  # (N, D)
            weight = None if mask is None else mask.flatten().to(x.device, x.dtype)
        p = self.linear(each).softmax(-1)  # (N, M)
        chosen = p.argmax(-1)
        self.balance.put(_balance(p, chosen, weight) if self.training else None)
        out: Tensor | None = None
        for m, one in enumerate(maps):
            at = (chosen == m).nonzero().squeeze(-1)
            found = one(units[at])
            found = found * p[at, m].view(-1, *(1,) * (found.dim() - 1))
            out = found.new_zeros(units.shape[0], *found.shape[1:]) if out is None else out
            out = out.index_copy(0, at, found)
        assert out is not None
        return out if self.by == "text" else out.unflatten(0, x.shape[:-1])

    def _mask(self, x: Tensor) -> Tensor | None:
        mask = None if self.real is None else self.real.value
        if mask is None or x.dim() != 3 or mask.shape[1] != x.shape[1]:
            return None
        if mask.shape[0] != x.shape[0]:
            if self.by == "text":
                raise SetupError(
                    "a mixture that is routed by texts cannot act in Rows: it does not see which tokens of its rows "
                    "are real. Merge it, or route it by tokens."
                )
            return None
        return mask


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens."""
    if mask is None:
        return x.flatten(1, -2).mean(1)
    x, dtype = upcast(x), x.dtype  # the sum of a long text overflows in float16
    real = mask[..., None].to(x.device, x.dtype)
    return ((x * real).sum(1) / real.sum(1).clamp(min=1)).to(dtype)


def _balance(p: Tensor, chosen: Tensor, weight: Tensor | None) -> Tensor:
    """M Σ f_m P_m: least, and 1, where all modules get the same."""
    modules = p.shape[-1]
    hits = torch.nn.functional.one_hot(chosen, modules).to(p.dtype)
    if weight is None:
        return modules * (hits.mean(0) * p.mean(0)).sum()
    share = (weight / weight.sum().clamp(min=1))[:, None]
    return modules * ((hits * share).sum(0) * (p * share).sum(0)).sum()


@register("mixture")
class Mixture(Method):
    """M alternatives of a method's projections."""

    standalone: ClassVar[bool] = False

    method: SerializeAsAny[Method]
    """The method to mix, such as inlay.Pfeiffer(size=48)."""
    modules: int = Field(default=4, ge=1, le=1024)
    """M, the alternatives of each projection."""
    share: Literal["up", "down"] | None = "up"
    """Which projection has one map for all M; None: neither."""

    routing: Literal["random", "learned"] = "random"
    """How training chooses: by chance (AdaMix), or by a gate that learns to."""
    by: Literal["token", "text"] = "token"
    """What a learned gate sends to a module: each token by itself, or a whole text."""
    balance: float = Field(default=0.01, ge=0)
    """Weight of the penalty that keeps a learned gate from using one module only."""

    def __init__(self, method: Any = None, **fields: Any) -> None:
        super().__init__(**{"method": method, **fields})

    @field_validator("method", mode="before")
    @classmethod
    def _a_method(cls, method: Any) -> Method:
        method = method_from(method) if isinstance(method, dict) else method
        if not isinstance(method, Method) or not method.mixes:
            raise ValueError(
                "a mixture takes a method with two projections, such as inlay.Pfeiffer() or inlay.LoRA(), "
                "or one of prompts, prefixes, PALs or IA3"
            )
        return method

    def usual_rate(self, text: bool = False) -> float:
        """That of the method it mixes."""
        return self.method.usual_rate(text)

    def describe(self) -> dict[str, Any]:
        described = {"kind": self.kind, "method": self.method.describe(), "modules": self.modules, "share": self.share}
        learned = {"routing": self.routing, "by": self.by, "balance": self.balance}
        return described | learned if self.routing == "learned" else described

    @property
    def reads_texts(self) -> bool:  # type: ignore[override]
        return self.routing == "learned" or self.method.reads_texts

    @property
    def attends(self) -> bool:  # type: ignore[override]
        return self.method.attends

    def step(self, spot: Spot) -> Step:
        return self.method.step(spot)

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        for place in self.method.places(anatomy):
            if self.routing == "learned":
                self._check_gate(place, anatomy)
            yield place

    def _check_gate(self, place: Place, anatomy: Anatomy) -> None:
        if place.acts in ("keys", "tokens") and self.by == "token":
            raise ConfigError("what stands in front of a text is the same for all its tokens: use by='text'.")
        if self.by == "text" and (anatomy.causal or place.stack == "decoder"):
            raise ConfigError(
                f"{place.id}: a decoder does not have the whole text while it writes, so a gate cannot judge it. Use "
                f"by='token', or leave the decoder out."
            )

    def reads_at(self, place: Place) -> Reads:
        return self.method.reads_at(place)

    def make_shared(self) -> nn.Module:
        return self.method.make_shared()

    def make_draw(self, parts: nn.Module) -> Draw:
        return Doubling(alternatives(parts), self.method.make_draw(parts))

    def owns_norms(self) -> bool:
        return self.method.owns_norms()

    def compared_passes(self) -> int:
        return 2 if self.modules > 1 and self.routing == "random" else 1

    def penalty(self, parts: Iterable[nn.Module]) -> Tensor | None:
        found = [
            choice.gate.balance.value for part in parts for choice in alternatives(part) if choice.gate is not None
        ]
        noted = [balance for balance in found if balance is not None]
        return self.balance * side_by_side(noted).sum() if noted else None

    def watch(self, inlay: nn.Module, real: PerThread[Tensor]) -> None:
        for choice in alternatives(inlay):
            if choice.gate is not None:
                choice.gate.real = real

    def why_not_plain(self, name: str) -> str | None:
        return f"{name!r} is a mixture. Merge it first: inlay.merge(host, {name!r})."

    def merged(self, parts: Iterable[nn.Module]) -> Method | None:
        for part in parts:
            merge_module(part)
        return self.method

    def in_tokens(self, tokenizer: Any) -> Method:
        return self.model_copy(update={"method": self.method.in_tokens(tokenizer)})

    def moves(self, anatomy: Anatomy) -> int:
        return self.method.moves(anatomy)

    def start(self, part: nn.Module, module: nn.Module) -> None:
        self.method.start(part, module)
        for choice in alternatives(part):  # a prompt that begins as words gives all of them the same
            set_apart(list(choice.maps))

    def build(self, place: Place, shared: nn.Module) -> nn.Module:
        made = [self.method.build(place, shared) for _ in range(self.modules)]
        for projection in self.method.mixes:
            if projection != self.share and hasattr(made[0], projection):  # a trained bias has neither, and is shared
                maps = [getattr(m, projection) for m in made]
                for other in maps[1:]:
                    if hasattr(other, "borrow"):  # a rule of its own is the first one's
                        other.borrow(maps[0])
                set_apart(maps)
                gate = Gate(_width(maps[0], place), self.modules, self.by) if self.routing == "learned" else None
                setattr(made[0], projection, Alternatives(maps, gate))
        return made[0]


def _width(linear: nn.Module, place: Place) -> int:
    """The width of what a map reads."""
    if isinstance(width := getattr(linear, "in_features", None), int):
        return width
    return place.d_in if place.acts != "output" else place.d_out


class Doubling(Draw):
    """How many parts of the batch have draws of their own: one, or the two passes that a loss compares.

    `doubled` says it for the next forward. The projections keep it until the one after that begins.
    """

    def __init__(self, choices: list[Alternatives], inner: Draw) -> None:
        self.choices, self.inner = choices, inner
        self.next = 1

    def draw(self) -> None:
        self._part(self.next)
        for choice in self.choices:
            if choice.gate is not None:
                choice.gate.balance.put(None)  # a layer that this step leaves out has none
        self.inner.draw()

    def _part(self, passes: int) -> None:
        self.passes = passes
        for choice in self.choices:
            choice.passes = passes

    def drawn(self) -> tuple[int, Any]:
        return self.passes, self.inner.drawn()

    def take(self, drawn: tuple[int, Any]) -> None:
        passes, inner = drawn
        self._part(passes)
        self.inner.take(inner)

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
    weights = [w for m in maps if isinstance(w := getattr(m, "weight", None), nn.Parameter)]
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
    for projection, choice in list(module.named_children()):
        if isinstance(choice, Alternatives):
            setattr(module, projection, choice.merged())
    return module


def as_mixture(name: str, method: Method) -> Mixture:
    """The method of an inlay that has to be a mixture."""
    if not isinstance(method, Mixture):
        raise SetupError(f"{name!r} is a {method.kind} inlay, not a mixture")
    return method
