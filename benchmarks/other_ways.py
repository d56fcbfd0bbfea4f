"""What prompts, prefixes, IA3 and SAID cost on a BERT-base-sized host, beside peft's.

    python benchmarks/other_ways.py
    python benchmarks/other_ways.py --peer-python PEER/bin/python     an environment with peft 0.21.2

A prompt of P tokens makes every layer run on P + T tokens, in both libraries; a prefix only makes attention wider.
SAID is compared with a step of full fine-tuning, which the Compacter paper's code takes 3.4 times as long as. What it
adds depends on the number of weights and not on the batch, so it is timed with a small batch and with a usual one
(`large`: 32 rows of 128 tokens; the paper's have 100 rows).

Targets: prompt and prefix no slower than peft's, forward and step; SAID's step at most twice the bare host's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Bench, Builder, Run, Sizes, bare_cases, phases

import inlay

WAYS = {
    "prompt": inlay.Prompt(length=20),
    "prefix": inlay.Prefix(length=20),
    "ia3": inlay.IA3(),
    "said": inlay.SAID(d=1400),
}


def way(name: str) -> Any:
    def set_up(host: Any) -> None:
        inlay.add(host, "task", WAYS[name])
        inlay.train(host, "task")

    return set_up


def large(build: Builder, sizes: Sizes) -> Run:
    return build(replace(sizes, batch=32, tokens=128))


def main() -> int:
    cases = bare_cases()
    for name in WAYS:
        cases |= phases(name, way(name))
    for name in ("bare", "said"):
        cases[f"{name} large:step"] = partial(large, cases[f"{name}:step"])
    harness.WORKER = Path(__file__).with_name("peft_worker.py")
    bench = Bench(__doc__, cases)
    for name in ("prompt", "prefix", "ia3"):
        bench.time(f"{name}:forward", base="bare:forward", peer=f"{name}:forward", target="peer")
        bench.time(f"{name}:step", base="frozen:step", peer=f"{name}:step", target="peer")
    bench.time("said large:step", base="bare large:step", target=2.0)
    bench.time("said:step", base="bare:step")
    bench.time("said:forward", base="bare:forward")
    bench.memory("prefix:step", base="frozen:step", peer="prefix:step")
    bench.memory("said:step", base="bare:step")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
