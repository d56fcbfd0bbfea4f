"""Pictures: a run's curve and confusion matrix, and what a fusion listens to.

`curve`, `confusion` and `fusion_svg` give SVG markup to stand in a page that needs no network; `plot_fusion` writes
files. Matplotlib is imported when something is drawn, and never its pyplot: no window, no global state.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from inlay.compose.activations import FusionActivations
from inlay.errors import SetupError
from inlay.storage.plain_json import number

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = "Blues"
LONGEST_LABEL = 24


def curve(history: Sequence[Mapping[str, float | None]], main: str) -> Markup:
    """Training loss and the main metric over the steps; what is not there leaves a gap."""
    figure, axes = new_figure(6, 3)
    steps = [number(entry["step"]) for entry in history]
    axes.plot(steps, [number(entry.get("loss")) for entry in history], color="#999", marker=".", label="training loss")
    if any("validation_loss" in entry for entry in history):  # where it chose the best state
        judged = [number(entry.get("validation_loss")) for entry in history]
        axes.plot(steps, judged, color="#999", linestyle="--", marker=".", label="validation loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if any(f"validation_{main}" in entry for entry in history):  # there may be no validation rows
        other = axes.twinx()
        values = [number(entry.get(f"validation_{main}")) for entry in history]
        other.plot(steps, values, color="#1f6f8b", marker="o", label=f"validation {main}")
        other.set_ylabel(main)
    figure.legend(loc="upper center", ncols=3, frameon=False)
    return as_svg(figure)


def curves(history: Sequence[Mapping[str, float | None]], columns: Mapping[str, str], what: str) -> Markup:
    """One line per column of the history over the steps, each with its name; what is not there leaves a gap."""
    figure, axes = new_figure(6, 3.2)
    for column, name in columns.items():
        seen = [(number(e["step"]), number(e[column])) for e in history if e.get(column) is not None]
        axes.plot([step for step, _ in seen], [value for _, value in seen], marker=".", label=_cut(name))
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return as_svg(figure)


def confusion(labels: Sequence[str], targets: Sequence[int], predictions: Sequence[int]) -> Markup:
    """How often each label was taken for each other."""
    counts = torch.zeros(len(labels), len(labels))
    for target, prediction in zip(targets, predictions, strict=True):
        if 0 <= prediction < len(labels):
            counts[target, prediction] += 1
    size = max(3.0, 0.6 * len(labels) + 1.5)
    figure, axes = new_figure(size + 1, size)
    names = [_cut(label) for label in labels]
    _cells(axes, counts, names, names, lambda count: f"{count:.0f}")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return as_svg(figure)


def scatter(targets: Sequence[float], predictions: Sequence[float]) -> Markup:
    """Each row's target and what was predicted; on the line both are the same."""
    figure, axes = new_figure(4.5, 4)
    axes.scatter(targets, predictions, s=12, alpha=0.5, color="#1f6f8b")
    ends = [min(*targets, *predictions), max(*targets, *predictions)]
    axes.plot(ends, ends, color="#999", linewidth=1)
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    return as_svg(figure)


def fusion_svg(seen: FusionActivations) -> Markup:
    """Members × layers."""
    return as_svg(_fusion_figure(seen))


def fusions_svg(seen: Mapping[str, FusionActivations], layer: int | str | None = None) -> Markup:
    """Targets × members: in the mean over all layers, in one layer, or in each of them ('all')."""
    return as_svg(_fusion_figure(seen, layer))


def plot_fusion(
    activations: FusionActivations | Mapping[str, FusionActivations],
    path: str | os.PathLike[str],
    *,
    layer: int | str | None = None,
) -> tuple[Path, Path]:
    """Draw a heat map as <path>.png and <path>.svg: of one fusion, or of several by their target's name.

    layer: targets × members in one layer, as in 7 or 'decoder.7', or one heat map for each layer: 'all'. Without it a
           single fusion is drawn as members × layers, several as targets × members in the mean over all layers.
    """
    if isinstance(activations, FusionActivations) and layer is not None:
        activations = {activations.fusion: activations}
    figure, path = _fusion_figure(activations, layer), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in (png, svg):
        figure.savefig(file, dpi=150, bbox_inches="tight")  # tight: a title may be wider than a small table
    return png, svg


