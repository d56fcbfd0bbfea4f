"""README.md of a saved inlay: a model card for people and the Hub, not read back.

What users write (task, metric names, labels, the host's name) is shown as code: none of it acts as Markdown or HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import Tensor

MOST_LABELS = 20
REPOSITORY = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Names that a model on the Hub can have."""


def card(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The card of a manifest, in Markdown with its metadata in front."""
    kind, name = manifest["method"]["kind"], manifest["name"]
    settings = {key: value for key, value in manifest["method"].items() if key != "kind"}
    table = "\n".join(f"| {key} | {value} |" for key, value in _facts(manifest, tensors).items())
    data = ModelCardData(
        base_model=_base_model(manifest["host"]["name"]), library_name="inlay", tags=["inlay", kind],
        model_name=name, metrics=list(manifest["metrics"]) or None, eval_results=_results(manifest),
    )  # fmt: skip
    body = (
        f"# {as_code(name)}\n\n| | |\n|---|---|\n{table}\n\n"
        f"```python\nimport inlay\n\n"
        f'inlay.load(host, "path/to/this/folder")\ninlay.activate(host, "{name}")\n```\n\n'
        f"```json\n{json.dumps(settings, indent=1)}\n```\n"
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{body}"))


def as_code(text: object) -> str:
    """A text as inline code that nothing in it can end, on one line and in one cell of a table."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}".replace("|", r"\|")


def _facts(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The rows of the table; keys and values are Markdown."""
    host, task, labels = manifest["host"], manifest["task"], (manifest["head"] or {}).get("labels")
    count = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    layers = ", ".join(f"{stack} {depth}" for stack, depth in host["layers"].items())
    facts = {
        "Method": manifest["method"]["kind"],
        "Host": as_code(host["name"]) if host["name"] else "not named",
        "Host's form": f"{host['family']}, hidden size {host['hidden_size']}, layers: {layers}",
        "Parameters": f"{count:,} ({size / 1024:,.0f} KB)",
        "Task": as_code(task) if task else "not named",
    }
    if isinstance(labels, list):
        more = f" and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
        facts["Labels"] = ", ".join(map(as_code, labels[:MOST_LABELS])) + more
    return facts | {f"Metric {as_code(key)}": as_code(value) for key, value in manifest["metrics"].items()}


def _base_model(name: str) -> str | None:
    """The host's name, if it can be one on the Hub and is no folder here."""
    return name if REPOSITORY.fullmatch(name) and not Path(name).exists() else None


def _results(manifest: Mapping[str, Any]) -> list[EvalResult] | None:
    """The metrics as the Hub reads them."""
    task = manifest["task"] or "not named"
    kind = "text-classification" if (manifest["head"] or {}).get("labels") else "other"
    return [
        EvalResult(task_type=kind, dataset_type=task, dataset_name=task, metric_type=metric, metric_value=value)
        for metric, value in manifest["metrics"].items() if isinstance(value, int | float)
    ] or None  # fmt: skip
