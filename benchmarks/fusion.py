"""What a fusion of N Pfeiffer inlays (bottleneck 48) costs, beside `adapters`; the bare host's forward is 1.

    python benchmarks/fusion.py --peer-python PEER/bin/python
    python benchmarks/fusion.py --peer-python PEER/bin/python --members 1 2 4 8 16 32 64 --plot docs/fusion-cost

The last column says how far a row is from its arithmetic, as if matrix products were all there is: 12 D² multiply-adds
per token and layer in the host, and in a forward D² + 3 D N b for a fusion whose query and keys are folded into one
D × D matrix. Folding them on into the members' rows, as evaluation here does, needs 3 D N b only, so a small fusion may
cost less than that bound. A step is the host's forward, its gradient in every layer but the lowest, which nothing below
needs, and the orders of keys and values that `inlay.methods.fusion` says are the cheapest for so many tokens.

The fewer layers, the cheaper a step looks: ask for --layers 12 to have BERT-base.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from harness import Bench, Builder, Row, Sizes, arguments, bare_cases, bert, phases

import inlay
from inlay.methods.fusion import orders

TARGETS = {2: (1.20, 2.5), 8: (1.28, 2.7), 16: (1.36, 2.9), 64: (2.3, 4.8)}
"""N to the highest good ratio of a forward and of a training step."""


def fusion(host: Any, members: int, served: bool = False) -> None:
    """A fusion that trains; or one that is served, all of it frozen: then what can be multiplied once is kept."""
    names = [f"member{i}" for i in range(members)]
    for name in names:
        inlay.add(host, name, inlay.Pfeiffer(reduction=16))
    inlay.add_fusion(host, "fused", names)
    inlay.train(host, "fused")
    if served:
        inlay.freeze(host)


def bound(case: str, sizes: Sizes, size: int = 48) -> float:
    """What the arithmetic alone would cost, bare forward = 1."""
    _, members, phase = case.split(":")
    rows, width, tokens = int(members) * (size + (phase == "step")), sizes.hidden, sizes.batch * sizes.tokens
    if phase == "forward":
        return 1 + (1 + 3 * rows / width) / 12
    keys, values = orders(tokens, rows, width)
    fusion = (min(keys.values()) + min(values.values())) / tokens + 6 * rows / width
    return 1 + (sizes.layers - 1) / sizes.layers + fusion / 12


def with_the_host(row: Row, bench: Bench) -> None:
    """A step's whole memory: the host's weights have to be there too."""
    weights = sum(p.numel() * p.element_size() for p in bert(bench.sizes).parameters())
    for side in ("ours", "peers"):
        if (found := getattr(row, side)) is not None:
            peak, base = found[0] + weights, found[0] / found[1] + weights
            setattr(row, side, (peak, peak / base))
    row.note = "the host's weights included"


def plot(rows: list[Row], path: Path) -> None:
    """Cost over N, for both libraries."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, phase, title in zip(
        figure.subplots(1, 2), ("forward", "step"), ("forward", "training step"), strict=True
    ):
        mine = [row for row in rows if row.what == "time" and row.case.endswith(phase)]
        counts = [int(row.case.split(":")[1]) for row in mine]
        for side, label in (("ours", "inlay"), ("peers", "adapters")):
            if all(getattr(row, side) for row in mine):
                axes.plot(counts, [getattr(row, side)[1] for row in mine], marker="o", label=label)
        axes.set_title(title)
        axes.set_xlabel("members")
        axes.set_ylabel("cost, bare forward = 1")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    for ending in (".png", ".svg"):
        figure.savefig(path.with_name(path.name + ending), dpi=150)


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=list(TARGETS), help="how many members (2 8 16 64)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw PATH.png and PATH.svg")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    cases: dict[str, Builder] = bare_cases()
    for members in {1, 16, *chosen.members}:
        cases |= phases(f"fusion:{members}", partial(fusion, members=members))
        cases[f"evaluated:{members}:forward"] = cases[f"fusion:{members}:forward"]
        cases[f"fusion:{members}:forward"] = phases("", partial(fusion, members=members, served=True))[":forward"]
    bench = Bench(__doc__, cases, chosen)
    for members in chosen.members:
        forward, step = TARGETS.get(members, (None, None))
        for phase, target in (("forward", forward), ("step", step)):
            case = f"fusion:{members}:{phase}"
            bench.time(case, base="bare:forward", peer=case, target=target)
        bench.time(f"evaluated:{members}:forward", base="bare:forward")
    bench.memory("fusion:16:step", base="fusion:1:step", peer="fusion:16:step", target=1.25)
    rows = bench.measure()
    for row in rows:
        if row.what == "memory":
            with_the_host(row, bench)
        elif row.ours is not None:
            limit = bound(row.case, bench.sizes)
            row.note = f"{row.ours[1] / limit:.2f} of the bound {limit:.2f}"
    if chosen.plot:
        plot(rows, chosen.plot)
    return bench.report(rows)


if __name__ == "__main__":
    sys.exit(main())
