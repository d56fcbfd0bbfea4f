"""Heat maps of fusion attention: members × layers for one fusion, target tasks × members for several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from inlay.analysis.activations import FusionActivations


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
