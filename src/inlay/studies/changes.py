"""What changed between two versions of a study, and which cells stay valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay.studies.cells import STUDY, StudyFolder
from inlay.studies.file import Way
from inlay.studies.plan import Plan, View
from inlay.studies.ways import Slot

USUAL = {name: field.default for name, field in Way.model_fields.items()}
"""What a way is if nothing is said."""


def changes(before: Plan, after: Plan, folder: StudyFolder | None) -> dict[str, Any]:
    """Parts of the file that differ; slots that came and went; cells that are kept, not needed any more, and new."""
    parts = _changes("", before.study.model_dump(mode="json"), after.study.model_dump(mode="json"))
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


def _changes(name: str, one: Any, other: Any) -> list[str]:
    """What differs, as far inside as both have it."""
    if isinstance(one, dict) and isinstance(other, dict):
        inside = dict.fromkeys([*one, *other])
        return [line for key in inside for line in _changes(f"{name}.{key}", one.get(key), other.get(key))]
    return [] if one == other else [f"{name.removeprefix('.')}: {_short(one)} → {_short(other)}"]


def _short(value: Any) -> str:
    if isinstance(value, dict):  # only what is said
        value = {key: inner for key, inner in value.items() if inner not in (None, {}, [], "", USUAL.get(key))}
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 160 else f"{text[:160]}…"


def _told(slots: set[Slot]) -> list[str]:
    return [str(slot) for slot in sorted(slots, key=str)]


def is_study_folder(path: Path) -> bool:
    return (path / STUDY).is_file()
