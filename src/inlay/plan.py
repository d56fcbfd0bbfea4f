"""A setup resolved at one place: a small tree of steps that a hook runs.

Two kinds of trees share the same branches. *Changing* trees add to the place's output (adapters, LoRA); *stand-in*
trees give another output in its place (norms, heads). Steps are plain objects and not modules, so that a module is
registered once, in its inlay, however many setups use it; `deepcopy` of a host copies them along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.anatomy import Place
from inlay.errors import SetupError
from inlay.methods.base import Form, Reads
from inlay.methods.fusion import Choose, Folded, FusionLayer, Pack, cheapest, pack


@dataclass(frozen=True)
class Seen:
    """What a hook sees in one call beside the output."""

    args: tuple[Any, ...]
    """The hooked module's own inputs."""
    residual: Tensor | None = None
    hidden: Tensor | None = None
    """Heads: the last hidden states (B, T, D)."""
    mask: Tensor | None = None
    """Heads: 1 at real tokens, 0 at padding (B, T)."""

    def rows(self, take: Callable[[Tensor], Tensor]) -> Seen:
        """The same for some rows of the batch only."""
        args = tuple(take(x) if isinstance(x, Tensor) else x for x in self.args)
        rest = {k: take(x) for k in ("residual", "hidden", "mask") if (x := getattr(self, k)) is not None}
        return replace(self, args=args, **rest)


class Step(Protocol):
    def __call__(self, h: Tensor, seen: Seen) -> Tensor: ...


@dataclass(frozen=True)
class Change:
    """h + δ(x): one module acts."""

    module: nn.Module
    reads: Reads
    place: Place
    owner: Any
    """The inlay, which knows whether this step leaves out the first layers."""
    norm: Step | None = None
    """Post-LN hosts: the norm of h + r as this setup has it."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        if self.owner.training and 0 <= self.place.layer < self.owner.left_out:
            return h
        x = fitting(read(self.reads, h, seen, self.norm), self.module)
        return h + spread(self.module(x).to(h.dtype), self.place)


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


def fitting(x: Tensor, module: nn.Module) -> Tensor:
    """x in the dtype of a module's parameters: some hosts keep a part of themselves in another. Autocast sees to it."""
    parameter = next(module.parameters())
    return x if x.dtype == parameter.dtype or torch.is_autocast_enabled(x.device.type) else x.to(parameter.dtype)


def read(reads: Reads, h: Tensor, seen: Seen, norm: Step | None) -> Tensor:
    """What a module reads at its place; see `Reads`."""
    if reads == "output":
        return h
    if reads == "input":
        return seen.args[0]
    assert seen.residual is not None
    if reads == "residual":
        return seen.residual
    x = h + seen.residual
    return x if reads == "stream" or norm is None else norm(x, Seen((x,)))


