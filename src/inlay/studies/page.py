"""report.html of a study: tables, figures, costs, what the grids chose, and every cell with its run's page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from inlay.report.pages import page
from inlay.storage.files import write_whole
from inlay.studies.efficiency import largest_batch
from inlay.studies.figures import FIGURES
from inlay.studies.formats import html_table
from inlay.studies.overview import states
from inlay.studies.plan import View
from inlay.studies.tables import Asked, Table, tables

HEADINGS = {
    "differences": "Difference to the reference, task by task",
    "attention": "What fusions listen to",
    "parameters": "Score over trained parameters",
    "rows": "Score over training rows",
    "convergence": "Validation score over steps",
}
MOST_PICTURES = 24
"""Of one kind on the page; `inlay study figure` draws all."""
COST_COLUMNS = (
    "way", "% trained", "seconds per epoch", "peak MB", "largest batch in 16 GB", "GFLOPs per row and step",
    "MB per task", "full copies : this",
)  # fmt: skip


def write_page(view: View, asked: Asked = Asked()) -> Path:  # noqa: B008 (frozen)
    """Write the page into the study's folder."""
    file = view.folder.folder / "report.html"
    write_whole(file, study_page(view, asked))
    return file


def study_page(view: View, asked: Asked = Asked()) -> str:  # noqa: B008 (frozen)
    """The page as it is now; what is missing is shown as missing."""
    found = tables(view, asked)
    rows, counted = states(view)
    study = view.plan.study
    pictures = {HEADINGS[name]: dict(list(draw(view, asked).items())[:MOST_PICTURES]) for name, draw in FIGURES.items()}
    return page(
        "study",
        title=study.name,
        about=study.about,
        counted=", ".join(f"{count} {state}" for state, count in counted.items()),
        tables=[Markup(html_table(table, lambda name: _page_of(view, name))) for table in found],  # noqa: S704 (escaped)
        pictures={heading: made for heading, made in pictures.items() if made},
        costs={table.title: costs(view, table) for table in found},
        cost_columns=COST_COLUMNS,
        chosen=_chosen(found),
        cells=[(row, _page_of(view, row["cell"])) for row in rows],
        failed=[(row["slot"], row["error"]) for row in states(view, failed=True)[0]],
        ways=[(name, way.kind, _words(way.settings), _words(way.grid)) for name, way in study.ways.items()],
        hosts=list(study.hosts.items()),
        search=study.search,
        versions=_versions(view),
    )


def costs(view: View, table: Table) -> list[tuple[Any, ...]]:
    """Compacter's efficiency protocol, a line for each way: the mean over its cells of one host and number of rows."""
    lines = []
    for line in table.lines:
        results = [view.results[name] for entry in line.entries.values() for name in entry.cells.values()]
        steps = [result["costs"] for result in results if result.get("costs")]
        batches = [batch for one in steps if (batch := largest_batch(one, 16.0)) is not None]
        stored = [result["stored_bytes"] for result in results if result.get("stored_bytes")]
        size = [4 * result["host_parameters"] for result in results if result.get("host_parameters")]
        lines.append(
            (
                line.title,
                line.trained,
                _mean([s for result in results if (s := _epoch(result)) is not None]),
                line.megabytes,
                min(batches) if batches else None,
                _mean([one["flops_per_row"] / 1e9 for one in steps]),
                _mean([one / 1024**2 for one in stored]),
                _mean([one / each for one, each in zip(size, stored, strict=False)]),
            )
        )
    return lines


def _epoch(result: dict[str, Any]) -> float | None:
    """Seconds of one pass over the training rows, evaluations included."""
    steps, seconds = result.get("steps"), result.get("seconds")
    if not steps or not seconds or result.get("resumed") or result["work"] == "part":
        return None
    batch = result.get("batch_size") or result["identity"]["settings"].get("batch_size", 32)
    return float(seconds) * math.ceil(result["rows"]["train"] / batch) / float(steps)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _chosen(found: Sequence[Table]) -> list[tuple[str, str, str, str]]:
    """What each seed's grid chose."""
    rows = []
    for table in found:
        for line in table.lines:
            for task, entry in line.entries.items():
                said = {seed: _words(point) for seed, point in entry.points.items() if point}
                if said:
                    same = len(set(said.values())) == 1
                    told = next(iter(said.values())) if same else "; ".join(f"seed {s}: {w}" for s, w in said.items())
                    rows.append((table.title, line.title, task, told))
    return rows


def _words(table: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items())


def _page_of(view: View, name: str) -> str | None:
    """Where a cell's own page is, from the study's."""
    there = name and (view.folder.cell(name) / "report.html").is_file()
    return f"cells/{name}/report.html" if there else None


def _versions(view: View) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for result in view.results.values():
        for package, version in (result.get("versions") or {}).items():
            found.setdefault(package, {})[version] = None
    return [(package, ", ".join(versions)) for package, versions in found.items()]
