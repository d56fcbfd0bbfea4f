"""What decides a cell, as digests: the host's files, the task's rows, and all of it together.

Where things are does not count: a study that moves to another machine keeps its cells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inlay.data.builtin import builtin_tasks
from inlay.data.sources import split_files
from inlay.errors import ConfigError, InlayError
from inlay.storage.files import digest

CODE = 2
"""Goes up when Inlay's code would give other results from the same settings."""
HEAD_FIRST = 2
"""The same for runs that fit their head first."""
HOST_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")
"""Endings of the files that a host is read from."""
LENGTH = 20
"""Hexadecimal digits of a cell's name."""


def digest_of(value: Any) -> str:
    """The digest of plain data."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def cell_name(identity: Mapping[str, Any]) -> str:
    return digest_of(identity)[:LENGTH]


def host_digest(host: str) -> str:
    """Of a folder its files; of a model of the hub its name and revision."""
    folder = Path(host)
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.suffix in HOST_FILES)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"the host {host} has no config.json, so it is not the folder of a pretrained model.")
        return digest_of({file.name: digest(file) for file in files})
    from inlay.training.workbench import open_config

    config = open_config(host)
    return digest_of({"hub": host, "revision": getattr(config, "_commit_hash", None)})


def rows_digest(task: str, said: Mapping[str, Any], data_dir: Path | None) -> str:
    """Of rows in files their content; of rows on the hub their name there."""
    own = {name: Path(said[f"{name}_file"]) for name in ("train", "validation", "test") if said.get(f"{name}_file")}
    place = said.get("data_dir") or data_dir
    if not own and not said.get("hub") and place is not None:
        known = builtin_tasks().get(task)
        folder = Path(place) / ((known.folder if known is not None else None) or task)
        if not folder.is_dir():
            raise ConfigError(f"the rows of {task}: {folder} is not a folder.")
        own = split_files(folder)
    missing = [str(file) for file in own.values() if not file.is_file()]
    if missing:
        raise ConfigError(f"the rows of {task}: {', '.join(missing)} is not a file.")
    return digest_of({split: digest(file) for split, file in own.items()} or {"hub": said.get("hub") or task})


def all_digests(found: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Digests by name; whatever cannot be read is told at once."""
    digests, problems = {}, []
    for name, make in found:
        try:
            digests[name] = make()
        except InlayError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return digests
