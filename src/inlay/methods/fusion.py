"""AdapterFusion: attend over what N inlays would do, at almost the price of one (Pfeiffer et al. 2021).

    x ──Q── q ─┐            z_n = what member n adds, without the residual
               ├─ softmax over n of q·K z_n ── p_n          h' = h + Σ_n p_n V z_n
    z_n ──K────┘
    z_n ──V── Σ

Every member is a bottleneck, z_n = U_n a_n + u_n with a_n = act(D_n x + d_n) of b numbers, so nothing of size N·D is
ever needed. With all up-projections as rows of one matrix R (Σb + N rows: the columns of every U_n, then every u_n),

    scores   q·(K z_n + b_k) = Σ_j a_nj (R Kᵀ q)_nj + (R Kᵀ q)_n + q·b_k
    output   Σ_n p_n V z_n = [p_n a_n, p_n] R Vᵀ

The same sums may be taken in several orders; S = Σb + N rows, T tokens, in units of D² for forward and backward:

    keys     direct    (x Q) K, then · R        6 T
             product   x (Q K), then · R        3 T + 3 D
             folded    x (R Kᵀ Q)ᵀ              5 S + T S / D
    values   direct    ([p a, p] R) Vᵀ          3 T
             folded    [p a, p] (R Vᵀ)          2 S + T S / D

Training takes the cheapest of each. Evaluation takes the folded ones, made once and kept until a parameter changes:
3 D N b multiply-adds per token are left of (2N + 1) D² + 2 D N b.

Shapes: x (…, D_x), z (…, D), scores (…, N).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers.activations import ACT2FN

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import ConfigError, SetupError, nearest
from inlay.methods.acting import (
    Draw,
    Reads,
    Seen,
    Spot,
    Step,
    autocasts,
    in_dtype_of,
    read,
    side_by_side,
    spread,
    upcast,
)
from inlay.methods.base import BottleneckForm, Method, register


@dataclass(frozen=True)
class Block:
    """Members that read the same, have the same activation and the same size: one matrix product serves them all."""

    reads: Reads
    standardised: bool
    activation: str
    size: int
    count: int
    down: Tensor  # (count·b, D_x)
    down_bias: Tensor  # (count·b,)

    def act(self, x: Tensor) -> Tensor:  # (…, D_x) -> (…, count, b)
        if not autocasts(x.device):
            x = x.to(self.down.dtype)  # members need not be as the fusion
        return ACT2FN[self.activation](F.linear(x, self.down, self.down_bias)).unflatten(-1, (self.count, self.size))


@dataclass(frozen=True)
class Pack:
    """All members of one place, side by side."""

    blocks: tuple[Block, ...]
    rows: Tensor
    """R (Σb + N, D): the up-projections of the blocks' members, then the biases."""
    order: tuple[int, ...]
    """The member that each column of the scores belongs to."""

    @property
    def parts(self) -> list[int]:
        """How many rows of R belong to each block, and how many are biases."""
        return [*(block.count * block.size for block in self.blocks), len(self.order)]


def pack(forms: Sequence[BottleneckForm | None], width: int, like: Tensor) -> Pack:
    """Members by block. None is a member without a module here: it adds nothing, z = 0, and so scores 0."""
    kinds: dict[tuple[Reads, bool, str, int], list[int]] = {}
    absent = [n for n, form in enumerate(forms) if form is None]
    for n, form in enumerate(forms):
        if form is not None:
            kinds.setdefault((form.reads, form.standardised, form.activation, form.down.shape[0]), []).append(n)
    blocks, ups, biases = [], [], []
    for (reads, standardised, activation, size), members in kinds.items():
        mine = [form for n in members if (form := forms[n]) is not None]
        down, down_bias = torch.cat([f.down for f in mine]), torch.cat([f.down_bias for f in mine])
        blocks.append(Block(reads, standardised, activation, size, len(mine), down, down_bias))
        ups += [f.up for f in mine]
        biases += [f.up_bias for f in mine]
    biases += [like.new_zeros(width)] * len(absent)
    order = tuple(n for members in (*kinds.values(), absent) for n in members)
    return Pack(tuple(blocks), torch.cat([*ups, torch.stack(biases)]), order)


