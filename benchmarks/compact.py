"""What Compacter's Kronecker products cost: contracted in the cheapest order, in the other orders, and as a dense W.

    python benchmarks/compact.py
    python benchmarks/compact.py --peer-python PEER/bin/python     beside adapters' compacter and compacter++

The rows `n=4 b=24 …` are the adapter alone, down and up at the hidden size of BERT-base and T5-base, without a host:
`forward` is one call under no_grad, `step` a call with its backward. `dense` builds W = Σ A_i ⊗ B_i in every call, as
published code does. The other orders show that the rule of `cheapest_order` (the fewest multiply-adds per token: fold
the rule into the factor of the narrow side) picks the fastest. The rows below are whole hosts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import Bench, Builder, Run, Sizes, bare_cases, phases
from torch import Tensor

import inlay
from inlay.methods.phm import Order, cheapest_order, contract


def factors(n: int, k: int, d: int) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in ((n, n, n), (n, k // n, 1), (n, 1, d // n), (d,))]


def adapter(sizes: Sizes, n: int, b: int, orders: tuple[Order, Order], learn: bool) -> Run:
    """down, gelu, up; `orders` are those of the two projections."""
    k = sizes.hidden
    down, up = factors(n, k, b), factors(n, b, k)
    x = torch.randn(sizes.batch, sizes.tokens, k, requires_grad=True)
    gradient = torch.randn(sizes.batch, sizes.tokens, k)

    def forward() -> Tensor:
        inner = torch.nn.functional.gelu(contract(x, *down, orders[0]))
        return contract(inner, *up, orders[1])

    def run() -> None:
        if learn:
            forward().backward(gradient)
            for tensor in (x, *down, *up):
                tensor.grad = None
        else:
            with torch.no_grad():
                forward()

    return run


def module_cases(n: int, b: int, hidden: int = 768) -> dict[str, Builder]:
    best = cheapest_order(n, 1, hidden, b), cheapest_order(n, 1, b, hidden)
    ways = {"cheapest": best, "dense": ("dense", "dense"), "swapped": (best[1], best[0])}
    return {
        f"n={n} b={b} {way}:{phase}": lambda sizes, orders=orders, learn=learn: adapter(sizes, n, b, orders, learn)
        for way, orders in ways.items() for phase, learn in (("forward", False), ("step", True))
    }  # fmt: skip


def compacter(host: Any) -> None:
    inlay.add(host, "task", inlay.Compacter(reads="output", activation="gelu"), norms=False)
    inlay.train(host, "task")


def compacter_plus_plus(host: Any) -> None:
    inlay.add(
        host, "task", inlay.CompacterPlusPlus(reads="normed", activation="gelu", before_dropout=False), norms=False
    )
    inlay.train(host, "task")


def main() -> int:
    cases: dict[str, Builder] = {
        **bare_cases(),
        **phases("compacter", compacter),
        **phases("compacter++", compacter_plus_plus),
    }
    shapes = [(4, 24), (4, 48), (8, 48), (12, 48)]
    for n, b in shapes:
        cases |= module_cases(n, b)
    bench = Bench(__doc__, cases)
    for n, b in shapes:
        for phase in ("forward", "step"):
            target = 1 / 1.5 if n == 4 else 1.0
            bench.time(f"n={n} b={b} cheapest:{phase}", base=f"n={n} b={b} dense:{phase}", target=round(target, 3))
            bench.time(f"n={n} b={b} cheapest:{phase}", base=f"n={n} b={b} swapped:{phase}", target=1.0)
    for name in ("compacter", "compacter++"):
        bench.time(f"{name}:forward", base="bare:forward", peer=f"{name}:forward", target="peer")
        bench.time(f"{name}:step", base="frozen:step", peer=f"{name}:step", target="peer")
        bench.memory(f"{name}:step", base="frozen:step", peer=f"{name}:step", target="peer")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
