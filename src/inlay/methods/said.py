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
from typing import Any, ClassVar

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
    found = transform_in_place(x.clone(), torch.empty_like(x))
    return found if rows is None else found[:rows]


def transform_in_place(x: Tensor, other: Tensor) -> Tensor:
    """H x for x (2^k,), in one of the two buffers that are given; both are written over.

    Each product goes from one to the other. A new buffer for each would cost more than the product does: the system
    hands memory of that size out anew, page by page.
    """
    done, bits = 0, x.shape[0].bit_length() - 1
    while done < bits:
        small = min(BLOCK, bits - done)
        h = hadamard(small, x)
        if done == 0:
            torch.mm(x.view(-1, 2**small), h, out=other.view(-1, 2**small))
        else:
            shape = (-1, 2**small, 2**done)
            torch.matmul(h, x.view(shape), out=other.view(shape))
        x, other, done = other, x, done + small
    return x


class Direction:
    """P_i: what was drawn for one tensor of the host."""

    def __init__(self, name: str, count: int, d: int, seed: int, device: torch.device) -> None:
        self.count = count  # D_i
        self.size = 1 << max(0, (count - 1).bit_length())  # L
        self.used = min(d, self.size)
        self.short = 1 << max(0, (self.used - 1).bit_length())  # l
        draw = torch.Generator("cpu").manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)
        here: Any = {"generator": draw, "device": "cpu"}  # whatever torch's default device and dtype are
        signs = torch.randint(0, 2, (self.short,), **here).mul_(2).sub_(1).float()  # B
        order = torch.randperm(self.size, **here).remainder_(self.short).int()  # Π
        gauss = torch.randn(self.size, dtype=torch.float32, **here)  # G
        norm = math.sqrt(self.size * float(gauss.double().square().sum())) * math.sqrt(count / self.size)
        self.signs, self.order, self.gauss = (t.to(device) for t in (signs, order, gauss / norm))

    def along(self, z: Tensor) -> Tensor:
        """P_i z, (d,) → (D_i,)."""
        return Along.apply(z, self)


class Along(torch.autograd.Function):
    """z ↦ P_i z, and for its gradient g ↦ P_iᵀ g: H is its own transpose."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, direction: Direction) -> Tensor:
        ctx.direction, ctx.d = direction, z.shape[0]
        padded = torch.nn.functional.pad(z[: direction.used], (0, direction.short - direction.used))
        short = transform(direction.signs * padded)  # (l,)
        long = short.index_select(0, direction.order).mul_(direction.gauss)  # (L,)
        return transform_in_place(long, torch.empty_like(long))[: direction.count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        direction, (g,) = ctx.direction, gradients
        long = torch.nn.functional.pad(g, (0, direction.size - direction.count))
        long = transform_in_place(long, torch.empty_like(long)).mul_(direction.gauss)
        short = g.new_zeros(direction.short).index_add_(0, direction.order, long)
        found = transform(short).mul_(direction.signs)[: direction.used]
        return torch.nn.functional.pad(found, (0, ctx.d - direction.used)), None


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
