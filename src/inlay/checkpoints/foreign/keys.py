"""Our tensors in somebody else's file: reading and writing use the same table of keys.

    ours     decoder.0.q.down.weight                             (r, D)
    theirs   transformer.h.0.attn.c_attn.loras.a.lora_A          (2r, D), of which ours is the first half

A tensor of ours without a key there, such as a pooler that they do not save, keeps the values it was built with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import copy_into, misfit
from inlay.checkpoints.foreign.files import Tensors, shown
from inlay.host.registry import Inlay


@dataclass(frozen=True)
class FileKey:
    """Where one of our tensors is in their file."""

    key: str
    share: int = 0
    """Which of the equal shares of that tensor's rows is ours."""
    shares: int = 1
    copies: tuple[str, ...] = ()
    """Other keys under which they write the same tensor again."""
    form: Literal["rows", "column", "side by side"] = "rows"
    """Ours is a share of their rows; or theirs is a column and ours a vector; or theirs is one long vector, the numbers
    of matrices that stand side by side, of which ours is one."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.copies)

    def theirs(self, mine: Tensor) -> tuple[int, ...]:
        """The shape of their tensor; they write a single number as a vector of length one."""
        if mine.dim() == 0:
            return (1,)
        if self.form == "side by side":
            return (mine.numel() * self.shares,)
        return (mine.shape[0] * self.shares, *mine.shape[1:], *((1,) if self.form == "column" else ()))

    def ours(self, theirs: Tensor, like: Tensor) -> Tensor:
        if self.form == "side by side":
            return theirs.view(like.shape[0], self.shares, -1)[:, self.share]
        return theirs.chunk(self.shares)[self.share].reshape(like.shape)

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Their tensor from all shares of it."""
        if self.form == "side by side":
            return torch.stack(list(parts), 1).flatten()
        return torch.cat([part[:, None] if self.form == "column" else part for part in parts]).contiguous()


KeyTable = Mapping[str, FileKey]
"""Their keys by ours."""


def gather(table: KeyTable, wanted: Tensors, found: Tensors) -> tuple[Tensors, list[str]]:
    """Our tensors from their file, and everything that is wrong with the file."""
    tensors: Tensors = {}
    keys = {key for entry in table.values() for key in entry.keys}
    problems = [f"tensor {key} is missing" for key in keys - found.keys()]
    problems += [f"tensor {shown(key)} is not expected" for key in found.keys() - keys]
    for ours, entry in table.items():
        if entry.key not in found:
            continue
        whole = found[entry.key]
        expected = entry.theirs(wanted[ours])
        if tuple(whole.shape) != expected:
            problems.append(f"tensor {entry.key} has shape {tuple(whole.shape)}, expected {expected}")
        elif not torch.isfinite(whole).all():
            problems.append(f"tensor {entry.key} has numbers that are not finite")
        elif differ := [copy for copy in entry.copies if copy in found and not torch.equal(found[copy], whole)]:
            problems.append(f"tensors {entry.key} and {differ[0]} should be the same")
        else:
            tensors[ours] = entry.ours(whole, wanted[ours])
    return tensors, sorted(set(problems))


def scatter(table: KeyTable, tensors: Tensors) -> Tensors:
    """Their tensors from ours."""
    shares: dict[str, dict[int, Tensor]] = {}
    entries: dict[str, FileKey] = {}
    for ours, entry in table.items():
        mine = tensors[ours].detach().cpu()
        for key in entry.keys:
            entries[key] = entry
            shares.setdefault(key, {})[entry.share] = mine.reshape(1) if mine.dim() == 0 else mine
    return {key: entries[key].together([parts[i] for i in sorted(parts)]) for key, parts in shares.items()}


def filled(
    draft: Inlay, table: KeyTable, found: Tensors, host: PreTrainedModel, anatomy: Anatomy, folder: Path
) -> Inlay:  # fmt: skip
    """The draft's inlay, filled with the tensors of their file; it is not on the host yet.

    Every key of the table has to be in the file, and nothing else may be.
    draft: the inlay on the meta device, so that a wrong file is refused before memory is taken.
    """
    tensors, problems = gather(table, draft.tensors(), found)
    if problems:
        raise misfit(folder, problems)
    inlay = Inlay(draft.name, draft.method, draft.head).fill(host, anatomy)
    copy_into(inlay, inlay.tensors() | tensors)
    return inlay
