"""What joint training costs: a step of MT-A with eight tasks, what a further task takes, and inlays side by side.

    python benchmarks/multitask.py

Steps have an optimizer here, AdamW, because a task's share of it is part of the question. `mt-a:8` trains the host and
eight inlays, one task per step in turn; `full+1:step` is a step of full fine-tuning with one inlay. Targets: at most
1.05 of it in time; and in memory a further task costs its inlay, its head and their two moments, and nothing else.

Inlays side by side share one frozen host: `side by side:32` learns eight inlays from one batch of 32 rows, four of
each. `one by one:32` has a batch of 32 rows of one task, `one by one:4` eight batches of 4 rows, one of each task.
All three read 32 rows, so that a ratio of runs is one of rows. Targets: no slower than batches of 32, faster than
batches of 4. The host's weights, which all cases share, do not move: their learning rate is 0.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from harness import Bench, Builder, Run, Sizes, batch, bert

import inlay
from inlay.host.verbs import activator, inlays_of

METHOD = inlay.Pfeiffer(reduction=16)
ROWS = 32
TASKS = 8


def filled(sizes: Sizes, tasks: int) -> tuple[Any, list[str]]:
    """A host with so many tasks' inlays, each with the head that training gives it."""
    torch.manual_seed(0)
    host = bert(sizes)
    names = [f"task{n}" for n in range(tasks)]
    for name in names:
        inlay.add(host, name, METHOD, head=inlay.Head(labels=2, pooling="mean"))
    return host, names


def joint(tasks: int) -> Builder:
    """A step of one task, the host and its inlay; the next step is the next task's."""

    def build(sizes: Sizes) -> Run:
        host, names = filled(sizes, tasks)
        inlay.train(host, names[0], host_too=True)
        inlays_of(host).all.requires_grad_(True)
        enter = {name: activator(host, name) for name in names}
        optimizer = _adamw(host)
        inputs, turn = batch(host, sizes), cycle(names)
        host.train()

        def run() -> None:
            enter[next(turn)]()
            host(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in names:  # every task has had a step, and so has its moments
            run()
        return run

    return build


def _adamw(host: Any) -> torch.optim.AdamW:
    """All that trains; what the cases share stays where it is."""
    shared = [p for name, p in host.named_parameters() if p.requires_grad and not name.startswith("inlays.")]
    ours = [p for name, p in host.named_parameters() if p.requires_grad and name.startswith("inlays.")]
    groups: list[dict[str, Any]] = [{"params": ours}]
    groups += [{"params": shared, "lr": 0.0, "weight_decay": 0.0}] if shared else []
    return torch.optim.AdamW(groups, lr=1e-4, foreach=True)


def apart(mixed: bool, rows: int) -> Builder:
    """32 rows of eight tasks on a frozen host: in one pass, or in batches of one task each."""

    def build(sizes: Sizes) -> Run:
        host, names = filled(sizes, TASKS)
        inlay.train(host, names[0])
        inlays_of(host).all.requires_grad_(True)
        each = ROWS // TASKS
        together = inlay.Rows(*(name for name in names for _ in range(each)))
        setups = [together] if mixed else names[: ROWS // rows]
        enter = [activator(host, setup) for setup in setups]
        optimizer = _adamw(host)
        inputs = batch(host, replace(sizes, batch=ROWS if mixed else rows))
        host.train()

        def run() -> None:
            for let in enter:
                let()
                host(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return run

    return build


def due_bytes(sizes: Sizes) -> int:
    """What a task has to cost: its weights, two moments of each, and a count of steps for each tensor."""
    host, names = filled(sizes, 1)
    tensors = list(inlays_of(host)[names[0]].parameters())
    return 3 * 4 * sum(t.numel() for t in tensors) + 4 * len(tensors)


def main() -> int:
    cases: dict[str, Builder] = {
        "full+1:step": joint(1), "mt-a:7": joint(TASKS - 1), "mt-a:8": joint(TASKS),
        "side by side:32": apart(True, ROWS), "one by one:32": apart(False, ROWS),
        "one by one:4": apart(False, ROWS // TASKS),
    }  # fmt: skip
    bench = Bench(__doc__, cases)
    bench.time("mt-a:8", base="full+1:step", target=1.05)
    bench.memory("mt-a:8", base="mt-a:7")
    bench.time("side by side:32", base="one by one:32", target=1.0)
    bench.time("side by side:32", base="one by one:4", target=1.0)
    rows = bench.measure()
    for row in rows:
        if row.what == "memory":
            found = bench.facts["peak_bytes"]
            extra, due = found[f"ours {row.case}"] - found[f"ours {row.base}"], due_bytes(bench.sizes)
            row.target = math.ceil(1e4 + 1e4 * due / found[f"ours {row.base}"]) / 1e4
            row.note = f"{extra:,} bytes more; weights, head and moments: {due:,}"
    code = bench.report(rows)
    print()
    for case in ("side by side:32", "one by one:32", "one by one:4"):
        print(f"{case:<16} {ROWS / min(bench.facts['seconds'][f'ours {case}']):8.1f} rows per CPU second")
    return code


if __name__ == "__main__":
    sys.exit(main())
