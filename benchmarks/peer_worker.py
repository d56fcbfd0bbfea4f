"""The peer's cases: `adapters` 1.3.0. Started by the harness with the python that --peer-python names.

It answers lines of JSON on stdin, ["seconds", "seq_bn:forward"], with lines of JSON on stdout, {"value": 0.41}; see
`serve` in harness.py. Imports torch, transformers and adapters, and of this project only the harness, so that the host,
the batch, the training step and the way of measuring are the same code on both sides.

By hand: echo '["seconds", "seq_bn:step"]' | PEER/bin/python benchmarks/peer_worker.py '{"layers": 2}'

To add a case: a function that changes a fresh host in place, and a line in CASES.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import adapters
from adapters.composition import Fuse
from harness import Builder, bare_cases, phases, serve


def single(host: Any, config: str) -> None:
    """One adapter of a named configuration, training."""
    adapters.init(host)
    host.add_adapter("task", config=config)
    host.train_adapter("task")


def fusion(host: Any, members: int) -> None:
    """AdapterFusion over seq_bn adapters (reduction 16: bottleneck 48), only the fusion training."""
    adapters.init(host)
    names = [f"member{i}" for i in range(members)]
    for name in names:
        host.add_adapter(name, config="seq_bn")
    host.add_adapter_fusion(Fuse(*names))
    host.train_adapter_fusion(Fuse(*names))


CASES: dict[str, Builder] = bare_cases()
for config in ("seq_bn", "double_seq_bn", "par_bn", "compacter", "compacter++", "lora"):
    CASES |= phases(config, partial(single, config=config))
for members in range(1, 65):  # fusion:16:forward, fusion:16:step
    CASES |= phases(f"fusion:{members}", partial(fusion, members=members))

if __name__ == "__main__":
    logging.getLogger("adapters").setLevel(logging.ERROR)  # it warns of its own dummy forward when an adapter is added
    serve(CASES)
