"""Pictures of a run as SVG text, to stand in a page that needs no network."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from inlay.compose.attention import FusionActivations


def curve(history: Sequence[dict[str, Any]], main: str) -> str:
    """Training loss and the main metric over the steps."""
    figure, axis = _figure(6, 3)
    steps = [entry["step"] for entry in history]
    axis.plot(steps, [_number(entry["loss"]) for entry in history], color="#999", marker=".", label="training loss")
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    other = axis.twinx()
    values = [_number(entry[f"validation_{main}"]) for entry in history]
    other.plot(steps, values, color="#1f6f8b", marker="o", label=f"validation {main}")
    other.set_ylabel(main)
    figure.legend(loc="upper center", ncols=2, frameon=False)
    return svg(figure)


def confusion(labels: Sequence[str], targets: Sequence[int], predictions: Sequence[int]) -> str:
    """How often each label was taken for each other."""
    counts = [[0] * len(labels) for _ in labels]
    for target, prediction in zip(targets, predictions, strict=True):
        if 0 <= prediction < len(labels):
            counts[target][prediction] += 1
    size = max(3.0, 0.6 * len(labels) + 1.5)
    figure, axis = _figure(size + 1, size)
    axis.imshow(counts, cmap="Blues")
    axis.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axis.set_yticks(range(len(labels)), labels, parse_math=False)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    highest = max(map(max, counts))
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            axis.text(
                column, row, str(count), ha="center", va="center", color="white" if count > highest / 2 else "black"
            )
    return svg(figure)


def svg(figure: Any) -> str:
    """A matplotlib figure as an <svg> element; text stays text, for letters that matplotlib's font does not have."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(stream, format="svg", bbox_inches="tight")
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def fusion_svg(seen: FusionActivations) -> str:
    """Members × layers as an <svg> element."""
    with TemporaryDirectory() as folder:
        drawn = plot_fusion(seen, Path(folder) / "heat")[1].read_text(encoding="utf-8")
    return drawn[drawn.index("<svg") :]


def plot_fusion(
    activations: FusionActivations | Mapping[str, FusionActivations], path: str | os.PathLike[str]
) -> tuple[Path, Path]:
    """Draw a heat map as <path>.png and <path>.svg: of one fusion, or of several by their target's name."""
    if isinstance(activations, FusionActivations):
        rows = list(activations.members)
        columns = [_short(place) for place in activations.mean]
        values = torch.stack(list(activations.mean.values()), dim=1)  # (N, places)
        title = f"{activations.fusion}: mean attention per member and layer"
    else:
        rows = list(activations)
        columns = list(dict.fromkeys(member for one in activations.values() for member in one.members))
        values = torch.tensor(
            [[one.overall().get(member, float("nan")) for member in columns] for one in activations.values()]
        )
        title = "mean attention of each target to each member"
    return heat_map(values, rows, columns, title, Path(path))


def heat_map(values: Tensor, rows: list[str], columns: list[str], title: str, path: Path) -> tuple[Path, Path]:
    """A table of colours with the numbers in it."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(2.2 + 0.55 * len(columns) + 0.09 * max(map(len, rows)), 1.8 + 0.36 * len(rows)), layout="constrained"
    )
    axes = figure.add_subplot()
    shown = axes.imshow(
        values.numpy(), cmap="Blues", vmin=0, vmax=max(1e-9, float(values.nan_to_num().max())), aspect="auto"
    )
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set_title(title, fontsize=10)
    middle = float(values.nan_to_num().max()) / 2
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            if value == value:  # not a member of that target: left empty
                axes.text(
                    x,
                    y,
                    f"{value:.2f}".lstrip("0"),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value > middle else "#333",
                )
    figure.colorbar(shown, ax=axes, shrink=0.8)
    png, svg = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in (png, svg):
        figure.savefig(file, dpi=150, bbox_inches="tight")  # tight: a title may be wider than a small table
    return png, svg


def _short(place: str) -> str:
    """'encoder.3.ffn' as 'enc 3', with the branch where it is not the FFN."""
    stack, layer, *kind = place.removesuffix(".raw").split(".")
    name = f"{stack[:3]} {layer}"
    return name if kind[:1] == ["ffn"] else f"{name} {' '.join(kind)}"