def in_single_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Where autocast would round: not within this block."""
    return torch.autocast(like.device.type, enabled=False) if autocasts(like.device) else nullcontext()


@dataclass(frozen=True)
class Premultiplied:
    """The layer's matrices multiplied into the members' rows, or with each other; None is the direct way."""

    keys: Tensor | None = None  # R Kᵀ Q, and b_k Q as the last row (S + 1, D_x)
    key_bias: Tensor | None = None  # the same with b_q for Q (S + 1,)
    product: Tensor | None = None  # K and b_k as the last row, times Q (D + 1, D_x)
    product_bias: Tensor | None = None  # (D + 1,)
    values: Tensor | None = None  # R Vᵀ (S, D)


def orders(tokens: int, rows: int, width: int) -> tuple[dict[str, float], dict[str, float]]:
    """The work of a training step in each order of the keys and of the values, as in the table above."""
    shared = tokens * rows / width
    keys = {"direct": 6 * tokens, "product": 3 * tokens + 3 * width, "folded": 5 * rows + shared}
    values = {"direct": 3 * tokens, "folded": 2 * rows + shared}
    return keys, values


def cheapest_orders(tokens: int, rows: int, width: int) -> tuple[str, str]:
    """The order of the keys and of the values with the least work for a training step."""
    keys, values = orders(tokens, rows, width)
    return min(keys, key=keys.__getitem__), min(values, key=values.__getitem__)


class FusionLayer(nn.Module):
    """Q, K and V of one place; V may be left out (static fusion)."""

    def __init__(self, query_width: int, width: int, value: bool) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width, bias=False) if value else None
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        if self.value is not None:
            nn.init.normal_(self.value.weight, std=1e-6)
            with torch.no_grad():
                self.value.weight.fill_diagonal_(1.0)

    def premultiply(self, rows: Tensor, keys: str = "folded", values: str = "folded") -> Premultiplied:
        """The products that do not depend on the input, in the orders named, in single precision at least."""
        made: dict[str, Tensor] = {}
        with in_single_precision(rows):
            if keys != "direct":
                key, bias = upcast(self.key.weight), upcast(self.key.bias)
                left = F.linear(upcast(rows), key) if keys == "folded" else key.T
                left = torch.cat([left, bias[None]])  # (S + 1, D) or (D + 1, D)
                weight, bias = left @ upcast(self.query.weight), left @ upcast(self.query.bias)
                folded = keys == "folded"
                made |= {"keys": weight, "key_bias": bias} if folded else {"product": weight, "product_bias": bias}
            if values == "folded":
                made["values"] = (
                    upcast(rows) if self.value is None else F.linear(upcast(rows), upcast(self.value.weight))
                )
        return Premultiplied(**made)

    def asked(self, x: Tensor, rows: Tensor, made: Premultiplied, parts: list[int]) -> tuple[Tensor, ...]:
        """q·K of every row of R, in parts of this many rows, and last q·b_k (…, 1), which all members have in common.

        Split and not sliced: the gradient of a slice is a whole tensor of zeros, and one is added for each.
        """
        if made.keys is not None:
            return F.linear(x, made.keys, made.key_bias).split([*parts, 1], -1)
        if made.product is not None:
            k, same = F.linear(x, made.product, made.product_bias).split([self.key.in_features, 1], -1)
        else:
            q = F.linear(x, upcast(self.query.weight), upcast(self.query.bias))
            k, same = q @ upcast(self.key.weight), (q @ upcast(self.key.bias)).unsqueeze(-1)
        return *F.linear(k, upcast(rows)).split(parts, -1), same

    def forward(
        self, x: Tensor, read: Callable[[Reads, bool], Tensor], packed: Pack, made: Premultiplied, choose: Choose
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The mixed change (…, D) and the weights (…, N) in block order.

        The members' own activations are in the host's dtype, all else in single precision at least: a softmax over
        rounded scores is another one, and products that are rounded twice are worse than those of the plain equations.
        """
        acts = [block.act(read(block.reads, block.standardised)) for block in packed.blocks]  # (…, count, b)
        with in_single_precision(x):
            acts = [upcast(a) for a in acts]
            weights = choose(self.scores(upcast(x), acts, packed, made))
            return self.mixed(acts, weights, packed, made), weights

    def scores(self, x: Tensor, acts: Sequence[Tensor], packed: Pack, made: Premultiplied) -> Tensor:
        """q·K z_n of every member (…, N)."""
        members = len(packed.order)
        *asked, biases, same = self.asked(x, packed.rows, made, packed.parts)
        scores = [(a * g.unflatten(-1, a.shape[-2:])).sum(-1) for a, g in zip(acts, asked, strict=True)]
        score = torch.cat(scores, -1) if scores else biases[..., :0]
        if members > score.shape[-1]:  # who has no module here scores nothing
            score = F.pad(score, (0, members - score.shape[-1]))
        return score + biases + same

    def mixed(self, acts: Sequence[Tensor], weights: Tensor, packed: Pack, made: Premultiplied) -> Tensor:
        """Σ_n p_n V z_n (…, D)."""
        counts = [block.count for block in packed.blocks]
        *ups, up_biases = (upcast(packed.rows) if made.values is None else made.values).split(packed.parts)
        shares = weights.split([*counts, len(packed.order) - sum(counts)], -1)
        mixed = weights @ up_biases
        for a, share, up in zip(acts, shares[: len(acts)], ups, strict=True):
            mixed = mixed + (a * share.unsqueeze(-1)).flatten(-2) @ up
        return mixed if made.values is not None or self.value is None else F.linear(mixed, upcast(self.value.weight))

    def penalty(self) -> Tensor:
        """‖I − V‖², the pull of V towards its start."""
        if self.value is None:
            return self.key.weight.new_zeros(())
        eye = torch.eye(self.value.in_features, device=self.value.weight.device, dtype=self.value.weight.dtype)
        return (eye - self.value.weight).square().sum()


