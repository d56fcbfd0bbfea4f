"""What one Pfeiffer inlay (reduction 16) costs on a BERT-base-sized host, beside `adapters`' seq_bn.

    python benchmarks/pfeiffer.py
    python benchmarks/pfeiffer.py --peer-python PEER/bin/python     an environment with adapters 1.3.0
    python benchmarks/pfeiffer.py --layers 12 --repeats 50          the whole of BERT-base

Every layer costs the same, so four layers, the default, show the forward's ratio of twelve. Only the bare host's
training step has a large part that does not grow with the layers, the gradient of the embeddings (94 MB); and of the
first layer nothing below its inlay needs a gradient. Both are alike for the two libraries. The row "branch" is a step
of the one module in which the adapter acts: what the libraries differ in is less than a whole step's noise.

Targets: forward at most 1.06 times the bare host's; training step no slower than adapters'; its peak memory no higher.
"""

from __future__ import annotations

import sys
from typing import Any

from harness import Bench, bare_cases, phases

import inlay


def pfeiffer(host: Any) -> None:
    inlay.add(host, "task", inlay.Pfeiffer(reduction=16))
    inlay.train(host, "task")


def main() -> int:
    bench = Bench(__doc__, {**bare_cases(), **phases("pfeiffer", pfeiffer)})
    bench.time("pfeiffer:forward", base="bare:forward", peer="seq_bn:forward", target=1.06)
    bench.time("pfeiffer:step", base="bare:step", peer="seq_bn:step", target="peer")
    bench.time("pfeiffer:step", base="frozen:step", peer="seq_bn:step", target="peer")
    bench.time("pfeiffer:branch", base="frozen:branch", peer="seq_bn:branch", target="peer")
    bench.memory("pfeiffer:step", base="frozen:step", peer="seq_bn:step", target="peer")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
