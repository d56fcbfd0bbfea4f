"""What AdaMix costs: a training step with the consistency loss, and an evaluation before merging.

    python benchmarks/mixture.py

One step needs two stochastic passes. `mixture:step` runs them as the halves of one doubled batch, `two passes:step` one
after the other. Targets: at most 2.05 of the base method's step at the same batch, not slower than two passes; and in
evaluation a mixture of four costs what one module costs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import Bench, Builder, Run, Sizes, bare_cases, batch, bert, phases

import inlay
from inlay.compose.consistency import distance

BASE = inlay.Houlsby(size=48, sites=("ffn",), activation="gelu")


def plain(host: Any) -> None:
    inlay.add(host, "task", BASE)
    inlay.train(host, "task")


def mixture(host: Any) -> None:
    inlay.add(host, "task", inlay.Mixture(BASE, modules=4))
    inlay.train(host, "task")


def consistency(sizes: Sizes, together: bool) -> Run:
    torch.manual_seed(0)
    host = bert(sizes)
    mixture(host)
    host.classifier.requires_grad_(True)
    inputs = batch(host, sizes)

    def run() -> None:
        if together:
            loss = inlay.mixture_loss(host, inputs).loss
        else:
            first = host(**inputs)
            second = host(**{k: v for k, v in inputs.items() if k != "labels"}).logits
            loss = first.loss + distance(first.logits, second, inputs["labels"])
        loss.backward()
        host.zero_grad(set_to_none=True)

    return run


def main() -> int:
    cases: dict[str, Builder] = {**bare_cases(), **phases("plain", plain), **phases("mixture", mixture)}
    cases |= {"mixture:step": lambda s: consistency(s, True), "two passes:step": lambda s: consistency(s, False)}
    bench = Bench(__doc__, cases)
    bench.time("mixture:step", base="plain:step", target=2.05)
    bench.time("mixture:step", base="two passes:step", target=1.0)
    bench.time("mixture:forward", base="plain:forward", target=1.02)
    bench.memory("mixture:step", base="plain:step")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
