"""The demo: real host, real rows, several ways to learn from few labels. It is a study, and its page is the study's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from inlay.demo.corpora import write_corpora
from inlay.demo.wheels import LAYERS, host_folder, lower_host_folder, rows_folder
from inlay.storage.cache import cache_folder
from inlay.studies.board import board
from inlay.studies.cells import StudyFolder
from inlay.studies.engines.processes import Processes
from inlay.studies.file import Study, read_study
from inlay.studies.formats import as_facts, as_text
from inlay.studies.page import write_page
from inlay.studies.plan import Plan, View
from inlay.studies.schedule import Schedule
from inlay.studies.tables import tables

FUSED = "fused"
"""The way of the demo's study that is to be shown."""
ENOUGH_SEEDS = 5
"""Fewer say little of a spread."""


def run_demo(
    out: Path, say: Callable[[str], None], *, data_dir: Path | None = None, seeds: int | None = None,
    setfit: bool = False, processes: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train an inlay per source, then compare ways on the targets; writes the study and its page, returns the table."""
    began = time.monotonic()
    which = f"the lower {LAYERS} layers of all-MiniLM-L6-v2" if data_dir is None else "all-MiniLM-L6-v2"
    say(f"host: {which}, from the package index")
    study = demo_study(data_dir, seeds, setfit)
    sources, targets = (", ".join(study.groups[name]) for name in ("sources", "targets"))
    say(f"an inlay for each of {sources}; then {targets} from {study.rows[0]} rows, {len(study.seeds)} seeds")
    plan, folder = Plan.of(study), StudyFolder(out)
    folder.claim(plan.facts())
    shown = board()
    try:
        view = Schedule(View(plan, folder), Processes(processes, log=out / "workers.log"), shown).run()
    finally:
        shown.close()
    found, report = tables(view), write_page(view)
    seconds = time.monotonic() - began
    say("\n" + as_text(found, view))
    say("\n" + "\n".join(conclusions(view)))
    if len(study.seeds) < ENOUGH_SEEDS:
        say(f"\nmore seeds: --seeds {ENOUGH_SEEDS}")
    say(f"\nreport: {report}   ({seconds:.0f} s)")
    return {"report": str(report), "seconds": seconds, "table": as_facts(found, view)}


def demo_study(data_dir: Path | None, seeds: int | None, setfit: bool = False) -> Study:
    """The file that ships, with the host and rows from the package index, or with a user's rows."""
    if data_dir is None:
        name, host, rows = "demo", lower_host_folder(), write_corpora(rows_folder(), cache_folder() / "demo" / "rows")
    else:
        name, host, rows = "demo-inference", host_folder(), data_dir.absolute()
    study = read_study(name, hosts={"minilm": str(host)}, data_dir=rows)
    ways = {key: way for key, way in study.ways.items() if setfit or way.kind != "setfit"}
    return study.model_copy(update={"ways": ways, "seeds": study.seeds if seeds is None else tuple(range(seeds))})


def conclusions(view: View) -> list[str]:
    """What stands below the table: what each fusion listens to, and whether it is the best."""
    lines = []
    for target, shares in listened(view).items():
        told = ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        lines.append(f"the {target} fusion listens to: {told}")
    return lines + verdicts(view)


def verdicts(view: View) -> list[str]:
    """For each target, whether the fusion is the best of all ways, by the standard error over seeds."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for slot, cell in view.filled.items():
        if view.plan.study.ways[slot.way].show:
            score = next(iter(view.results[cell.name]["scores"].values()))
            found[slot.task][slot.way][slot.seed] = 100 * score
    return [_verdict(view.plan.study, task, ways) for task, ways in found.items() if FUSED in ways and len(ways) > 1]


def _verdict(study: Study, task: str, ways: dict[str, dict[int, float]]) -> str:
    fused = ways[FUSED]
    other = max((way for way in ways if way != FUSED), key=lambda way: mean(ways[way].values()))
    gains = [fused[seed] - ways[other][seed] for seed in fused if seed in ways[other]]
    title = study.ways[other].title or other
    if not gains:
        return f"{task}: the fusion and {title} have no seed in common yet"
    if len(gains) < 2:
        return f"{task}: the fusion has {mean(gains):+.1f} points over {title}; one seed says nothing of the spread"
    error = stdev(gains) / len(gains) ** 0.5
    gain = f"{mean(gains):+.1f} points over {title}, the best of the others, ±{error:.1f} (standard error)"
    best = "is the best by more than two standard errors" if mean(gains) > 2 * error else "is not shown to be the best"
    few = "" if len(gains) >= ENOUGH_SEEDS else f"; {len(gains)} seeds are few"
    return f"{task}: the fusion has {gain}: it {best}{few}"


def listened(view: View) -> dict[str, dict[str, float]]:
    """Target → member → what its fusions listen to, the mean over layers and seeds."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for slot, cell in view.filled.items():
        attention = view.results[cell.name].get("attention") or {"members": [], "places": {}}
        for shares in attention["places"].values():
            for member, share in zip(attention["members"], shares, strict=True):
                seen[slot.task][member].append(share)
    return {task: {name: sum(each) / len(each) for name, each in of.items()} for task, of in seen.items()}
