"""The papers' figures from a study's cells, as SVG.

differences   how far each way is from the reference, task by task (AdapterFusion, figure 3)
attention     what fusions listen to: targets × members, in the mean and in each layer (AdapterFusion, figures 4 and 6)
parameters    the mean score over the share of trained parameters (Compacter, figure 1)
rows          scores over the number of training rows (Compacter's low-resource figure)
convergence   the validation score over the steps (AdaMix, figure 7)
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inlay.errors import ConfigError
from inlay.report.plots import as_svg, fusions_svg, new_figure
from inlay.studies.plan import View
from inlay.studies.tables import Asked, Line, Table, chosen, difference, tables

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

COLOURS = ("#1f6f8b", "#d1495b", "#66a182", "#edae49", "#2e4057", "#8d6a9f", "#5aa9e6", "#b56576", "#6b705c", "#999999")
MARKS = "os^Dv<>ph*"
LONGEST = 28
"""Letters of a legend's line."""
CLOSE = 0.1
"""The share of an axis that the name of a tick takes."""


def differences(view: View, asked: Asked) -> dict[str, Markup]:
    """One picture for each table that has a reference."""
    made = {}
    for table in tables(view, asked):
        reference = next((line for line in table.lines if line.way == table.reference), None)
        if reference is None:
            continue
        found = [
            (line.title, {t: d for t in table.tasks if (d := _difference(line, reference, t)) is not None})
            for line in table.lines if line.way != table.reference
        ]  # fmt: skip
        lines = [(title, points) for title, points in found if points]
        tasks = [task for task in table.tasks if any(task in points for _, points in lines)]
        if not lines:
            continue
        figure, axes = new_figure(max(5.0, 1.2 + 0.22 * len(tasks) * (len(lines) + 1)), 3.2, "constrained")
        width = 0.8 / len(lines)
        for i, (title, points) in enumerate(lines):
            at = [t - 0.4 + width * (i + 0.5) for t, task in enumerate(tasks) if task in points]
            colour, _ = _style(view, title)
            axes.bar(at, list(points.values()), width, label=title, color=colour)
        axes.axhline(0, color="#333", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", parse_math=False)
        axes.set_ylabel(f"points over {reference.title}", parse_math=False)
        _legend(axes, len(lines))
        made[table.title] = as_svg(figure)
    return made


def _difference(line: Line, reference: Line, task: str) -> float | None:
    one, other = line.entries.get(task), reference.entries.get(task)
    return None if one is None or other is None else difference(one, other)


def attention(view: View, asked: Asked) -> dict[str, Markup]:
    """For each fusion, host and number of rows: targets × members, the mean over seeds."""
    import torch

    from inlay.compose.activations import FusionActivations

    seen: dict[tuple[str, str, int | None], dict[str, list[dict[str, Any]]]] = {}
    for slot in chosen(view, asked):
        found = view.results[view.filled[slot].name].get("attention") if slot in view.filled else None
        if found is not None:
            seen.setdefault((slot.host, slot.way, slot.rows), {}).setdefault(slot.task, []).append(found)
    made = {}
    for (host, way, rows), targets in seen.items():
        activations = {}
        for task, ones in targets.items():
            mean = {
                place: torch.tensor([one["places"][place] for one in ones], dtype=torch.float64).mean(0)
                for place in ones[0]["places"]
            }
            own = re.compile(rf"{re.escape(task)}(-\d+)?")  # members of one name are told apart by a number
            names = tuple("own" if own.fullmatch(name) else name for name in ones[0]["members"])
            activations[task] = FusionActivations(task, names, mean, dict.fromkeys(mean, 0))
        title = f"{way}, {host}, {rows or 'all'} training rows"
        made[title] = fusions_svg(activations)
        made[f"{title}, layer by layer"] = fusions_svg(activations, "all")
    return made


def parameters(view: View, asked: Asked) -> dict[str, Markup]:
    """The table's average over the share of trained parameters, which is drawn by its logarithm."""
    made = {}
    for table in tables(view, asked):
        found = [(line, score) for line in table.lines if (score := _overall(table, line)) is not None and line.trained]
        if len(found) < 2:
            continue
        figure, axes = new_figure(6, 3.6, "constrained")
        for line, score in found:
            colour, mark = _style(view, line.title)
            axes.scatter([line.trained or 0], [score], s=50, label=line.title, color=colour, marker=mark)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_plain)
        axes.xaxis.set_minor_formatter(_plain if _within_ten([line.trained or 1 for line, _ in found]) else "")
        axes.set_xlabel("parameters that are trained, % of the host's")
        axes.set_ylabel("score" if len(table.tasks) == 1 else "average score")
        _legend(axes, len(found))
        made[table.title] = as_svg(figure)
    return made


def _overall(table: Table, line: Line) -> float | None:
    if table.averages:
        return line.averages[table.averages[0]]
    entry = line.entries.get(table.tasks[0])
    return entry.spread.mean if entry is not None and entry.spread is not None else None


