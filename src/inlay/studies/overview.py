"""A study at a glance: what would be run and what it would cost; what has been run and how it went."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from inlay.studies.cells import StudyFolder
from inlay.studies.costs import Costs
from inlay.studies.plan import Cell, Plan, View
from inlay.studies.tables import score_of
from inlay.studies.ways import Slot
from inlay.training.progress import clock
from inlay.training.threads import cores


def overview(plan: Plan, out: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Cells by way, in the order of their stages, with time and disk. With `out`, what is done there counts."""
    folder = StudyFolder(out if out is not None else Path("unnamed-study"))
    view = View(plan, folder).look()
    costs = Costs(view)
    lines, total_seconds, total_disk, cells = [], 0.0, 0.0, 0
    for way in _by_stage(plan):
        slots = [slot for slot in plan.drafts if slot.way == way]
        left = {slot: _candidates(view, slot) for slot in slots}
        count = sum(len(made) for made in left.values())
        done = sum(slot in view.filled for slot in slots)
        seconds = sum(costs.seconds_of(draft) for made in left.values() for draft in made)
        disk = sum(costs.disk(draft) for made in left.values() for draft in made)
        total_seconds, total_disk, cells = total_seconds + seconds, total_disk + disk, cells + count
        of = plan.study.ways[way]
        lines.append(
            {
                "way": way, "kind": of.kind, "after": ", ".join(dict.fromkeys(of.needs())) or "", "slots": len(slots),
                "filled": done, "cells_left": count, "seconds": round(seconds), "megabytes": round(disk, 1),
            }
        )  # fmt: skip
    facts = {
        "study": plan.study.name, "ways": lines, "cells_left": cells, "seconds": round(total_seconds),
        "megabytes": round(total_disk), "measured": bool(costs.known),
    }  # fmt: skip
    return _in_words(plan, lines, facts), facts


def _in_words(plan: Plan, lines: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    rows = [
        (line["way"], line["kind"], line["after"], str(line["slots"]), str(line["filled"]), str(line["cells_left"]),
         clock(line["seconds"]), f"{line['megabytes']:,.0f}")
        for line in lines
    ]  # fmt: skip
    names = ("way", "kind", "after", "slots", "filled", "cells left", "time", "MB")
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (names, *rows)
    ]
    how = "measured on the cells that are done" if facts["measured"] else "a rough guess: nothing has run yet"
    at_once = clock(facts["seconds"] / cores())
    study = plan.study
    search = {
        "each": "each seed chooses for itself",
        "first": "the first seed chooses",
        "mean": "the mean of all seeds chooses",
    }
    text += [
        "",
        f"{facts['cells_left']} cells, {clock(facts['seconds'])} of one core, {at_once} on {cores()} ({how}); "
        f"about {facts['megabytes']:,} MB stay.",
        f"Ways are run in this order, each after what it needs; grids are chosen from on validation rows "
        f"({search[study.search]}).",
    ]
    return "\n".join(text)


def _by_stage(plan: Plan) -> list[str]:
    """Ways in the order that their needs allow."""
    return list(dict.fromkeys(slot.way for slot in plan.drafts))


def _candidates(view: View, slot: Slot) -> list[Any]:
    """What is still to be run for a slot."""
    if slot in view.filled or slot in view.failed:
        return []
    if slot in view.cells:
        return [cell.draft for cell in view.cells[slot] if cell.name not in view.results]
    made = view.plan.drafts[slot]
    return (
        made[:1] if view.plan.study.search == "first" and slot.seed != view.plan.study.seeds_of(slot.way)[0] else made
    )


def states(view: View, failed: bool = False) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Every cell: its slot, what the grid says there, how it is; and how many are how."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    counted: Counter[str] = Counter()
    for slot, made in view.plan.drafts.items():
        cells = view.cells.get(slot)
        if cells is None:
            state = "failed" if slot in view.failed else "waiting"
            counted[state] += len(made)
            if not failed:
                rows.append(_row(slot, {}, state))
            continue
        for cell in cells:
            state = _state(view, cell)
            if cell.name not in seen:
                counted[state] += 1
            seen.add(cell.name)
            if failed and not view.gave_up(cell.name):
                continue
            rows.append(_row(slot, dict(cell.draft.point), state, cell, view))
    return rows, dict(counted)


def _state(view: View, cell: Cell) -> str:
    if cell.name in view.results:
        return "done" if len(view.cells[cell.slot]) == 1 or view.filled.get(cell.slot) != cell else "chosen"
    if view.gave_up(cell.name):
        return "failed"
    if view.folder.is_running(cell.name):
        return "running"
    if cell.name in view.failures:
        return f"failed {view.failures[cell.name].tries}×"
    return "begun" if view.folder.cell(cell.name).exists() else "ready"


def _row(
    slot: Slot, point: dict[str, Any], state: str, cell: Cell | None = None, view: View | None = None
) -> dict[str, Any]:
    result = view.results.get(cell.name) if view is not None and cell is not None else None
    failure = view.failures.get(cell.name) if view is not None and cell is not None else None
    score = score_of(result, view.plan.study.score)[1] if result is not None and view is not None else None
    return {
        "slot": str(slot),
        "chosen from": ", ".join(f"{key} {value}" for key, value in point.items()),
        "state": state,
        "validation": _percent(result["selected"]) if result is not None else "",
        "score": _percent(score) if result is not None else "",
        "seconds": f"{result['seconds']:.1f}" if result is not None else "",
        "cell": cell.name if cell is not None else "",
        "error": failure.error if failure is not None else "",
    }


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.2f}"
