"""What stands in front of a batch: which rows have what, longer inputs, moved positions, and outputs cut back.

Several rows may have fronts of different lengths, or none. The tokens of a row follow its own front at once, and the
filling comes last, so that every token has the position it would have if its row were alone:

    row 0   p p p t t t t t
    row 1   p t t t t t . .
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import SetupError
from inlay.host.keys import Segment
from inlay.methods.acting import check_mask, in_dtype_of


@dataclass(frozen=True)
class InFront:
    """Which modules make a row's front, one after the other; each reads its rows and gives (rows, P, W)."""

    parts: tuple[tuple[nn.Module, ...], ...]
    """The different fronts."""
    rows: tuple[int, ...] | None = None
    """For each part of the batch which of them it has; None: all have the first."""
    kept: dict[torch.device, list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """P of each different front."""
        lengths: Any = [[module.length for module in modules] for modules in self.parts]
        return tuple(sum(map(int, each)) for each in lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def made(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The fronts of all rows (1 or B, P, W), filled up with zeros; x (B, …) and the mask of real
        tokens are what the modules may read."""
        if self.rows is None:
            return torch.cat([_front(module, x, mask) for module in self.parts[0]], 1)
        found = []
        *index, back, _ = self._index(x.device)
        for modules, at in zip(self.parts, index, strict=True):
            own = x.unflatten(0, (len(back), -1))[at].flatten(0, 1)
            real = None if mask is None else mask.unflatten(0, (len(back), -1))[at].flatten(0, 1)
            if modules:
                front = torch.cat([_front(module, own, real).expand(own.shape[0], -1, -1) for module in modules], 1)
                width = front.shape[-1]
            else:
                front = None
            found.append((own.shape[0] // len(at), len(at), front))
        made = []
        for each, count, front in found:
            if front is None:
                front = x.new_zeros(each * count, 0, width)
            filled = torch.nn.functional.pad(front, (0, 0, 0, self.longest - front.shape[1]))
            made.append(filled.unflatten(0, (count, each)))
        return torch.cat(made)[back].flatten(0, 1)

    def lengths_of(self, x: Tensor) -> Tensor | None:
        """P of every row (B,); None where all have the same."""
        if self.rows is None or len(set(self.lengths)) == 1:
            return None
        return self._index(x.device)[-1].repeat_interleave(x.shape[0] // len(self.rows))

    def visible(self, x: Tensor) -> Tensor | None:
        """Which columns of the fronts a row really has (B, P); None: all."""
        lengths = self.lengths_of(x)
        return None if lengths is None else torch.arange(self.longest, device=x.device) < lengths[:, None]

    def _index(self, device: torch.device) -> list[Tensor]:
        """The parts of the batch that have each front, the way back to the batch's order, and each part's length.

        Made once for each device: a GPU waits for every list that is sent to it.
        """
        if torch.compiler.is_compiling():
            return self._fresh(device)
        if device not in self.kept:
            with torch.inference_mode(False):
                self.kept[device] = self._fresh(device)
        return self.kept[device]

    def _fresh(self, device: torch.device) -> list[Tensor]:
        assert self.rows is not None
        index = [[row for row, mine in enumerate(self.rows) if mine == at] for at in range(len(self.parts))]
        order = [row for rows in index for row in rows]
        back = sorted(range(len(order)), key=order.__getitem__)
        lengths = [self.lengths[at] for at in self.rows]
        return [torch.tensor(each, device=device) for each in (*index, back, lengths)]


def _front(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    x = in_dtype_of(module, x)
    return module(x, mask) if getattr(module, "masked", False) else module(x)


def line_up(fronts: list[tuple[nn.Module, ...]]) -> InFront | None:
    """One front for all rows, or one for each part of the batch."""
    if not any(fronts):
        return None
    different = list(dict.fromkeys(fronts))
    return InFront(tuple(different), None if len(different) == 1 else tuple(map(different.index, fronts)))


def keys_and_values(front: InFront, x: Tensor, mask: Tensor | None) -> Segment:
    """A front whose modules give keys and values side by side."""
    keys, values = front.made(x, mask).chunk(2, -1)
    return Segment(keys, values, front.visible(x))


# tokens in front


@dataclass(frozen=True)
class Longer:
    """How a batch has grown: each row's front of `ahead` tokens, then its own `tokens`, then filling."""

    ahead: int
    tokens: int
    by_row: Tensor | None
    """(B,) if the rows differ."""

    def join(self, front: Tensor, own: Tensor) -> Tensor:
        """front (B, P, …), own (B, T, …) -> (B, P + T, …)."""
        both = torch.cat([front, own], 1)
        if self.by_row is None:
            return both
        at = torch.arange(self.ahead + self.tokens, device=own.device).expand(own.shape[0], -1)
        start = self.by_row.to(own.device)[:, None]
        index = torch.where(
            at < start, at, torch.where(at < start + self.tokens, self.ahead + at - start, self.ahead - 1)
        )
        return both[torch.arange(own.shape[0], device=own.device)[:, None], index]

    def mask(self, mask: Tensor | None, own: Tensor) -> Tensor | None:
        """The mask of the longer batch; `own` says how many rows there are."""
        if mask is None and self.by_row is None:
            return None
        if mask is None:
            mask = torch.ones(own.shape[0], self.tokens, dtype=torch.long, device=own.device)
        if self.by_row is None:
            return self.join(mask.new_ones(mask.shape[0], self.ahead), mask)
        real = torch.arange(self.ahead, device=mask.device) < self.by_row.to(mask.device)[:, None]
        return self.join(real.to(mask.dtype), mask)

    def cut(self, x: Any) -> Any:
        """The rows' own tokens again: of hidden states, also inside tuples and outputs of transformers."""
        if isinstance(x, Tensor):
            if x.dim() != 3 or x.shape[1] != self.ahead + self.tokens:
                return x
            if self.by_row is None:
                return x[:, self.ahead :]
            index = self.by_row.to(x.device)[:, None] + torch.arange(self.tokens, device=x.device)
            return x[torch.arange(x.shape[0], device=x.device)[:, None], index]
        if isinstance(x, dict):  # a ModelOutput
            for name in list(x.keys()):
                x[name] = self.cut(x[name])
            return x
        return tuple(self.cut(each) for each in x) if isinstance(x, tuple) else x


ZERO_IN_FRONT = ("token_type_ids", "global_attention_mask")
"""Inputs that have a number for each token, and 0 for those in front; the second is Longformer's."""


def lengthen(
    front: InFront, inputs: dict[str, Any], embed: Callable[[Tensor], Tensor], base: nn.Module
) -> tuple[dict[str, Any], Longer]:  # fmt: skip
    """The inputs of an encoder with a front of tokens."""
    own = inputs.get("inputs_embeds")
    _check_lengthened(inputs)
    own = embed(inputs["input_ids"]) if own is None else own  # (B, T, D)
    longer = Longer(front.longest, own.shape[1], front.lengths_of(own))
    made = front.made(own).to(own.dtype).expand(own.shape[0], -1, -1)
    grown = inputs | {"input_ids": None, "inputs_embeds": longer.join(made, own)}
    mask = longer.mask(inputs.get("attention_mask"), own)
    if mask is not None:
        grown["attention_mask"] = mask
    for name in ZERO_IN_FRONT:
        if (given := inputs.get(name)) is not None:
            given = given.expand(own.shape[0], -1)
            grown[name] = longer.join(given.new_zeros(own.shape[0], longer.ahead), given)
    padding = _padding(base)
    if inputs.get("position_ids") is not None or (padding is not None and inputs.get("input_ids") is not None):
        ahead = longer.ahead if longer.by_row is None else longer.by_row[:, None]
        positions = moved_positions(inputs, ahead, base).expand(own.shape[0], -1)
        before = torch.arange(longer.ahead, device=own.device) + (0 if padding is None else padding + 1)
        grown["position_ids"] = longer.join(before.expand(own.shape[0], -1), positions)
    return grown, longer


def _check_lengthened(inputs: dict[str, Any]) -> None:
    """Refuse inputs that have something for each token, and of which nobody knows what it is for tokens in front."""
    check_mask(inputs.get("attention_mask"))
    known = (*ZERO_IN_FRONT, "input_ids", "inputs_embeds", "attention_mask", "position_ids")
    like = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    for name, given in inputs.items():
        if name in known or name.startswith(("encoder_", "decoder_")) or not isinstance(given, Tensor):
            continue
        if given.dim() > 1 and given.shape[:2] == like.shape[:2]:
            raise SetupError(f"the host is given {name} for each token, and there is none for the tokens in front.")


def _padding(base: nn.Module) -> int | None:
    """The number from which on a host of RoBERTa's kind counts its real tokens."""
    return getattr(getattr(base, "embeddings", None), "padding_idx", None)


def moved_positions(inputs: dict[str, Any], by: int | Tensor, base: nn.Module) -> Tensor:
    """Where the tokens of a batch stand when something of length `by` (one, or (B, 1)) stands in front of them."""
    given = inputs.get("position_ids")
    if given is not None:
        return given + by
    ids, embedded, mask = inputs.get("input_ids"), inputs.get("inputs_embeds"), inputs.get("attention_mask")
    like: Any = embedded if ids is None else ids
    past = inputs.get("past_key_values")
    seen = 0 if past is None else past.get_seq_length()
    padding = _padding(base)
    if padding is not None and ids is not None:  # RoBERTa counts real tokens, from the padding's number on
        real = ids.ne(padding).int()
        return ((real.cumsum(1) + by) * real).long() + padding
    kind = base.config.model_type  # type: ignore[union-attr]
    if kind == "opt" and mask is not None:  # counts real tokens
        return (mask.cumsum(1) * mask - 1).long()[:, seen:] + by
    first = seen + (padding + 1 if padding is not None else 0)
    return (torch.arange(like.shape[1], device=like.device) + first)[None] + by  # a static cache's length is a tensor
