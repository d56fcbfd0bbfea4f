"""A fusion run without the members that it does not listen to, as a run of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from inlay.checkpoints.ours import save
from inlay.compose.prune import prune
from inlay.errors import SetupError
from inlay.host.verbs import activate, inlays_of, remove
from inlay.runs.folder import Run
from inlay.runs.report import write_report
from inlay.runs.use import Opened, open_for_use
from inlay.training.codec import EncodedSplit
from inlay.training.evaluate import ask, attention_on

TIMED = 256
"""Rows that are timed."""


def write_pruned(path: Path, out: Path, keep: int | None, threshold: float | None) -> dict[str, Any]:
    """Prune by the attention on validation rows; scores before and after are of the rows that the run was judged by."""
    opened = open_for_use(path)
    if opened.run is None or opened.name is None or opened.run.record()["mode"] != "fusion":
        raise SetupError(f"{path} is not a fusion's run; only a fusion can be pruned.")
    old, run, name = opened.run, Run(out), opened.name
    chosen = opened.codec.encode(opened.rows("validation", None)[1])
    judged = opened.codec.encode(opened.rows(old.record()["judged"], None)[1])
    smaller = f"{name[:57]}-pruned"
    with run.locked(fresh=True):
        before = opened.codec.measure(judged, ask(opened.host, opened.codec, judged))
        slow = _seconds(opened, judged)
        prune(opened.host, name, attention_on(opened.host, name, chosen), name=smaller, keep=keep, threshold=threshold)
        kept = inlays_of(opened.host)[smaller].method.needs
        activate(opened.host, smaller)
        remove(opened.host, name)
        answers = ask(opened.host, opened.codec, judged)
        faster = slow / _seconds(opened, judged)
        after = opened.codec.measure(judged, answers)
        for member in kept:
            run.keep_member(old.members / member, member)
        save(opened.host, smaller, run.inlay, task=opened.codec.task.name, metrics=after)
        run.write_config(
            old.config() | {"members": [str((run.members / member).absolute()) for member in kept], "name": smaller}
        )
        validation = opened.codec.measure(chosen, ask(opened.host, opened.codec, chosen))
        changed = {"name": smaller, "scores": after, "validation": validation, "status": "running"}
        run.note(**old.record() | changed | {"pruned_from": str(old.folder.absolute()), "faster": round(faster, 3)})
        write_report(run, opened.host, opened.codec.task, judged, answers)
        run.note(status="finished")
    gone = [member.name for member in sorted(old.members.iterdir()) if member.name not in kept]
    facts = {"name": smaller, "before": before, "after": after, "faster": faster}
    return facts | {"kept": list(kept), "gone": gone, "run": str(out)}


def _seconds(opened: Opened, judged: EncodedSplit) -> float:
    """Seconds for the first of the rows: the least of three times, when all has run once already."""
    few, taken = opened.codec.encode(judged.examples[:TIMED]), []
    for _ in range(3):
        began = time.perf_counter()
        ask(opened.host, opened.codec, few)
        taken.append(time.perf_counter() - began)
    return min(taken)
