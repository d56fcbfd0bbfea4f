"""inlay inspect"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import columns, shown, tell

HELP = """Show what a run or an inlay is: its settings, counts, scores and curve; a fusion's heat map as a picture.

\b
Examples:
  inlay inspect runs/rte
  inlay inspect runs/rte-fused --picture heat
"""
BLOCKS = "▁▂▃▄▅▆▇█"


def work(path: Path, picture: Path | None, as_json: bool) -> None:
    facts = _run(path) if (path / "run.json").is_file() else _inlay(path)
    if picture is not None:
        facts["pictures"] = _draw_fusion(path, picture)
    told = {name: _sparkline(value) if name == "curve" else shown(value) for name, value in facts.items()}
    tell(columns([(name.replace("_", " "), text) for name, text in told.items()]), facts, as_json)


def _run(path: Path) -> dict[str, Any]:
    from inlay.runs.folder import Run

    run = Run(path)
    record, history = run.record(), run.history()
    main = record["task"]["metrics"][0]
    values = [value for entry in history if (value := entry.get(f"validation_{main}")) is not None]
    facts = {
        key: record.get(key)
        for key in ("status", "name", "mode", "method", "host", "rows", "trained_parameters", "host_parameters")
    }
    facts |= {
        "task": record["task"]["name"],
        "labels": record["task"]["labels"],
        "scores": record.get("scores"),
        "judged": record.get("judged"),
    }
    facts |= {key: record.get(key) for key in ("best_step", "steps", "seconds", "padding", "seed", "versions")}
    facts["curve"] = values
    facts["members"] = sorted(member.name for member in run.members.iterdir()) if run.members.is_dir() else []
    return {key: value for key, value in facts.items() if value not in (None, [], {})}


def _inlay(path: Path) -> dict[str, Any]:
    import safetensors

    from inlay.checkpoints.manifest import WEIGHTS, read_manifest

    manifest = read_manifest(path)
    with safetensors.safe_open(path / WEIGHTS, "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    count = sum(math.prod(shape) for shape in sizes.values())
    kept = {key: value for key, value in manifest.model_dump().items() if key not in ("files", "sha256", "format")}
    return kept | {"tensors": len(sizes), "parameters": count, "bytes": (path / WEIGHTS).stat().st_size}


def _draw_fusion(path: Path, picture: Path) -> list[str]:
    from inlay.errors import SetupError
    from inlay.report.plots import plot_fusion
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import attention_on

    opened = open_for_use(path)
    if opened.name is None:
        raise SetupError(f"{path} has no fusion, so there is no heat map of it.")
    seen = attention_on(opened.host, opened.name, opened.codec.encode(opened.rows("validation", None)[1]))
    return [str(file) for file in plot_fusion(seen, picture.with_suffix(""))]


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    bars = "".join(BLOCKS[round((value - low) / (high - low) * 7) if high > low else 0] for value in values)
    return f"{bars}  {low:.4f} … {high:.4f}"


command = click.Command(
    "inspect",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path, exists=True)),
        click.Option(
            ["--picture"], type=click.Path(path_type=Path), help="Draw a fusion's heat map here, as .png and .svg."
        ),
        json_flag,
    ],
)
