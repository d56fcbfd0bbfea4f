"""inlay inspect"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import columns, shown, tell

if TYPE_CHECKING:
    from inlay.compose.activations import FusionActivations
    from inlay.runs.folder import Run

HELP = """Describe a run or an inlay: its settings, counts, scores and curve, and what a fusion listens to.

A fusion's mean weights are shown as a table, places × members; --picture draws them as a heat map. Several fusions are
drawn as one picture, targets × members.

\b
Examples:
  inlay inspect runs/rte
  inlay inspect runs/rte-fused --picture heat
  inlay inspect runs/rte-fused runs/cb-fused runs/mrpc-fused --picture heat --layer all
"""
BLOCKS = "▁▂▃▄▅▆▇█"


def work(paths: tuple[Path, ...], picture: Path | None, layer: str | None, as_json: bool) -> None:
    if layer is not None and picture is None:
        raise click.UsageError("--layer says what to draw; give --picture as well.")
    from inlay.runs.folder import run_at

    paths = tuple(dict.fromkeys(paths))  # one that is named twice is shown once
    runs = {path: run_at(path) for path in paths}
    found = [_inlay(path) if run is None else _joint(run) if run.tasks() else _run(run) for path, run in runs.items()]
    if picture is not None:
        pictures = _draw_fusions(paths, picture, layer)
        for facts in found:
            facts["pictures"] = pictures
    by_path = {str(path): facts for path, facts in zip(paths, found, strict=True)}
    tell("\n\n".join(map(_told, found)), found[0] if len(found) == 1 else by_path, as_json)


def _told(facts: dict[str, Any]) -> str:
    lines = [
        (name.replace("_", " "), _sparkline(value) if name == "curve" else shown(value))
        for name, value in facts.items() if name != "attention"
    ]  # fmt: skip
    listens = facts.get("attention")
    return columns(lines) + (f"\n\n{_weights(listens)}" if listens else "")


def _weights(attention: dict[str, dict[str, float]]) -> str:
    """A fusion's mean weights, places × members, and their mean over the places."""
    members = list(dict.fromkeys(member for weights in attention.values() for member in weights))
    rows = [(place, *(weights.get(member, 0.0) for member in members)) for place, weights in attention.items()]
    means = (sum(column) / len(rows) for column in list(zip(*rows, strict=True))[1:])
    return columns([*rows, ("mean", *means)], ("it listens to", *members))


def _joint(run: Run) -> dict[str, Any]:
    """A joint run: what it is, and the scores and the curve of every task."""
    record = run.record()
    facts = {
        key: record.get(key)
        for key in ("status", "mode", "method", "host", "rows", "trained_parameters", "host_parameters")
    }
    facts |= {key: record.get(key) for key in ("best_step", "steps", "seconds", "padding", "seed", "versions")}
    for task in run.tasks():
        mine = _run(task)
        facts[task.task] = {key: mine[key] for key in ("rows", "judged", "scores") if key in mine}
    facts["curve"] = [v for entry in run.history() if (v := entry.get("validation_mean")) is not None]
    return {key: value for key, value in facts.items() if value not in (None, [], {})}


def _run(run: Run) -> dict[str, Any]:
    record, history = run.record(), run.history()
    task = record["task"] or {}
    main = next(iter(task.get("metrics") or ()), None)
    values = [value for entry in history if (value := entry.get(f"validation_{main}")) is not None]
    facts = {
        key: record.get(key)
        for key in ("status", "name", "mode", "method", "host", "rows", "trained_parameters", "host_parameters")
    }
    facts |= {
        "task": task.get("name"),
        "labels": task.get("labels"),
        "scores": record.get("scores"),
        "judged": record.get("judged"),
    }
    facts |= {key: record.get(key) for key in ("best_step", "steps", "seconds", "padding", "seed", "versions")}
    facts["curve"] = values
    facts["members"] = _members(run)
    facts["attention"] = record.get("attention")
    return {key: value for key, value in facts.items() if value not in (None, [], {})}


def _members(run: Run) -> dict[str, Any]:
    """A fusion's members: what each is, and how many numbers it holds."""
    found = {}
    for folder in run.member_folders():
        facts = _inlay(folder)
        found[folder.name] = {"method": facts["method"]["kind"], "parameters": facts["parameters"]}
    return found


def _inlay(path: Path) -> dict[str, Any]:
    from inlay.checkpoints.manifest import WEIGHTS
    from inlay.checkpoints.ours import read
    from inlay.storage.folders import reading

    with reading(path) as folder:
        manifest, tensors = read(folder)
        size = (folder / WEIGHTS).stat().st_size
    count = sum(tensor.numel() for tensor in tensors.values())
    kept = {key: value for key, value in manifest.model_dump().items() if key not in ("files", "sha256", "format")}
    return kept | {"tensors": len(tensors), "parameters": count, "bytes": size}


def _draw_fusions(paths: tuple[Path, ...], picture: Path, layer: str | None) -> list[str]:
    """One fusion by layers, or several by targets; members go by their names, so the same inlay is one column."""
    from inlay.report.plots import plot_fusion

    names = [path.absolute().name for path in paths]
    if len(set(names)) < len(names):  # folders of one name in several places
        names = [str(path) for path in paths]
    seen = {name: _attention(path) for name, path in zip(names, paths, strict=True)}
    drawn = seen if len(seen) > 1 or layer is not None else next(iter(seen.values()))
    return [str(file) for file in plot_fusion(drawn, picture.with_suffix(""), layer=layer)]


def _attention(path: Path) -> FusionActivations:
    from inlay.errors import SetupError
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import attention_on

    opened = open_for_use(path)
    if opened.name is None:
        raise SetupError(f"{path} has no fusion, so there is no heat map of it.")
    return attention_on(opened.host, opened.name, opened.listening_rows()[1])


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    bars = "".join(BLOCKS[round((value - low) / (high - low) * 7) if high > low else 0] for value in values)
    return f"{bars}  {low:.4f} … {high:.4f}"


command = click.Command(
    "inspect",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["paths"], nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.Option(
            ["--picture"], type=click.Path(path_type=Path), help="Draw a fusion's heat map here, as .png and .svg."
        ),
        click.Option(["--layer"], help="Draw targets × members in this layer, or in every one: all."),
        json_flag,
    ],
)
