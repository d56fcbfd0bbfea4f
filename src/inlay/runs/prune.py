"""A fusion run without the members that it does not listen to, as a run of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.compose.prune import prune
from inlay.errors import ConfigError, SetupError
from inlay.host.verbs import activate, inlays_of, remove
from inlay.runs.allowed import Allowed
from inlay.runs.facts import manifest_data
from inlay.runs.folder import Run
from inlay.runs.report import write_report
from inlay.runs.use import Opened, open_for_use
from inlay.storage.folders import replacing
from inlay.training.codec import EncodedSplit
from inlay.training.evaluate import ask, attention_on

TIMED = 256
"""Rows that are timed."""


def write_pruned(
    path: Path,
    out: Path,
    keep: int | None,
    threshold: float | None,
    host_name: str | None = None,
    allowed: Allowed = Allowed(),  # noqa: B008 (it is frozen)
) -> dict[str, Any]:
    """Prune by the attention on validation rows, or on training rows where there are none.

    Scores before and after are of the rows that the run was judged by.
    The new run is made beside `out` and gets its name when it is complete.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty. Choose another folder.")
    opened = open_for_use(path, host_name, allowed)
    if opened.run is None or opened.name is None or opened.run.record()["mode"] != "fusion":
        raise SetupError(f"{path} is not a fusion's run; only a fusion can be pruned.")
    old, name = opened.run, opened.name
    split, chosen = opened.listening_rows()
    judged = opened.codec.encode(opened.rows(old.record()["judged"], None)[1])
    smaller = f"{name[:57]}-pruned"
    with replacing(out, ()) as draft:
        before = opened.codec.measure(judged, ask(opened.host, opened.codec, judged))
        slow = _seconds(opened, judged)
        prune(opened.host, name, attention_on(opened.host, name, chosen), name=smaller, keep=keep, threshold=threshold)
        kept = inlays_of(opened.host)[smaller].method.needs
        activate(opened.host, smaller)
        remove(opened.host, name)
        answers = ask(opened.host, opened.codec, judged)
        faster = slow / _seconds(opened, judged)
        after = opened.codec.measure(judged, answers)
        validation = (
            opened.codec.measure(chosen, ask(opened.host, opened.codec, chosen)) if split == "validation" else {}
        )
        scores = {"name": smaller, "scores": after, "validation": validation, "status": "finished"}
        _write_run(Run(draft), out, opened, scores, round(faster, 3))
        write_report(Run(draft), opened.host, opened.codec.task, judged, answers)
    gone = [member.name for member in old.member_folders() if member.name not in kept]
    facts = {"name": smaller, "before": before, "after": after, "faster": faster}
    return facts | {"kept": list(kept), "gone": gone, "run": str(out)}


def _write_run(run: Run, out: Path, opened: Opened, scores: dict[str, Any], faster: float) -> None:
    """The pruned fusion, its members, settings and record; `out` is where the run's folder will be."""
    old, smaller = opened.run, scores["name"]
    assert old is not None
    kept = inlays_of(opened.host)[smaller].method.needs
    for member in kept:
        run.keep_member(old.members / member, member)
    data = manifest_data(opened.codec)
    save(opened.host, smaller, run.inlay, task=opened.codec.task.name, metrics=scores["scores"], data=data)
    members = [str(Run(out).members.absolute() / member) for member in kept]
    settings = old.config() | {"members": members, "name": smaller}
    run.write_config(settings)
    changed = {"settings": settings, "inlay_sha256": read_manifest(run.inlay).sha256, "faster": faster}
    run.note(**old.record() | scores | changed | {"pruned_from": str(old.folder.absolute())})


def _seconds(opened: Opened, judged: EncodedSplit) -> float:
    """Seconds for the first of the rows: the least of three times, when all has run once already."""
    few, taken = opened.codec.encode(judged.examples[:TIMED]), []
    for _ in range(3):
        began = time.perf_counter()
        ask(opened.host, opened.codec, few)
        taken.append(time.perf_counter() - began)
    return min(taken)
