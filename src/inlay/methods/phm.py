"""Linear maps from sums of Kronecker products, and PHM adapters (Karimi Mahabadi et al. 2021, after Zhang et al. 2021).

    W = Σ_i A_i ⊗ B_i        A_i (n, n) the rule, B_i (k/n, d/n)        y = x W + bias,  k → d

    PHM        B_i free, A_i of each projection's own          kd/n + n³ parameters
    Compacter  B_i = s_i t_i, rank r; A_i shared by all        r(k + d) parameters, and n³ once

W need not be built when B_i has low rank. With x seen as n rows of k/n, contract with s, mix with A, expand with t.
A is folded into the factor of the *narrow* side, which leaves two matrix products (multiply-adds per token):

    k ≥ d   (x s) then (A t)    n r k + n² r d          the wide x is read once, by the thin s
    k < d   (x (s A)) then t    n² r k + n r d          the wide y is written once, by the thin t
    dense   x W                 k d, and W built once per call

`cheapest_order` takes the least of the three; benchmarks/compact.py shows that it is also the fastest.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from inlay.errors import ConfigError
from inlay.methods.base import register
from inlay.methods.bottleneck import Bottleneck, Layer

Order = Literal["narrow out", "narrow in", "dense"]


def dense(rule: Tensor, blocks: Tensor) -> Tensor:
    """Σ_i A_i ⊗ B_i: (n, n, n) and (n, k/n, d/n) to (k, d)."""
    n, rows, columns = blocks.shape
    return torch.einsum("iab,ipq->apbq", rule, blocks).reshape(n * rows, n * columns)


def cheapest_order(n: int, rank: int, k: int, d: int) -> Order:
    """The order of contraction with the fewest multiply-adds per token."""
    costs: dict[Order, int] = {
        "narrow out": n * rank * k + n * n * rank * d,
        "narrow in": n * n * rank * k + n * rank * d,
        "dense": k * d,
    }
    return min(costs, key=costs.__getitem__)


def contract(x: Tensor, rule: Tensor, left: Tensor, right: Tensor, bias: Tensor, order: Order | None = None) -> Tensor:
    """x Σ_i A_i ⊗ (s_i t_i) + bias. x (…, k), rule (n, n, n), left s (n, k/n, r), right t (n, r, d/n)."""
    n, rows, r = left.shape
    columns = right.shape[-1]
    order = order or cheapest_order(n, r, n * rows, n * columns)
    if order == "dense":
        return x @ dense(rule, left @ right) + bias
    if order == "narrow out":
        thin = left.permute(1, 0, 2).reshape(rows, n * r)  # (k/n, i r)
        mixed = torch.einsum("iab,irq->airbq", rule, right).reshape(n * n * r, n * columns)
        inner = (x.reshape(-1, rows) @ thin).view(-1, n * n * r)  # (tokens, a i r)
        y = torch.addmm(bias, inner, mixed)
    else:
        mixed = torch.einsum("iab,ipr->apbir", rule, left).reshape(n * rows, n * n * r)
        inner = (x.reshape(-1, n * rows) @ mixed).view(-1, n * r)  # (tokens b, i r)
        y = (inner @ right.reshape(n * r, columns)).view(-1, n * columns) + bias
    return y.view(*x.shape[:-1], n * columns)


class Rule(nn.Module):
    """The n matrices A_i of size n × n; a parameter if they learn, otherwise a buffer."""

    rule: Tensor

    def __init__(self, n: int, std: float, learned: bool = True) -> None:
        super().__init__()
        start = torch.empty(n, n, n).normal_(std=std)
        if learned:
            self.rule = nn.Parameter(start)
        else:
            self.register_buffer("rule", start)


class KroneckerLinear(nn.Module):
    """k → d by Σ_i A_i ⊗ B_i, with B_i free (rank None) or of low rank."""

    def __init__(self, k: int, d: int, n: int, rank: int | None, rule: Rule, own_rule: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = k, d
        if own_rule:
            self.own = rule
        self.borrowed = (rule,)  # in a tuple: a shared rule belongs to the inlay and is saved once
        if rank is None:
            self.blocks = nn.Parameter(torch.empty(n, k // n, d // n))
        else:
            self.left = nn.Parameter(torch.empty(n, k // n, rank))
            self.right = nn.Parameter(torch.empty(n, rank, d // n))
        self.low_rank = rank is not None
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:  # (…, k) -> (…, d)
        rule = self._rule()
        if self.low_rank:
            return contract(x, rule, self.left, self.right, self.bias)
        return x @ dense(rule, self.blocks) + self.bias

    def borrow(self, other: KroneckerLinear) -> None:
        """Use another map's rule instead of an own one."""
        self.borrowed = other.borrowed
        self._modules.pop("own", None)

    def weight(self) -> Tensor:
        """The map as one matrix (k, d)."""
        return dense(self._rule(), self.left @ self.right if self.low_rank else self.blocks)

    def _rule(self) -> Tensor:
        """The rule as this map needs it: a shared one may be on another device, or in another dtype."""
        return self.borrowed[0].rule.to(self.bias.device, self.bias.dtype)

    def reset(self, gain: float) -> None:
        """The paper's start: Xavier-uniform for every B_i or each of its factors."""
        for name, parameter in self.named_parameters(recurse=False):
            if name != "bias":
                for block in parameter.data:
                    nn.init.xavier_uniform_(block, gain=gain)