def rows(view: View, asked: Asked) -> dict[str, Markup]:
    """One picture for each host and task that has several numbers of rows; all rows stand at the right end."""
    found = tables(view, asked)
    made = {}
    for host in dict.fromkeys(table.host for table in found):
        mine = [table for table in found if table.host == host]
        for task in dict.fromkeys(task for table in mine for task in table.tasks):
            curves = _curves(view, mine, task)
            if max((len(points) for points in curves.values()), default=0) < 2:
                continue
            figure, axes = new_figure(6, 3.4, "constrained")
            for title, points in curves.items():
                x, y, spread = zip(*points, strict=True)
                colour, mark = _style(view, title)
                axes.errorbar(x, y, yerr=spread, label=title, color=colour, marker=mark, capsize=2, linewidth=1.2)
            axes.set_xscale("log")
            counts = sorted({point[0] for points in curves.values() for point in points})
            axes.set_xticks(counts, _apart(counts))
            axes.minorticks_off()
            axes.set_xlabel("training rows")
            axes.set_ylabel(f"{task}, {mine[0].metrics.get(task, '')}", parse_math=False)
            _legend(axes, len(curves))
            made[f"{task}, {host}"] = as_svg(figure)
    return made


def _apart(counts: Sequence[float]) -> list[str]:
    """The numbers as names of ticks on a logarithmic axis; one that would stand in the next one's has none."""
    whole, after, names = math.log(counts[-1] / counts[0]), math.inf, list[str]()
    for count in reversed(counts):
        far = math.log(after / count) >= CLOSE * whole
        names.insert(0, f"{int(count):,}" if far else "")
        after = count if far else after
    return names


def _curves(view: View, found: Sequence[Table], task: str) -> dict[str, list[tuple[float, float, float]]]:
    """Way → (rows, mean, sd)."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for table in found:
        for line in table.lines:
            entry = line.entries.get(task)
            if entry is None or entry.spread is None:
                continue
            counted = [view.results[name]["rows"]["train"] for name in entry.cells.values()]
            curves.setdefault(line.title, []).append((float(counted[0]), entry.spread.mean, entry.spread.sd or 0.0))
    return curves


def convergence(view: View, asked: Asked) -> dict[str, Markup]:
    """The chosen cells' validation score at each evaluation, the first seed's."""
    made = {}
    for table in tables(view, asked):
        for task in table.tasks:
            drawn = []
            for line in table.lines:
                entry = line.entries.get(task)
                name = next(iter(entry.cells.values()), None) if entry is not None else None
                history = view.results[name].get("history") if name is not None else None
                points = [p for p in history or () if p[2] is not None]
                if name is not None and len(points) > 1:
                    drawn.append((line.title, points, next(iter(view.results[name]["validation"]))))
            if not drawn:
                continue
            figure, axes = new_figure(6, 3.2, "constrained")
            for title, points, _ in drawn:
                colour, mark = _style(view, title)
                axes.plot(
                    [p[0] for p in points], [100 * p[2] for p in points], label=title, color=colour,
                    marker=mark, markersize=3, linewidth=1.2,
                )  # fmt: skip
            axes.set_xlabel("step")
            axes.set_ylabel(f"validation {drawn[0][2]}", parse_math=False)  # whatever the tables show
            _legend(axes, len(drawn))
            made[f"{task}, {table.title}"] = as_svg(figure)
    return made


def _style(view: View, title: str) -> tuple[str, str]:
    """A way's colour and mark, the same in all pictures of a study."""
    titles = [way.title or name for name, way in view.plan.study.ways.items() if way.show]
    at = titles.index(title) if title in titles else 0
    return COLOURS[at % len(COLOURS)], MARKS[(at + at // len(COLOURS)) % len(MARKS)]


def _plain(value: float, _: object) -> str:
    """0.05 and 20, not powers of ten."""
    return f"{value:.3g}"


def _within_ten(values: Sequence[float]) -> bool:
    """Whether there may be less than two powers of ten between them, so that those between have to be named."""
    return max(values) < 30 * min(values)


def _legend(axes: Axes, count: int) -> None:
    """Beside the picture, where it hides nothing; long titles are broken, or there would be no room for the picture."""
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, ncols=1 + count // 14)
    for text in legend.get_texts():
        text.set_parse_math(False)
        text.set_text(textwrap.fill(text.get_text(), LONGEST))


FIGURES: dict[str, Callable[[View, Asked], dict[str, Any]]] = {
    "differences": differences,
    "attention": attention,
    "parameters": parameters,
    "rows": rows,
    "convergence": convergence,
}


def draw(view: View, name: str, asked: Asked) -> dict[str, Any]:
    """A figure's pictures by their titles; what a study has nothing for is refused."""
    made = FIGURES[name](view, asked)
    if not made:
        needs = {
            "differences": "a way to compare with (--against) and others that are done",
            "attention": "a fusion that is done",
            "parameters": "two ways whose tasks are all done",
            "rows": "ways with several numbers of training rows",
            "convergence": "cells with several evaluations",
        }
        raise ConfigError(f"there is nothing to draw: {name} needs {needs[name]}.")
    return made
