"""README.md of a saved inlay: a model card for people, not read back."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor


def card(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A model card in Markdown."""
    count, size = sum(t.numel() for t in tensors.values()), sum(t.numel() * t.element_size() for t in tensors.values())
    host, method = manifest["host"], dict(manifest["method"])
    sizes = f"{host['family']}, hidden size {host['hidden_size']}, layers {host['layers']}"
    facts = {
        "Method": method.pop("kind"),
        "Host": f"{host['name'] or 'not named'} ({sizes})",
        "Parameters": f"{count:,} ({size / 1024:,.0f} KB)",
        "Task": manifest["task"] or "not named",
        **{f"Metric {key}": value for key, value in manifest["metrics"].items()},
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    settings = json.dumps(method, indent=1)
    return (
        f"---\nlibrary_name: inlay\ntags: [inlay, {facts['Method']}]\n---\n"
        f"# {manifest['name']}\n\n| | |\n|---|---|\n{table}\n\n"
        f"```python\nimport inlay\n\n"
        f'inlay.load(host, "path/to/this/folder")\ninlay.activate(host, "{manifest["name"]}")\n```\n\n'
        f"```json\n{settings}\n```\n"
    )
