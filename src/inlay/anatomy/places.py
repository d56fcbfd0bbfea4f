"""The words for where things are in a host: branches, projections, layers, families, places.

    layer ─┬─ attention ── h ─┐            ┌─ ffn ── h ─┐
           └────────────── r ─┴─(+)─[norm]─┴─────── r ──┴─(+)─[norm]──     post-LN: a norm after each sum
                                                                           pre-LN:  a norm before each branch

A `Place` is a spot in one host where an inlay can act. Its `kind` is
  attention, ffn           the branch's output h, after the branch's dropout
  attention.raw, ffn.raw   the same before that dropout
  q k v o, cross_q …       the projections of self- and cross-attention
  qkv                      the whole module where q, k and v are parts of one
  ffn_in, ffn_out          the projections of the feed-forward network
  linear                   every other linear map of the host
  bias, head_bias          every module that adds a bias, below the head and in it
  norm, head               modules that an inlay's own copy may stand in for
  o.input, ffn_out.input   what goes into a projection that ends a branch
  self_attention, cross_attention   the keys and values that an attention sees
  tokens                   the embedded tokens that the lowest stack begins with
  weights                  every weight below the head
Names are relative to the layer, the layers to `host.base_model`, which every transformers model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the table of families is read without torch
    from torch import nn


@dataclass(frozen=True)
class Branch:
    """One residual branch of a layer, h(r) + r."""

    output: str
    """Module whose output is h, after dropout where the dropout is a module."""
    residual: tuple[str, int]
    """(module, i): r is that module's i-th input."""
    norm: str = ""
    """Post-LN hosts: the norm of h + r. Empty in pre-LN hosts."""
    raw: str = ""
    """Module whose output is h before dropout. Empty: the same as `output`."""


@dataclass(frozen=True)
class Projection:
    """One linear map of a layer, or one part of a fused one."""

    path: str
    part: int = 0
    """Which of the fused parts this is."""
    parts: int = 1
    """How many equal parts the module's output is made of."""
    per_head: bool = False
    """The parts alternate head by head (GPT-NeoX) instead of following each other."""

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """(input, output) of this part of a module, a Linear or transformers' transposed Conv1D."""
        known: Any = module
        if hasattr(known, "in_features"):  # a quantised one packs its weight, whose shape says nothing
            return known.in_features, known.out_features // self.parts
        d_in, d_out = known.weight.shape
        return d_in, d_out // self.parts


Acts = Literal["output", "input", "keys", "tokens", "weights"]
"""What an inlay changes at a place: what a module gives, what goes into it, the keys and values that it attends to, the
tokens that the host begins with, or a module's weights."""

Roles = dict[str, tuple[Projection, ...]]
"""Projections by their role: q, k, v, o, ffn_in …"""


@dataclass(frozen=True)
class Layers:
    """A stack of layers: where its list is, and what is where in each layer."""

    path: str
    attention: Branch | None
    """None in both branches: only projections and norms are known."""
    ffn: Branch | None
    projections: Mapping[str, tuple[Projection, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One entry of the table: every stack of a model family by its name, 'encoder' or 'decoder'."""

    stacks: Mapping[str, Layers]
    not_norms: tuple[str, ...] = ()
    """Norms that do not act on the residual stream but on what all rows share, relative to the base model."""
    no_branches: str = ""
    """Why the branches of a family are not known, if they are not."""


@dataclass(frozen=True)
class Place:
    """A spot in one host, with dotted names from the host's root."""

    id: str
    kind: str
    module: str
    """The module whose output an inlay changes."""
    stack: str = ""
    layer: int = -1
    residual: tuple[str, int] | None = None
    norm: str | None = None
    projection: Projection | None = None
    heads: int = 1
    """Attention heads, where a fused projection alternates head by head."""
    d_in: int = 0
    """Width of what a module at this place reads."""
    d_out: int = 0
    """Width of what it adds."""
    trailing: int = 0
    """Dimensions after the channels: a convolution's."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The host's tensors by their names below the base model, where an inlay changes weights."""
    acts: Acts = "output"
    """What of the module an inlay changes."""
    branch: str = ""
    """The branch whose output this place gives, if it is one of the modules at a branch's end; see `BranchEnd`."""

    @property
    def changes(self) -> bool:
        """Whether an inlay changes an output here; at norms and heads its own module stands in."""
        return self.kind not in ("norm", "head")


@dataclass(frozen=True)
class BranchEnd:
    """The end of one branch: the modules that give its output one after the other.

        last projection ── branch before its dropout ── branch after it

    They may be the same module. Without dropout all of them give the same h, unless the host norms it on the way.
    """

    modules: tuple[str, ...]
    residual: tuple[str, int]
    """(module, i): r is that module's i-th input."""
    norms: frozenset[str] = frozenset()
    """Those of the modules that norm h (Gemma 2): what acts before them cannot act after them instead."""

    def at(self, place: Place) -> int:
        """The position of a place's module."""
        return self.modules.index(place.module)


def in_layers(place: Place, names: Mapping[str, Any] | tuple[int | str, ...]) -> str | None:
    """The name among `names` that means this place's layer, the most exact first."""
    known = {str(name) for name in names}
    mine = (place.id, place.id.removesuffix(".raw"), f"{place.stack}.{place.layer}", str(place.layer))
    return next((name for name in mine if name in known), None)
