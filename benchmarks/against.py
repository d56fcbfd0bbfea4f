"""What another commit's code costs beside this one's, in one run: did a change make anything slower?

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before
    python benchmarks/against.py ../before --layers 4 --repeats 20
    python benchmarks/against.py ../before --cases rows64:activate 20000:read

Two processes of the same interpreter, one per tree, answer in turn: A, B, A, B … A number is the minimum of the CPU
time over the repeats, one thread each; the last column is this tree's time over the other's. Both use this tree's
harness.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness import Builder, Peer, Run, Sizes, bare_cases, bert, phases, serve

import inlay

HERE = Path(__file__).resolve()


def single(host: Any, method: Any, frozen: bool = False) -> None:
    inlay.add(host, "task", method)
    inlay.train(host, "task")
    if frozen:
        inlay.freeze(host)


def fusion(host: Any, members: int) -> None:
    names = [f"member{i}" for i in range(members)]
    for name in names:
        inlay.add(host, name, inlay.Pfeiffer(reduction=16))
    inlay.add_fusion(host, "fused", names)
    inlay.train(host, "fused")


def served(host: Any) -> None:
    fusion(host, 16)
    inlay.freeze(host)


def rows(host: Any) -> None:
    for name in "abcd":
        inlay.add(host, name, inlay.Pfeiffer(reduction=16))
    inlay.activate(host, inlay.Rows(*"abcdabcd"))


def activating(sizes: Sizes) -> Run:
    """A batch of 64 rows, each with an inlay of its own, is resolved; nothing is run."""
    host, names = bert(sizes), [f"inlay{i}" for i in range(64)]
    for name in names:
        inlay.add(host, name, inlay.Pfeiffer(size=4))
    return lambda: inlay.activate(host, inlay.Rows(*names))


def reading(sizes: Sizes) -> Run:
    """20,000 rows of a JSON lines file."""
    from inlay.data.rows import read_table

    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "rows.jsonl"
    file.write_text("".join(f'{{"text": "a text of {i} words", "label": {i % 2}}}\n' for i in range(20_000)))

    def run(keep: Any = folder) -> None:  # the folder lives as long as the case
        read_table(file)

    return run


METHODS = {
    "pfeiffer": inlay.Pfeiffer(reduction=16),
    "compacter": inlay.Compacter(),
    "lora": inlay.LoRA(),
    "mixture": inlay.Mixture(inlay.Pfeiffer(reduction=16)),
}
CASES: dict[str, Builder] = bare_cases() | phases("fusion16", partial(fusion, members=16))
CASES["served16:forward"] = phases("", served)[":forward"]
CASES["rows:forward"] = phases("", rows)[":forward"]
CASES |= {"rows64:activate": activating, "20000:read": reading}
for name, method in METHODS.items():
    CASES |= phases(name, partial(single, method=method))
WANTED = [
    *(f"{name}:{phase}" for name in ("bare", *METHODS, "fusion16") for phase in ("forward", "step")),
    "served16:forward", "rows:forward", "rows64:activate", "20000:read",
]  # fmt: skip


class Tree(Peer):
    """A process that imports inlay from another tree."""

    def __init__(self, root: Path, sizes: str) -> None:
        path = os.pathsep.join([str(root / "src"), str(HERE.parent)])
        quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--serve", sizes],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet},
        )  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        del sys.argv[1]
        serve(CASES)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other commit's tree")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cases", nargs="+", choices=WANTED, default=WANTED, metavar="CASE", help=", ".join(WANTED))
    chosen = parser.parse_args()
    sizes = f'{{"layers": {chosen.layers}}}'
    here, there = Tree(HERE.parents[1], sizes), Tree(chosen.other.resolve(), sizes)
    print(f"{'case':<20} {'this':>9} {'other':>9}   ratio")
    for case in chosen.cases:
        times = [(here.seconds(case), there.seconds(case)) for _ in range(chosen.repeats)]
        mine, theirs = (min(column) for column in zip(*times, strict=True))
        print(f"{case:<20} {1e3 * mine:7.1f}ms {1e3 * theirs:7.1f}ms   {mine / theirs:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
