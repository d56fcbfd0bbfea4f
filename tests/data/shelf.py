"""Data sets as the hub keeps them, in a folder: `datasets` reads `org/name` from the working folder as it reads the hub.

A data set is a README with its configurations and a Parquet file for each split, with the hub's own columns and types.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import yaml

Rows = list[dict[str, Any]]


def put(shelf: Path, name: str, splits: dict[str, Rows], config: str = "default", **types: Any) -> Path:
    """Write a data set of one configuration; `types` are columns that are not what their values look like."""
    folder = shelf / name
    files = []
    for split, rows in splits.items():
        made = datasets.Dataset.from_list(rows)
        features = made.features.copy()
        features.update(types)
        file = folder / config / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        made.cast(features).to_parquet(file)
        files.append({"split": split, "path": f"{config}/{split}-*"})
    head = yaml.safe_dump({"configs": [{"config_name": config, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{head}---\n", encoding="utf-8")
    return folder
