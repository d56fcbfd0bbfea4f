"""Pictures of a run as SVG text, to stand in a page that needs no network."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any


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
