"""What changed between two versions of a study, and which cells stay valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay.studies.cells import STUDY, StudyFolder
from inlay.studies.plan import Plan, View
from inlay.studies.ways import Slot


def changes(before: Plan, after: Plan, folder: StudyFolder | None) -> dict[str, Any]:
    """Parts of the file that differ; slots that came and went; cells that are kept, not needed any more, and new."""
    then, now = before.study.model_dump(mode="json"), after.study.model_dump(mode="json")
    parts = []
    for name in now:
        if isinstance(now[name], dict):
            for key in dict.fromkeys([*then[name], *now[name]]):
                parts += _change(f"{name}.{key}", then[name].get(key), now[name].get(key))
        else:
            parts += _change(name, then[name], now[name])
    for what, one, other in (("host", before.hosts, after.hosts), ("rows of task", before.rows, after.rows)):
        parts += [f"{what} {name}: other content" for name in one if name in other and one[name] != other[name]]
    where = folder or StudyFolder(Path("unnamed-study"))
    old, new = View(before, where).look(), View(after, where).look()
    names, kept = old.names(), set(old.names()) & set(new.names())
    return {
        "changed": parts,
        "slots_gone": _told(set(before.drafts) - set(after.drafts)),
        "slots_new": _told(set(after.drafts) - set(before.drafts)),
        "cells_valid": len(kept),
        "cells_done_and_valid": sum(name in old.results for name in kept),
        "cells_done_and_not_used": sorted(name for name in names if name in old.results and name not in new.names()),
        "cells_new": len(set(new.names()) - kept) + new.waiting(),
    }


def _change(name: str, one: Any, other: Any) -> list[str]:
    return [] if one == other else [f"{name}: {_short(one)} → {_short(other)}"]


def _short(value: Any) -> str:
    if isinstance(value, dict):  # only what is said
        value = {key: inner for key, inner in value.items() if inner not in (None, {}, [], "")}
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 160 else f"{text[:160]}…"


def _told(slots: set[Slot]) -> list[str]:
    return [str(slot) for slot in sorted(slots, key=str)]


def is_study_folder(path: Path) -> bool:
    return (path / STUDY).is_file()
