"""The pair of matrices that peft has for one module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.files import Tensors
from inlay.checkpoints.foreign.peft.keys import ROOT, places_of
from inlay.host.registry import Inlay, key_of
from inlay.methods.lora import LowRankChange, part_rows


class LoraPair:
    """lora_A and lora_B of one module: those of one LoRA, or of the LoRAs of its parts (q, k, v) put together."""

    def __init__(self, parts: Sequence[tuple[Tensor, LowRankChange]], rows: int) -> None:
        """`parts`: the output rows of each part, and its LoRA."""
        self.scale = parts[0][1].scale
        self.down = torch.cat([change.down.weight.detach() for _, change in parts])  # (Σr, D_in)
        self.rank = self.down.shape[0]
        self.up = self.down.new_zeros(rows, self.rank)  # (D_out, Σr), zero where a part does not reach
        at = 0
        for mine, change in parts:
            rank = change.up.weight.shape[1]
            factor = change.scale / self.scale
            up = change.up.weight.detach()
            self.up[mine, at : at + rank] = up if factor == 1 else up * factor
            at += rank

    def alpha(self, rank_stabilised: bool) -> float:
        """The alpha that gives this scale at this rank."""
        alpha = self.scale * (math.sqrt(self.rank) if rank_stabilised else self.rank)
        return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha

    def tensors(self, path: str) -> Tensors:
        return {f"{ROOT}{path}.lora_A.weight": self.down, f"{ROOT}{path}.lora_B.weight": self.up}


def lora_pairs(inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel) -> dict[str, LoraPair]:
    """One pair for each changed module, in the host's order."""
    parts: dict[str, list[tuple[Tensor, LowRankChange]]] = {}
    rows: dict[str, int] = {}
    for place in places_of(inlay, anatomy):
        if place.projection is not None:
            change = inlay.parts[key_of(place.id)]
            assert isinstance(change, LowRankChange)
            rows[place.module] = place.projection.sizes(host.get_submodule(place.module))[1] * place.projection.parts
            mine = part_rows(place, rows[place.module]).to(change.up.weight.device)
            parts.setdefault(place.module, []).append((mine, change))
    return {path: LoraPair(found, rows[path]) for path, found in parts.items()}
