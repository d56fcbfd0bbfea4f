"""The demo: real host, real rows, four ways to learn a task from few labels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inlay.demo.show import as_text, attention, summary, write_page
from inlay.demo.stages import Chain, LearnSource, TryMode
from inlay.demo.studies import Inference, Study, Tweets
from inlay.demo.wheels import host_folder, rows_folder
from inlay.demo.workers import run_all


def run_demo(
    out: Path, say: Callable[[str], None], *, data_dir: Path | None = None, seeds: int = 3, processes: int | None = None
) -> dict[str, Any]:
    """Train an inlay per source, then compare on the targets; writes and returns the results."""
    began = time.monotonic()
    say("host: all-MiniLM-L6-v2, from the package index")
    host = str(host_folder())
    study: Study
    if data_dir is None:
        study = Tweets(host=host, folder=rows_folder())
    else:
        study = Inference(host=host, folder=data_dir.absolute())
    count = (
        processes or len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else processes or os.cpu_count() or 1
    )
    say(f"1. an inlay for each source task: {_listed(study.sources)}")
    inlays = out / "inlays"
    results = run_all([LearnSource(study, name, inlays) for name in study.sources], count)
    for result in results:
        say(f"   {result['source']:<12} validation accuracy {100 * result['accuracy']:.1f}")
    say(f"2. each target from few rows, four ways, {seeds} seeds: {_listed(study.targets)}")
    results += run_all(_comparison(study, inlays, seeds), count)
    seconds = time.monotonic() - began
    report = write_page(out, study, results, seconds)
    say("\n" + as_text(summary(results, list(study.targets))))
    for target in study.targets:
        shares = sorted(attention(results, target).overall().items(), key=lambda item: -item[1])
        say(f"\nthe {target} fusion listens to: " + ", ".join(f"{name} {share:.2f}" for name, share in shares))
    say(f"\nreport: {report}   ({seconds:.0f} s)")
    return {"report": str(report), "seconds": seconds, "table": summary(results, list(study.targets))}


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count:,} rows)" for name, count in rows.items())


def _comparison(study: Study, inlays: Path, seeds: int) -> list[Chain]:
    """The long pieces first, so that no core waits at the end."""
    chains = []
    for modes in (("single", "fused"), ("full",), ("head",)):
        for target in study.targets:
            for seed in range(seeds):
                chains.append(Chain(tuple(TryMode(study, target, mode, seed, inlays) for mode in modes)))
    return chains
