"""A run is a folder that describes itself.

config.yaml               every setting, as `--config` reads it
run.json                  task, labels, host, counts, versions, scores; "status": running, interrupted, finished
metrics.jsonl             one line per evaluation
inlay/                    the best inlay or fusion
members/<name>/           what a fusion is over
host/                     after full fine-tuning
report.html               all of it on one page
checkpoint.safetensors    while it is not finished
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from inlay.errors import CheckpointError, ConfigError
from inlay.storage.files import write_whole
from inlay.storage.folders import replacing
from inlay.storage.locks import InUse, locked
from inlay.storage.plain_json import as_json

CONFIG, RECORD, METRICS, CHECKPOINT, LOCK = (
    "config.yaml",
    "run.json",
    "metrics.jsonl",
    "checkpoint.safetensors",
    ".lock",
)
OLD_NAMES = {"train": "train_file", "validation": "validation_file", "test": "test_file"}
"""Settings that had another name in the config.yaml of earlier runs."""
BEFORE: dict[str, Any] = {"no_decay": [], "prompt": ""}
"""What held, without being said, in runs that were begun before these settings came to be: now one of them is said."""
PACKAGES = ("inlay", "torch", "transformers", "accelerate", "datasets")


class Run:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.checkpoint = self.folder / CHECKPOINT
        self.inlay = self.folder / "inlay"
        self.members = self.folder / "members"
        self.host = self.folder / "host"
        self.report = self.folder / "report.html"

    @classmethod
    def opened(cls, folder: str | Path) -> Run:
        """A run that is there."""
        run = cls(Path(folder))
        if not (run.folder / RECORD).is_file():
            raise CheckpointError(
                f"{folder} is not a run: it has no {RECORD}. Give the folder that `inlay train` wrote."
            )
        return run

    @contextmanager
    def locked(self, *, fresh: bool) -> Iterator[None]:
        """Nobody else may write here meanwhile. The lock goes with the process, however that ends."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; a run needs a folder.")
        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locked(self.folder / LOCK, wait=False):
                self._check_empty(fresh)
                try:
                    yield
                finally:
                    if made and [file.name for file in self.folder.iterdir()] == [LOCK]:  # nothing came of it
                        shutil.rmtree(self.folder, ignore_errors=True)
        except InUse:
            raise ConfigError(
                f"{self.folder} is in use by another process. Wait for it, or choose another folder."
            ) from None

    def _check_empty(self, fresh: bool) -> None:
        there = sorted(file.name for file in self.folder.iterdir() if not file.name.startswith("."))
        if fresh and there:
            hint = f" To go on with it: inlay train --resume {self.folder}" if self.checkpoint.exists() else ""
            raise ConfigError(
                f"{self.folder} is not empty (it holds {', '.join(there[:6])}). Choose another folder.{hint}"
            )

    def keep_member(self, folder: Path, name: str) -> None:
        """A copy of a fusion's member in `members/`, whole or not at all."""
        from inlay.checkpoints.manifest import CARD, MANIFEST, WEIGHTS  # torch only when there is something to do

        with replacing(self.members / name, (MANIFEST,)) as copy:
            for file in (MANIFEST, WEIGHTS, CARD):
                if (folder / file).exists():
                    shutil.copyfile(folder / file, copy / file)

    # settings and record

    def write_config(self, settings: dict[str, Any]) -> None:
        write_whole(
            self.folder / CONFIG, yaml.safe_dump(json.loads(as_json(settings)), sort_keys=False, allow_unicode=True)
        )

    def config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        if not file.is_file():
            raise CheckpointError(
                f"{self.folder} has no {CONFIG}: nothing was trained there yet. Start the run again without --resume."
            )
        found = with_new_names(yaml.safe_load(file.read_text(encoding="utf-8")))
        return found if BEFORE.keys() & found.keys() else BEFORE | found

    def record(self) -> dict[str, Any]:
        file = self.folder / RECORD
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    def note(self, **facts: Any) -> None:
        """Add facts to the record."""
        write_whole(self.folder / RECORD, as_json(self.record() | facts, indent=1) + "\n")

    # metrics

    def log(self, entry: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as stream:
            stream.write(as_json(entry) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """Every evaluation; a line that a killed process left half is passed over."""
        file = self.folder / METRICS
        entries = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def forget_after(self, step: int) -> None:
        """Before going on from a checkpoint: drop what was logged after it."""
        kept = [entry for entry in self.history() if entry.get("step", 0) <= step]
        write_whole(self.folder / METRICS, "".join(as_json(entry) + "\n" for entry in kept))


def inlay_in(folder: Path) -> Path:
    """The inlay of a run, or the inlay itself."""
    return Run(folder).inlay if (folder / RECORD).is_file() else folder


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file, under the names that they have now."""
    return {OLD_NAMES.get(name, name): value for name, value in settings.items()}


def versions() -> dict[str, str]:
    """What a run was made with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_runs(folder: Path) -> list[Run]:
    """Every run in a folder and one level below."""
    return [Run(record.parent) for pattern in (RECORD, f"*/{RECORD}") for record in sorted(folder.glob(pattern))]