def _fusion_figure(
    activations: FusionActivations | Mapping[str, FusionActivations], layer: int | str | None = None
) -> Figure:
    if isinstance(activations, FusionActivations):
        columns = [_short(place) for place in activations.mean]
        values = torch.stack(list(activations.mean.values()), dim=1)  # (N, places)
        title = f"{activations.fusion}: mean attention per member and layer"
        return _heat_map(values, activations.members, columns, title)
    if not activations:
        raise SetupError("there is nothing to draw: give at least one fusion's activations.")
    layers = list(dict.fromkeys(_layer(place) for one in activations.values() for place in one.mean))
    if layer == "all":
        return _all_layers(activations, layers)
    if layer is None:
        return _heat_map(*targets_by_members(activations), "mean attention of each target to each member")
    if not any(str(layer) in (name, name.partition(".")[2]) for name in layers):
        raise SetupError(f"no fusion acts in layer {layer}. They act in {', '.join(layers)}; or use 'all'.")
    return _heat_map(*targets_by_members(activations, str(layer)), f"layer {layer}: mean attention of each target")


def targets_by_members(
    activations: Mapping[str, FusionActivations], layer: str | None = None
) -> tuple[Tensor, list[str], list[str]]:
    """Mean attention (targets, members), and their names; nan where a target has no such member or layer."""
    members: list[str] = []
    for one in activations.values():  # each before the one that follows it, so that a target's own stays the last
        at = len(members)
        for name in reversed(one.members):
            if name not in members:
                members.insert(at, name)
            at = members.index(name)
    shares = []
    for one in activations.values():
        own = [
            m for place, m in one.mean.items() if layer is None or layer in (n := _layer(place), n.partition(".")[2])
        ]
        mean = dict(zip(one.members, torch.stack(own).mean(0).tolist(), strict=True)) if own else {}
        shares.append([mean.get(member, float("nan")) for member in members])
    return torch.tensor(shares), list(activations), members


def _all_layers(activations: Mapping[str, FusionActivations], layers: Sequence[str]) -> Figure:
    """A heat map of targets × members for each layer, side by side."""
    from matplotlib.figure import Figure

    found = [targets_by_members(activations, layer) for layer in layers]
    (_, rows, columns), across = found[0], min(len(layers), 4)
    down = math.ceil(len(layers) / across)
    width, height = 1.2 + 0.45 * len(columns) + 0.09 * max(map(len, rows)), 1.6 + 0.33 * len(rows)
    figure = Figure(figsize=(across * width, down * height), layout="constrained")
    for n, (name, (values, *_)) in enumerate(zip(layers, found, strict=True), start=1):
        axes = figure.add_subplot(down, across, n)
        _cells(axes, values, rows, columns, _share, small=True)
        axes.set_title(f"layer {name}", fontsize=9)
    return figure


def _layer(place: str) -> str:
    """'encoder.3' of 'encoder.3.ffn'."""
    return ".".join(place.split(".")[:2])


def _share(share: float) -> str:
    return f"{share:.2f}".lstrip("0")


def _heat_map(values: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Figure:
    """Shares as a table of colours with the numbers in it."""
    figure, axes = new_figure(
        2.2 + 0.55 * len(columns) + 0.09 * max(map(len, rows)), 1.8 + 0.36 * len(rows), layout="constrained"
    )
    image = _cells(axes, values, rows, columns, _share, small=True)
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _cells(
    axes: Axes,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    write: Callable[[float], str],
    small: bool = False,
) -> AxesImage:
    """A coloured cell for each value, with the value in it; cells that are nan are left empty."""
    highest = float(values.nan_to_num().max())
    shape: Literal["auto"] | None = "auto" if small else None
    image = axes.imshow(values.numpy(), cmap=COLOURS, vmin=0, vmax=max(1e-9, highest), aspect=shape)
    names: dict[str, Any] = {"fontsize": 9 if small else None, "parse_math": False}
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor", **names)
    axes.set_yticks(range(len(rows)), rows, **names)
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            if value == value:
                colour = "white" if value > highest / 2 else "#333"
                axes.text(x, y, write(value), ha="center", va="center", color=colour, fontsize=7 if small else None)
    return image


def _cut(label: str) -> str:
    """A label that leaves room for the picture."""
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _short(place: str) -> str:
    """'encoder.3.ffn' as 'enc 3', with the branch where it is not the FFN."""
    stack, layer, *kind = place.removesuffix(".raw").split(".")
    name = f"{stack[:3]} {layer}"
    return name if kind[:1] == ["ffn"] else f"{name} {' '.join(kind)}"


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> tuple[Figure, Axes]:
    """An empty figure of this size, in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    return figure, figure.add_subplot()


def as_svg(figure: Figure) -> Markup:
    """A figure as an <svg> element, the same each time; text stays text, for letters that matplotlib's font lacks."""
    from markupsafe import Markup
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "inlay"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = stream.getvalue()
    return Markup(text[text.index("<svg") :])  # noqa: S704 (matplotlib escapes what stands in its pictures)