@register("phm")
class PHM(Bottleneck):
    """Adapters whose projections are sums of Kronecker products, each with a rule of its own."""

    trains_norms: ClassVar[bool] = True
    rate: ClassVar[float] = 3e-3
    text_rate: ClassVar[float | None] = 3e-3

    sites: tuple[Literal["attention", "ffn"], ...] = ("attention", "ffn")
    reduction: float | dict[Layer, float] = 32
    activation: str = "gelu_new"
    before_dropout: bool = True
    n: int = Field(default=4, ge=1, le=1 << 20)
    """How many Kronecker products are summed; divides the hidden size and the bottleneck."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of each B_i; None leaves B_i free."""
    share_rule: bool = False
    """One set of A_i for the whole inlay instead of one per projection."""
    learn_rule: bool = True
    """Whether the A_i train."""
    rule_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the A_i's start; None is the paper's: 0.0001 shared, 0.01 otherwise."""

    def rule(self) -> Rule:
        std = self.rule_std or (1e-4 if self.share_rule else 1e-2)
        return Rule(self.n, std, self.learn_rule)

    def make_shared(self) -> nn.Module:
        return self.rule() if self.share_rule else nn.Module()

    def check_size(self, b: int, width: int) -> None:
        if width % self.n:
            divisors = [n for n in range(1, width + 1) if width % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.n))[:3])
            raise ConfigError(
                f"n = {self.n} does not divide the hidden size {width}. Nearest n that do: {', '.join(map(str, near))}."
            )
        if b % self.n:
            near = sorted({max(self.n, b - b % self.n), b - b % self.n + self.n})
            raise ConfigError(
                f"n = {self.n} does not divide the bottleneck {b} (hidden size {width}). "
                f"Nearest sizes that work: {' and '.join(map(str, near))}."
            )

    def weights_of(self, k: int, d: int, p: int) -> tuple[str, int, str]:
        n, r = self.n, self.rank
        weights, words = (k * d // n, "kd/n") if r is None else (r * (k + d), "(k+d)" if r == 1 else "r(k+d)")
        if self.share_rule:
            return f"P·{words} + n³", p * weights + n**3, f", n={n}"
        return f"P·({words} + n³)", p * (weights + n**3), f", n={n}"

    def linear(self, d_in: int, d_out: int, shared: nn.Module) -> nn.Module:
        rule = shared if isinstance(shared, Rule) else self.rule()
        return KroneckerLinear(d_in, d_out, self.n, self.rank, rule, own_rule=not self.share_rule)

    def initialise(self, down: nn.Module, up: nn.Module) -> None:
        for linear in (down, up):
            assert isinstance(linear, KroneckerLinear)
            linear.reset(gain=math.sqrt(2))
        if self.init == "identity":
            zeros = up.right if self.rank is not None else up.blocks
            nn.init.zeros_(zeros)  # type: ignore[arg-type]