class Fused:
    """h + Σ_n p_n V z_n: a fusion acts. Outside training its packed and folded members are kept until one changes."""

    def __init__(
        self, layer: FusionLayer, owner: Any, place: Place, names: tuple[str, ...],
        members: tuple[tuple[Any, Reads] | None, ...], norm: Step | None, pinned: dict[str, float],
    ) -> None:  # fmt: skip
        self.layer = layer
        self.owner = owner
        self.place = place
        self.names = names
        self.members = members
        self.norm = norm
        self.pinned = pinned
        self.query = owner.method.reads_at(place)
        self.record: list[Tensor] | None = None
        """While somebody looks inside: the weights (…, N) of every call."""
        self._theirs = [where for member in members if member is not None for where in tensors_of(member[0])]
        self._mine = tensors_of(layer)
        self._kept: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        inputs: dict[tuple[Reads, bool], Tensor] = {}

        def given(reads: Reads, standardised: bool) -> Tensor:
            if (reads, standardised) not in inputs:
                x = fitting(read(reads, h, seen, self.norm), self.layer)
                inputs[reads, standardised] = F.layer_norm(x, x.shape[-1:]) if standardised else x
            return inputs[reads, standardised]

        x = given(self.query, False)
        chosen = self._chosen()
        packed = self._pack(chosen)
        folded = self._fold(packed, x.numel() // x.shape[-1], whole=len(chosen) == len(self.names))
        method = self.owner.method
        columns = {self.names[chosen[n]]: column for column, n in enumerate(packed.order)}
        pinned = {columns[name]: weight for name, weight in self.pinned.items() if name in columns}
        choose = Choose(method.temperature, method.dropout if self.owner.training else 0.0, pinned)
        change, weights = self.layer(x, given, packed, folded, choose)
        if self.record is not None:
            self.record.append(weights.detach()[..., [columns[name] for name in self.names]])
        return h + spread(change.to(h.dtype), self.place)

    def _chosen(self) -> tuple[int, ...]:
        """The members that take part: all of them, or this step's subset."""
        everybody = tuple(range(len(self.names)))
        if not self.owner.training or self.owner.chosen is None or self.record is not None:
            return everybody
        return tuple(n for n in everybody if self.names[n] in self.owner.chosen) or everybody

    def _forms(self) -> list[Form | None]:
        return [None if member is None else member[0].form(member[1]) for member in self.members]

    def _pack(self, chosen: tuple[int, ...]) -> Pack:
        width, like = self.layer.key.in_features, self.layer.key.weight
        learning = learns(self._theirs)
        if len(chosen) == len(self.names) and not learning:
            return self._keep("pack", self._theirs, lambda: pack(self._forms(), width, like))
        forms = self._forms() if learning else self._keep("forms", self._theirs, self._forms)
        return pack([forms[n] for n in chosen], width, like)

    def _fold(self, packed: Pack, tokens: int, whole: bool) -> Folded:
        learning = learns(self._mine) or learns(self._theirs)
        if learning:  # an optimizer may step next, and not every one of them leaves a trace on what it changes
            self._kept.pop("folded", None)
        elif whole and not torch.compiler.is_compiling():
            return self._keep("folded", [*self._mine, *self._theirs], lambda: self.layer.fold(packed.rows))
        return self.layer.fold(packed.rows, *cheapest(tokens, *packed.rows.shape))

    def _keep(self, what: str, tensors: list[Where], make: Callable[[], Any]) -> Any:
        """The kept value, made anew when one of the tensors it is made of has changed."""
        if torch.compiler.is_compiling():
            return make()
        state = tuple(trace_of(where[name]) for where, name in tensors)
        if self._kept.get(what, (None,))[0] != state:
            like = self.layer.key.weight.device.type
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(like, enabled=False):
                self._kept[what] = state, make()
        return self._kept[what][1]


Where = tuple[dict[str, Any], str]
"""A module's own table of parameters or buffers and a name in it: it finds the tensor also after it was replaced."""


def tensors_of(module: nn.Module) -> list[Where]:
    """All a module computes with, what it shares with other modules included."""
    parts = [*module.modules(), *(shared for m in module.modules() for shared in getattr(m, "borrowed", ()))]
    return [(table, name) for m in parts for table in (m._parameters, m._buffers) for name in table]


def learns(tensors: list[Where]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for where, name in tensors if (t := where[name]) is not None)


def trace_of(tensor: Tensor | None) -> tuple[Any, ...]:
    """What tells that a tensor has been replaced or written to."""
    if tensor is None:
        return ()
    return id(tensor), tensor.data_ptr(), None if tensor.is_inference() else tensor._version, tensor.dtype


@dataclass(frozen=True)
class StandIn:
    """Another module's output instead of the host's, from the same inputs."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return self.module(*seen.args)


@dataclass(frozen=True)
class PooledStandIn:
    """A head that pools the last hidden states itself; its logits get the shape that the host expects."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        logits = self.module(seen.hidden, seen.mask)  # (B, labels)
        if h.dim() == 2:
            return logits
        return logits.unsqueeze(1).expand(-1, h.shape[1], -1)  # the host picks a token: all of them say the same


@dataclass(frozen=True)
class HostNorm:
    """The host's own norm, called without its hooks."""

    module: nn.Module

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return self.module.forward(*seen.args)


@dataclass(frozen=True)
class Unchanged:
    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        return h


@dataclass(frozen=True)
class Chain:
    """Stack: each step acts on the result of the one before."""

    steps: tuple[Step, ...]

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        for step in self.steps:
            h = step(h, seen)
        return h


@dataclass(frozen=True)
class Mean:
    """Average: Σ w_i step_i(h)."""

    steps: tuple[Step, ...]
    weights: tuple[float, ...]

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        first, *rest = (step(h, seen) * w for step, w in zip(self.steps, self.weights, strict=True))
        return sum(rest, first)


@dataclass(frozen=True)
class Split:
    """Rows: the rows of each step, together; then back in the batch's order."""

    steps: tuple[Step, ...]
    index: tuple[tuple[int, ...], ...]
    """For each step the parts of the batch that are its own."""
    kept: dict[torch.device, list[Tensor]] = field(default_factory=dict, compare=False, repr=False)
    """The index as tensors."""

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        *index, back = self._made(h.device) if torch.compiler.is_compiling() else self._kept(h.device)
        parts = len(back)
        if h.shape[0] % parts:
            raise SetupError(
                f"Rows has {parts} parts, but a module that an inlay changes gave out {tuple(h.shape)}. Either the "
                f"batch is another, or this is what all rows share, as DeBERTa's relative positions: inlays that "
                f"change it cannot act in Rows."
            )
        results = []
        for step, at in zip(self.steps, index, strict=True):

            def take(x: Tensor, at: Tensor = at) -> Tensor:  # one part may be several rows: beams, choices
                return x.unflatten(0, (parts, -1))[at].flatten(0, 1)

            results.append(step(take(h), seen.rows(take)).unflatten(0, (len(at), -1)))
        return torch.cat(_same_width(results))[back].flatten(0, 1)

    def _made(self, device: torch.device) -> list[Tensor]:
        """The parts of each step, and the way back to the batch's order."""
        order = [part for mine in self.index for part in mine]
        back = sorted(range(len(order)), key=order.__getitem__)
        return [torch.tensor(at, device=device) for at in (*self.index, back)]

    def _kept(self, device: torch.device) -> list[Tensor]:
        """The same, made once: a GPU waits for every list that is sent to it."""
        if device not in self.kept:
            with torch.inference_mode(False):
                self.kept[device] = self._made(device)
        return self.kept[device]


def _same_width(results: list[Tensor]) -> list[Tensor]:
    """Heads with fewer labels are filled up with the lowest number, which no softmax and no argmax chooses."""
    widest = max(x.shape[-1] for x in results)
    return [F.pad(x, (0, widest - x.shape[-1]), value=torch.finfo(x.dtype).min) for x in results]