@dataclass(frozen=True)
class Choose:
    """Scores to weights: temperature, dropout, softmax; some members may be off or have a fixed weight."""

    temperature: float = 1.0
    dropout: float = 0.0
    pinned: Mapping[int, float] | None = None
    """Column to weight; 0 is off. The others share the rest."""
    kept: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    """The pinned weights and which columns have one, as tensors; a GPU waits for every list that is sent to it."""

    def __call__(self, scores: Tensor) -> Tensor:
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.dropout:
            scores = F.dropout(scores, self.dropout)
        if not self.pinned:
            return scores.softmax(-1)
        fixed, is_fixed = self._columns(self.pinned, scores)
        if len(self.pinned) == scores.shape[-1]:
            return fixed.expand_as(scores)
        free = scores.masked_fill(is_fixed, float("-inf")).softmax(-1)
        return free * (1 - fixed.sum()) + fixed

    def _columns(self, pinned: Mapping[int, float], scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each column, 0 where it has none, and whether it has one."""
        members, device = range(scores.shape[-1]), scores.device
        made = lambda: (
            torch.tensor([pinned.get(n, 0.0) for n in members], dtype=scores.dtype, device=device),
            torch.tensor([n in pinned for n in members], device=device),
        )
        if torch.compiler.is_compiling():
            return made()
        key = (device, scores.dtype, len(members), *sorted(pinned.items()))
        if key not in self.kept:
            with torch.inference_mode(False):
                self.kept[key] = made()
        return self.kept[key]


@register("fusion")
class Fusion(Method):
    """The settings of a fusion. Use `inlay.add_fusion`."""

    rate: ClassVar[float] = 5e-5
    epochs: ClassVar[int] = 10
    standalone: ClassVar[bool] = False

    members: tuple[str, ...]
    """The inlays it mixes."""
    query: Literal["normed", "output"] = "normed"
    """What asks: the normed residual stream, or the branch's output before it. Projections ask with their input."""
    value: bool = True
    """V on (dynamic fusion) or off (static)."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the scores."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the scores, before the softmax."""
    strength: float = Field(default=0.01, ge=0)
    """Of the pull of V towards the identity; 0 turns it off."""
    subset: int | None = Field(default=None, ge=1)
    """In training, how many members, drawn anew for each batch, take part; None: all. Members that a setup has
    switched off or pinned are not counted."""
    sites: tuple[str, ...]
    """The places where it acts; elsewhere neither the fusion nor its members do."""
    kept: dict[str, tuple[str, ...]] | None = None
    """A pruned fusion: the members that are left at each place."""

    @field_validator("members")
    @classmethod
    def _distinct(cls, members: tuple[str, ...]) -> tuple[str, ...]:
        if not members:
            raise ValueError("a fusion needs at least one member")
        if len(set(members)) != len(members):
            raise ValueError(
                f"each member once: {', '.join(sorted({m for m in members if members.count(m) > 1}))} stands twice"
            )
        return members

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        for site in self.sites:
            if site not in anatomy.places:
                raise ConfigError(f"this host has no place {site!r} for the fusion to act at")
            yield anatomy.places[site]

    def at(self, place: str) -> tuple[str, ...]:
        """The members at a place."""
        return self.members if self.kept is None else self.kept.get(place, ())

    def renamed(self, names: Mapping[str, str]) -> Fusion:
        """The same with other names for its members."""
        renamed = lambda members: tuple(names[m] for m in members)
        kept = None if self.kept is None else {site: renamed(members) for site, members in self.kept.items()}
        return self.model_copy(update={"members": renamed(self.members), "kept": kept})

    def reads_at(self, place: Place) -> Reads:
        return "input" if place.projection is not None else self.query

    def build(self, place: Place, shared: nn.Module) -> FusionLayer:
        return FusionLayer(place.d_in, place.d_out, self.value)

    def make_draw(self, parts: nn.Module) -> Draw:
        return Subset(self.members, self.subset) if self.subset is not None else Draw()

    def step(self, spot: Spot) -> Step:
        return Fused(self, spot)

    def penalty(self, parts: Iterable[nn.Module]) -> Tensor | None:
        """strength · Σ ‖I − V‖²"""
        layers = [part for part in parts if isinstance(part, FusionLayer)]
        if not (self.value and self.strength and layers):
            return None
        return self.strength * side_by_side([layer.penalty() for layer in layers]).sum()

    @property
    def needs(self) -> tuple[str, ...]:
        return self.members

    def why_not_plain(self, name: str) -> str | None:
        return f"{name!r} is itself a fusion. Fuse its members {', '.join(self.members)}, or collapse it first."

    def check_pins(self, name: str, pinned: Mapping[str, float]) -> None:
        for member in pinned.keys() - set(self.members):
            raise SetupError(f"{member!r} is not a member of {name!r}.{nearest(member, self.members)}")
        if len(pinned) == len(self.members) and abs(sum(pinned.values()) - 1) > 1e-6:
            raise SetupError(f"Fuse({name!r}): all members are off or pinned, so their weights must sum to 1.")


def as_fusion(name: str, method: Method) -> Fusion:
    """The method of an inlay that has to be a fusion."""
    if not isinstance(method, Fusion):
        raise SetupError(f"{name!r} is a {method.kind} inlay, not a fusion")
    return method


class Subset(Draw):
    """A training step with some of the members only, drawn anew for each."""

    def __init__(self, members: tuple[str, ...], size: int) -> None:
        self.members, self.size = members, size
        self.order: tuple[str, ...] = ()
        """The members in this step's order, of which the first take part; empty before the first step."""

    def draw(self) -> None:
        self.order = tuple(self.members[n] for n in torch.randperm(len(self.members), device="cpu").tolist())

    def leaves_out(self, pinned: Mapping[str, float]) -> frozenset[str]:
        """The members that do not take part. Those with a fixed weight always do: the subset is of the others."""
        free = [member for member in self.order if member not in pinned]
        return frozenset(free[self.size :])

    def drawn(self) -> tuple[str, ...]:
        return self.order

    def take(self, drawn: tuple[str, ...]) -> None:
        self.order = drawn


class Fused:
    """h + Σ_n p_n V z_n: a fusion acts at one place.

    In evaluation what can be multiplied once is kept, as long as all it is made of is frozen: an optimizer need not
    leave a trace on what it changes. Other writes are noticed by torch's version counter, also `load_state_dict`; only
    writing through `.data` is not, because no test of that is free on a GPU. Activating again makes all of it anew.
    """

    def __init__(self, method: Fusion, spot: Spot) -> None:
        assert isinstance(spot.module, FusionLayer)
        self.method, self.layer, self.place, self.norm = method, spot.module, spot.place, spot.norm
        self.draw, self.pinned = spot.draw, spot.pinned
        self.names = method.at(spot.place.id)
        self.members: tuple[tuple[Any, Reads] | None, ...] = tuple(spot.member(name) for name in self.names)
        self.record: list[Tensor] | None = None
        """While somebody looks inside (`recording`): the weights (…, N) of every call."""
        self._theirs = [at for member in self.members if member is not None for at in tensors_of(member[0])]
        self._mine = tensors_of(self.layer)
        self._kept: dict[str, tuple[tuple[Any, ...], Any, list[StorageWeakRef]]] = {}
        self._pinned: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def __call__(self, h: Tensor, seen: Seen) -> Tensor:
        inputs: dict[tuple[Reads, bool], Tensor] = {}

        def given(reads: Reads, standardised: bool) -> Tensor:
            if (reads, standardised) not in inputs:
                x = in_dtype_of(self.layer, read(reads, h, seen, self.place, self.norm))
                inputs[reads, standardised] = F.layer_norm(x, x.shape[-1:]) if standardised else x
            return inputs[reads, standardised]

        x = given(self.method.reads_at(self.place), False)
        chosen = self._chosen()
        packed = self._pack(chosen)
        made = self._premultiply(packed, x.numel() // x.shape[-1], whole=len(chosen) == len(self.names))
        columns = {self.names[chosen[n]]: column for column, n in enumerate(packed.order)}
        pinned = {columns[name]: weight for name, weight in self.pinned.items() if name in columns}
        dropout = self.method.dropout if self.layer.training else 0.0
        choose = Choose(self.method.temperature, dropout, pinned, self._pinned)
        change, weights = self.layer(x, given, packed, made, choose)
        if self.record is not None:
            self.record.append(weights.detach()[..., [columns[name] for name in self.names]])
        return h + spread(change.to(h.dtype), self.place)

    def recorded(self, members: Sequence[str], rows: int) -> Tensor:
        """The weights of the recorded calls (B, T, N), by these members; one that is not here has none."""
        weights = torch.cat(self.record or []).cpu()
        if weights.dim() == 2:  # hosts that flatten (B, T)
            weights = weights.unflatten(0, (rows, -1))
        whole = weights.new_zeros(*weights.shape[:-1], len(members))
        whole[..., [members.index(name) for name in self.names]] = weights
        return whole

    def _chosen(self) -> tuple[int, ...]:
        """The members that take part: all of them, or this step's subset; all again where nobody free is left."""
        everybody = tuple(range(len(self.names)))
        if not isinstance(self.draw, Subset) or not self.layer.training or self.record is not None:
            return everybody
        out = self.draw.leaves_out(self.pinned)
        chosen = tuple(n for n in everybody if self.names[n] not in out)
        return chosen if any(self.names[n] not in self.pinned for n in chosen) else everybody

    def _forms(self) -> list[BottleneckForm | None]:
        return [None if member is None else member[0].form(member[1]) for member in self.members]

    def _pack(self, chosen: tuple[int, ...]) -> Pack:
        width, like = self.layer.key.in_features, self.layer.key.weight
        if len(chosen) == len(self.names):
            return self._keep("pack", self._theirs, lambda: pack(self._forms(), width, like))
        forms = self._keep("forms", self._theirs, self._forms)
        return pack([forms[n] for n in chosen], width, like)

    def _premultiply(self, packed: Pack, tokens: int, whole: bool) -> Premultiplied:
        everything = [*self._mine, *self._theirs]
        if whole and not torch.compiler.is_compiling() and not may_learn(everything):
            return self._keep("premultiplied", everything, lambda: self.layer.premultiply(packed.rows))
        self._kept.pop("premultiplied", None)
        return self.layer.premultiply(packed.rows, *cheapest_orders(tokens, *packed.rows.shape))

    def _keep(self, what: str, tensors: list[Where], make: Callable[[], Any]) -> Any:
        """The kept value, made anew when one of the tensors it is made of has changed, and always while one may."""
        if torch.compiler.is_compiling():
            return make()
        if may_learn(tensors):
            self._kept.pop(what, None)
            return make()
        state = tuple(trace_of(where[name]) for where, name in tensors)
        kept = self._kept.get(what)
        if kept is None or kept[0] != state:
            storages = [StorageWeakRef(t.untyped_storage()) for t in _those_of(tensors)]
            with torch.inference_mode(False), torch.no_grad(), in_single_precision(self.layer.key.weight):
                kept = self._kept[what] = state, make(), storages
        return kept[1]  # whatever another thread makes of the table meanwhile

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make theirs anew."""
        return vars(self) | {"_kept": {}, "_pinned": {}}


@contextmanager
def recording(steps: Collection[Fused]) -> Iterator[None]:
    """For the length of a `with` block, these steps keep the weights of every call."""
    for step in steps:
        step.record = []
    try:
        yield
    finally:
        for step in steps:
            step.record = None


Where = tuple[dict[str, Any], str]
"""A module's own table of parameters or buffers and a name in it: it finds the tensor also after it was replaced."""


def tensors_of(module: nn.Module) -> list[Where]:
    """All a module computes with, what it shares with other modules included."""
    parts = [*module.modules(), *(shared for m in module.modules() for shared in getattr(m, "borrowed", ()))]
    return [(table, name) for m in parts for table in (m._parameters, m._buffers) for name in table]


def may_learn(tensors: list[Where]) -> bool:
    """Whether an optimizer may change one of these tensors, now or between two evaluations."""
    return any(tensor.requires_grad for tensor in _those_of(tensors))


def _those_of(tensors: list[Where]) -> Iterator[Tensor]:
    return (tensor for where, name in tensors if (tensor := where[name]) is not None)


def trace_of(tensor: Tensor | None) -> tuple[Any, ...]:
    """What tells that a tensor has been replaced or written to.

    Objects and memory that were let go are used again, on GPUs at once, so neither says that the numbers are the same.
    The address of a storage does as long as somebody has a weak reference to it, which keeps no numbers.
    """
    if tensor is None:
        return ()
    version = None if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version, tensor.dtype
