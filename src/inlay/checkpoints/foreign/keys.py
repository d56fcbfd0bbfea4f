"""Our tensors in somebody else's file: one table serves reading and writing, so both are complete or neither.

    ours     decoder.0.q.down.weight                             (r, D)
    theirs   transformer.h.0.attn.c_attn.loras.a.lora_A          (2r, D), of which ours is the first half

What has no spot is not theirs, and stays as it was built: a pooler that they do not save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import misfit, pour
from inlay.checkpoints.foreign.files import Tensors, shown
from inlay.host.registry import Inlay


@dataclass(frozen=True)
class Spot:
    """Where one of our tensors stands in their file."""

    key: str
    share: int = 0
    """Which of the equal shares of that tensor's rows is ours."""
    shares: int = 1
    copy: str | None = None
    """A second key under which they write the same tensor again."""


Spots = Mapping[str, Spot]


def gather(spots: Spots, wanted: Tensors, found: Tensors) -> tuple[Tensors, list[str]]:
    """Our tensors out of their file, and all that is wrong with it."""
    tensors: Tensors = {}
    keys = {key for spot in spots.values() for key in (spot.key, spot.copy) if key is not None}
    problems = [f"tensor {key} is missing" for key in keys - found.keys()]
    problems += [f"tensor {shown(key)} is not expected" for key in found.keys() - keys]
    for ours, spot in spots.items():
        if spot.key not in found:
            continue
        whole = found[spot.key]
        expected = _theirs(wanted[ours], spot.shares)
        if tuple(whole.shape) != expected:
            problems.append(f"tensor {spot.key} has shape {tuple(whole.shape)}, expected {expected}")
        elif not torch.isfinite(whole).all():
            problems.append(f"tensor {spot.key} has numbers that are not finite")
        elif spot.copy in found and not torch.equal(found[spot.copy], whole):
            problems.append(f"tensors {spot.key} and {spot.copy} should be the same")
        else:
            tensors[ours] = whole.chunk(spot.shares)[spot.share].reshape(wanted[ours].shape)
    return tensors, sorted(set(problems))


def scatter(spots: Spots, tensors: Tensors) -> Tensors:
    """Their file out of our tensors."""
    shares: dict[str, dict[int, Tensor]] = {}
    for ours, spot in spots.items():
        mine = tensors[ours].detach().cpu()
        for key in (spot.key, spot.copy):
            if key is not None:
                shares.setdefault(key, {})[spot.share] = mine.reshape(1) if mine.dim() == 0 else mine
    return {key: torch.cat([parts[i] for i in sorted(parts)]).contiguous() for key, parts in shares.items()}


def _theirs(mine: Tensor, shares: int) -> tuple[int, ...]:
    """The shape of their tensor; they write a single number as a vector of one."""
    if mine.dim() == 0:
        return (1,)
    return (mine.shape[0] * shares, *mine.shape[1:])


def poured(
    draft: Inlay, spots: Spots, found: Tensors, host: PreTrainedModel, anatomy: Anatomy, folder: Path
) -> Inlay:  # fmt: skip
    """An inlay with their tensors in it, if each has its spot; the host knows nothing of it yet.

    draft: the same inlay on no device, so that a config cannot ask for more memory than its file has numbers.
    """
    tensors, problems = gather(spots, draft.tensors(), found)
    if problems:
        raise misfit(folder, problems)
    inlay = Inlay(draft.name, draft.method, draft.head).fill(host, anatomy)
    pour(inlay, inlay.tensors() | tensors)
    return inlay
