"""Our tensors in somebody else's file: reading and writing use the same table of keys.

    ours     decoder.0.q.down.weight                             (r, D)
    theirs   transformer.h.0.attn.c_attn.loras.a.lora_A          (2r, D), of which ours is the first half

A tensor of ours without a key there, such as a pooler that they do not save, keeps the values it was built with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    copy: str | None = None
    """A second key under which they write the same tensor again."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if self.copy is None else (self.key, self.copy)


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
        expected = _theirs(wanted[ours], entry.shares)
        if tuple(whole.shape) != expected:
            problems.append(f"tensor {entry.key} has shape {tuple(whole.shape)}, expected {expected}")
        elif not torch.isfinite(whole).all():
            problems.append(f"tensor {entry.key} has numbers that are not finite")
        elif entry.copy in found and not torch.equal(found[entry.copy], whole):
            problems.append(f"tensors {entry.key} and {entry.copy} should be the same")
        else:
            tensors[ours] = whole.chunk(entry.shares)[entry.share].reshape(wanted[ours].shape)
    return tensors, sorted(set(problems))


def scatter(table: KeyTable, tensors: Tensors) -> Tensors:
    """Their tensors from ours."""
    shares: dict[str, dict[int, Tensor]] = {}
    for ours, entry in table.items():
        mine = tensors[ours].detach().cpu()
        for key in entry.keys:
            shares.setdefault(key, {})[entry.share] = mine.reshape(1) if mine.dim() == 0 else mine
    return {key: torch.cat([parts[i] for i in sorted(parts)]).contiguous() for key, parts in shares.items()}


def _theirs(mine: Tensor, shares: int) -> tuple[int, ...]:
    """The shape of their tensor; they write a single number as a vector of length one."""
    if mine.dim() == 0:
        return (1,)
    return (mine.shape[0] * shares, *mine.shape[1:])


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
