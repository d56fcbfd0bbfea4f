"""What the demo says: the table, what the fusion listens to, and one page with all of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from inlay.compose.activations import FusionActivations
from inlay.demo.studies import MODES, Study
from inlay.report.pages import page
from inlay.report.plots import error_bars, fusion_svg, plot_fusion
from inlay.storage.files import write_whole
from inlay.storage.plain_json import as_json

Results = Sequence[dict[str, Any]]
WORDS = {"head": "head only", "full": "full fine-tuning", "single": "single inlay", "fused": "fusion of all"}


def summary(results: Results, targets: Sequence[str]) -> list[dict[str, Any]]:
    """For each target and mode: mean, spread and each seed's accuracy on the test rows, in percent."""
    rows = []
    for target in targets:
        for mode in MODES:
            chosen = sorted(
                (r for r in results if r.get("target") == target and r["mode"] == mode), key=lambda r: r["seed"]
            )
            scores = [100 * r["test"]["accuracy"] for r in chosen]
            rows.append(
                {
                    "target": target,
                    "mode": mode,
                    "mean": statistics.mean(scores),
                    "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
                    "seeds": scores,
                }
            )
    return rows


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table as it is printed."""
    seeds = max(len(row["seeds"]) for row in rows)
    lines = [f"{'target':<10} {'trained':<18} {'mean':>6} {'± spread':>9}   accuracy with each of {seeds} seeds"]
    for row in rows:
        each = "  ".join(f"{score:5.1f}" for score in row["seeds"])
        lines.append(f"{row['target']:<10} {WORDS[row['mode']]:<18} {row['mean']:6.1f} {row['spread']:9.1f}   {each}")
    return "\n".join(lines)


def attention(results: Results, target: str) -> FusionActivations:
    """What a target's fusions listen to, the mean over the seeds."""
    seen = [result["attention"] for result in results if result.get("target") == target and result["mode"] == "fused"]
    members = tuple(next(iter(seen[0].values())))
    mean = {
        place: torch.tensor([[one[place][member] for member in members] for one in seen], dtype=torch.float64).mean(0)
        for place in seen[0]
    }
    return FusionActivations(f"{target} fused", members, mean, dict.fromkeys(mean, 0))


def write_page(out: Path, study: Study, results: Results, seconds: float) -> Path:
    """report.html, heat map pictures and results.json in `out`."""
    rows = summary(results, list(study.targets))
    sources = [(r["source"], study.sources[r["source"]], r["accuracy"]) for r in results if "source" in r]
    seen = {target: attention(results, target) for target in study.targets}
    for target, activations in seen.items():
        plot_fusion(activations, out / f"{target}-heat")
    facts = {
        "host": study.host,
        "table": rows,
        "sources": [{"task": task, "rows": rows, "accuracy": accuracy} for task, rows, accuracy in sources],
        "seconds": round(seconds, 1),
        "results": list(results),
    }
    write_whole(out / "results.json", as_json(facts, indent=1) + "\n")
    document = page(
        "demo",
        title="Inlay demo: from few labels",
        comparison=[
            (row["target"], WORDS[row["mode"]], row["mean"], row["spread"], ", ".join(f"{s:.1f}" for s in row["seeds"]))
            for row in rows
        ],
        bars=error_bars([(f"{r['target']}: {WORDS[r['mode']]}", r["mean"], r["spread"]) for r in rows]),
        sources=sources,
        attention={target: fusion_svg(activations) for target, activations in seen.items()},
        recipes=[(mode, recipe.lr, recipe.epochs, recipe.batch_size) for mode, recipe in study.recipes.items()],
    )
    write_whole(out / "report.html", document)
    return out / "report.html"
