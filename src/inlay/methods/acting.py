"""How a module acts at its place: what it reads there, and h' = h + δ(x).

A method turns its module at a place into a *step*, which a hook of the host runs. Steps are plain objects and not
modules, so that a module is registered once, in its inlay, however many setups use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.anatomy.places import Place
from inlay.errors import SetupError

T = TypeVar("T")
Reads = Literal["output", "own", "residual", "stream", "normed", "input", "layer"]
"""What a module reads at its place:

output     h, the branch's output
own        h, of a fused projection only the part that is this place's
residual   r, what the branch's output is added to
stream     h + r
normed     LN(h + r) in post-LN hosts, with the host's own norm of that place; h + r in pre-LN hosts
input      the hooked module's own input (projections)
layer      what the whole layer was given, before its attention
"""


@dataclass(frozen=True)
class Seen:
    """What a hook sees in one call beside the output."""

    args: tuple[Any, ...]
    """The hooked module's own inputs."""
    residual: Tensor | None = None
    hidden: Tensor | None = None
    """Heads: the last hidden states (B, T, D)."""
    mask: Tensor | None = None
    """1 at real tokens, 0 at padding (B, T); for heads, and for what reads whole texts."""
    layer: Tensor | None = None
    """What the whole layer was given (B, T, D), where a step reads it."""
    earlier: Mapping[str, Tensor] = field(default_factory=dict)
    """Inputs of modules that ran before this one at the same branch's end, by their names."""

    def rows(self, take: Callable[[Tensor], Tensor]) -> Seen:
        """The same for some rows of the batch only."""
        args = tuple(take(x) if isinstance(x, Tensor) else x for x in self.args)
        earlier = {name: take(x) for name, x in self.earlier.items()}
        own = lambda x: None if x is None else take(x)
        return Seen(args, own(self.residual), own(self.hidden), own(self.mask), own(self.layer), earlier)


class Step(Protocol):
    """What an active setup does with the output of one module."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor: ...


class Draw:
    """The random choices that a method makes once per training step, for all layers together; here there are none.

    Each inlay has one, made by its method. It is drawn from torch's own generator when the host's forward begins.
    """

    passes = 1
    """How many equal parts the batch is divided into, each with its own draws."""

    def draw(self) -> None:
        """Choose anew, for the step that begins."""

    def drawn(self) -> Any:
        """The last choice, which gradient checkpointing puts back when it recomputes a layer; None: there is none."""
        return None

    def take(self, drawn: Any) -> None:
        """Put an earlier choice back."""

    def skips(self, place: Place) -> bool:
        """Whether this training step leaves a place out."""
        return False


class Box(Generic[T]):
    """A value, or nothing yet."""

    def __init__(self) -> None:
        self.value: T | None = None  # there from the start: torch.compile guards on what an object has


class PerThread(threading.local, Generic[T]):
    """Holds a value of its own for each thread; copies and pickles start anew.

    The value is in a plain object, to which torch.compile repeats what it has traced where a graph breaks. What it
    traced of a thread's own attributes is lost there.
    """

    def __init__(self) -> None:
        self.box: Box[T] = Box()

    @property
    def value(self) -> T | None:
        return self.box.value

    def put(self, value: T | None) -> None:
        self.box.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True)
class Spot:
    """All that a method needs to make a step: its module at one place, and what is around it there."""

    module: nn.Module
    place: Place
    draw: Draw
    norm: Step | None
    """Post-LN hosts: the norm of h + r as this setup has it."""
    member: Callable[[str], tuple[nn.Module, Reads] | None]
    """Another inlay's module at this place and what it reads, by the inlay's name."""
    pinned: Mapping[str, float] = field(default_factory=dict)
    """Members whose weight the setup has fixed."""


@dataclass(frozen=True)
class Add:
    """h + δ(x): one module acts."""

    module: nn.Module
    reads: Reads
    place: Place
    draw: Draw
    norm: Step | None = None

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        if self.module.training and self.draw.skips(self.place):
            return h
        x = in_dtype_of(self.module, read(self.reads, h, seen, self.place, self.norm))
        return h + spread(self.module(x).to(h.dtype), self.place)


def read(reads: Reads, h: Tensor, seen: Seen, place: Place, norm: Step | None) -> Tensor:
    """What a module reads at its place; see `Reads`."""
    if reads == "output":
        return h
    if reads == "own":
        return part_of(h, place)
    if reads == "input":
        return seen.earlier[place.module] if place.module in seen.earlier else seen.args[0]
    if reads == "layer":
        assert seen.layer is not None
        return seen.layer
    assert seen.residual is not None
    if reads == "residual":
        return seen.residual
    x = h + seen.residual
    return x if reads == "stream" or norm is None else norm(x, Seen((x,)))


def in_dtype_of(module: nn.Module, x: Tensor) -> Tensor:
    """x in the dtype of a module's parameters: one that trains in float32 may read the stream of a bf16 host.

    Under autocast x stays as it is, because autocast casts by itself; so it does for a module without parameters.
    """
    parameter = next(module.parameters(), x)
    return x if x.dtype == parameter.dtype or autocasts(x.device) else x.to(parameter.dtype)


def autocasts(device: torch.device) -> bool:
    """Whether autocast acts on a device; some, such as meta, have none, and torch refuses to be asked about them."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def check_mask(mask: object) -> None:
    """Refuse a mask of who attends to whom, (B, 1, T, T) or one per kind of layer, where padding has to be known."""
    if isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.dim() > 3):
        seen = "several masks" if isinstance(mask, Mapping) else f"a mask {tuple(mask.shape)}"
        raise SetupError(
            f"the active setup has to know which tokens are real, and {seen} of who attends to whom does not say it. "
            f"Give the host an attention_mask with 1 at real tokens and 0 at padding: (rows, tokens)."
        )


def upcast(tensor: Tensor) -> Tensor:
    """In single precision, or in more where it has more: for sums that half precision would round away."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def side_by_side(numbers: Sequence[Tensor]) -> Tensor:
    """Single numbers as a vector, on the device of the first: the layers that they are of may be on several."""
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def shared_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """A linear map that several places share, moved to x's device and dtype, which may differ from its own."""
    bias = linear.bias
    return F.linear(x, linear.weight.to(x.device, x.dtype), None if bias is None else bias.to(x.device, x.dtype))


def part_of(h: Tensor, place: Place) -> Tensor:
    """One part of a fused projection's output: what `spread` puts back."""
    projection = place.projection
    if projection is None or projection.parts == 1:
        return h
    if not projection.per_head:
        return h.chunk(projection.parts, -1)[projection.part]
    return h.unflatten(-1, (place.heads, projection.parts, -1))[..., projection.part, :].flatten(-2)


def spread(delta: Tensor, place: Place) -> Tensor:
    """A change to one part of a fused projection, with zeros for the other parts."""
    projection = place.projection
    if projection is None or projection.parts == 1:
        return delta
    if not projection.per_head:
        width = delta.shape[-1]
        return F.pad(delta, (projection.part * width, (projection.parts - 1 - projection.part) * width))
    by_head = delta.unflatten(-1, (place.heads, 1, -1))  # (…, heads, 1, head size)
    before, after = projection.part, projection.parts - 1 - projection.part
    return F.pad(by_head, (0, 0, before, after)).flatten(-3)
