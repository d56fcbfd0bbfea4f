"""The demo: real host, real rows, four ways to learn a task from few labels."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inlay.demo.show import as_text, attention, summary, write_page
from inlay.demo.stages import LearnSource, Pipeline, TryMode
from inlay.demo.studies import Inference, Study, Tweets
from inlay.demo.wheels import host_folder, rows_folder
from inlay.demo.workers import Workers
from inlay.training.threads import cores


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
    inlays = out / "inlays"
    with Workers(processes or cores()) as workers:
        say(f"1. an inlay for each source task: {_listed(study.sources)}")
        results = workers.run([LearnSource(study, name, inlays) for name in study.sources])
        for result in results:
            say(f"   {result['source']:<12} validation accuracy {100 * result['accuracy']:.1f}")
        say(f"2. each target from few rows, four ways, {seeds} seeds: {_listed(study.targets)}")
        results += workers.run(_comparison(study, inlays, seeds))
    seconds = time.monotonic() - began
    table = summary(results, list(study.targets))
    report = write_page(out, study, results, seconds)
    say("\n" + as_text(table))
    for target in study.targets:
        shares = sorted(attention(results, target).overall().items(), key=lambda item: -item[1])
        say(f"\nthe {target} fusion listens to: " + ", ".join(f"{name} {share:.2f}" for name, share in shares))
    say(f"\nreport: {report}   ({seconds:.0f} s)")
    return {"report": str(report), "seconds": seconds, "table": table}


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count:,} rows)" for name, count in rows.items())


def _comparison(study: Study, inlays: Path, seeds: int) -> list[Pipeline]:
    """The long pieces first, so that no core waits at the end."""
    pipelines = []
    for modes in (("single", "fused"), ("full",), ("head",)):
        for target in study.targets:
            for seed in range(seeds):
                pipelines.append(Pipeline(tuple(TryMode(study, target, mode, seed, inlays) for mode in modes)))
    return pipelines
