"""Compacter: PHM adapters with one shared rule and rank-one B_i (Karimi Mahabadi et al. 2021).

    W = Σ_i A_i ⊗ (s_i t_i)      slow weights A_i: one set for the whole inlay, down and up, encoder and decoder
                                 fast weights s_i (k/n, 1), t_i (1, d/n): of each projection's own

Compacter acts after attention and FFN, Compacter++ after the FFN only; both before the branch's dropout and with the
host's norms as part of the inlay. The maths is in phm.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inlay.methods.base import register
from inlay.methods.phm import PHM


@register("compacter")
class Compacter(PHM):
    """Kronecker products with a shared rule and rank-one factors, after attention and FFN."""

    rank: int | None = Field(default=1, ge=1)
    share_rule: bool = True


@register("compacter++")
class CompacterPlusPlus(Compacter):
    """Compacter after the FFN only."""

    sites: tuple[Literal["attention", "ffn"], ...] = ("ffn",)
