"""Intrinsic dimension: d numbers move every weight of the host along drawn directions (Aghajanyan et al. 2021).

    θ_i = θ⁰_i + λ_i · P_i z          z (d,) starts at 0, λ_i at 1; SAID has a λ for every tensor, DID one for all

    P_i z = [H G Π H B pad(z)]_{1…D_i} / (√(L ΣG²) · √(D_i / L))          Fastfood (Le et al. 2013)

H is the Hadamard matrix of size L, the next power of two above D_i; B random signs, Π a random permutation, G Gaussian
numbers. All are drawn from the seed, which is kept instead of them, and P_i (D_i, d) is never built:

- Only the first d of pad(z) are not zero, so H B pad(z) is one short transform w of length l ≥ d, repeated: (L/l) · w.
- What Π takes from it is w[π mod l], one look-up; the second transform is a few products with small Hadamard matrices.

The columns of P_i have unit norm where D_i = L, and in the mean elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import ConfigError
from inlay.methods.acting import Reads
from inlay.methods.base import Method, register

BLOCK = 6
"""Bits of the small Hadamard matrices: 64 × 64 costs few multiplications and still is a product of matrices."""


def hadamard(bits: int, like: Tensor) -> Tensor:
    """The Hadamard matrix of size 2^bits, in Sylvester's order."""
    made = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    for _ in range(bits):
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made


def transform(x: Tensor, rows: int | None = None) -> Tensor:
    """H x for x (2^k,), or only the first `rows` of it: as products with small matrices, H = H_a ⊗ H_b ⊗ …"""
    size = x.shape[0]
    bits = size.bit_length() - 1
    sizes = [BLOCK] * (bits // BLOCK) + ([bits % BLOCK] if bits % BLOCK else [])
    done = 0
    for at, small in enumerate(sizes):
        last = at == len(sizes) - 1
        h = hadamard(small, x)
        if last:  # the leading factor: whole blocks of rows that nobody asked for are left out
            wanted = size if rows is None else rows
            h = h[: -(-wanted // 2**done)]
            x = (h @ x.view(2**small, 2**done)).flatten()
        elif done == 0:
            x = (x.view(-1, 2**small) @ h).flatten()
        else:
            x = (h @ x.view(-1, 2**small, 2**done)).flatten()
        done += small
    return x if rows is None else x[:rows]


class Direction:
    """P_i: what was drawn for one tensor of the host."""

    def __init__(self, name: str, count: int, d: int, seed: int, device: torch.device) -> None:
        self.count = count  # D_i
        self.size = 1 << max(0, (count - 1).bit_length())  # L
        self.used = min(d, self.size)
        self.short = 1 << max(0, (self.used - 1).bit_length())  # l
        draw = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)
        signs = torch.randint(0, 2, (self.short,), generator=draw).mul_(2).sub_(1).float()  # B
        order = torch.randperm(self.size, generator=draw).remainder_(self.short).int()  # Π
        gauss = torch.randn(self.size, generator=draw)  # G
        norm = math.sqrt(self.size * float(gauss.double().square().sum())) * math.sqrt(count / self.size)
        self.signs, self.order, self.gauss = (t.to(device) for t in (signs, order, gauss / norm))

    def along(self, z: Tensor) -> Tensor:  # (d,) -> (D_i,)
        padded = torch.nn.functional.pad(z[: self.used], (0, self.short - self.used))
        short = transform(self.signs * padded)  # (l,)
        return transform(short.index_select(0, self.order) * self.gauss, self.count)


class Intrinsic(nn.Module):
    """Changes of all weights, made of d numbers."""

    def __init__(self, shapes: tuple[tuple[str, tuple[int, ...]], ...], d: int, seed: int, by_tensor: bool) -> None:
        super().__init__()
        self.shapes, self.d, self.seed = shapes, d, seed
        self.z = nn.Parameter(torch.zeros(d))
        self.scale = nn.Parameter(torch.ones(len(shapes) if by_tensor else 1))  # λ
        self.directions: dict[str, Direction] = {}
        """Drawn when they are first used, and on the device where they are: not saved."""

    def forward(self) -> dict[str, Tensor]:
        """The change of each tensor by its name."""
        if not self.directions or next(iter(self.directions.values())).gauss.device != self.z.device:
            with torch.inference_mode(False), torch.no_grad():
                self.directions = {
                    name: Direction(name, math.prod(shape), self.d, self.seed, self.z.device)
                    for name, shape in self.shapes
                }
        z = self.z.float()
        scales = self.scale.float().expand(len(self.shapes)).unbind()
        return {
            name: (self.directions[name].along(z) * scale).view(shape)
            for (name, shape), scale in zip(self.shapes, scales, strict=True)
        }


@register("said")
class SAID(Method):
    """Structure-aware intrinsic dimension: d numbers for the whole host, and a scale for every tensor of it."""

    rate: ClassVar[float] = 3e-2
    epochs: ClassVar[int] = 20

    d: int = Field(default=20_000, ge=1)
    """The intrinsic dimension."""
    seed: int = Field(default=0, ge=0)
    """What the directions are drawn from."""
    by_tensor: bool = True
    """A scale λ for every tensor; False: one for all (DID)."""

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        for place in anatomy.of_kind("weights"):
            if self.d > place.d_out:
                raise ConfigError(f"d is {self.d:,}, but the host has only {place.d_out:,} weights")
            yield place

    def reads_at(self, place: Place) -> Reads:
        return "output"

    def build(self, place: Place, shared: nn.Module) -> Intrinsic:
        return Intrinsic(place.shapes, self.d, self.seed, self.by_tensor)

    def closed_form(self, places: Sequence[Place]) -> str | None:
        scales = len(places[0].shapes) if self.by_tensor else 1
        return f"d + λ = {self.d + scales:,}   (d={self.d}, λ={scales})"
