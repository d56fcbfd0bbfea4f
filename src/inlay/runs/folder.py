"""A run is a folder that describes itself.

config.yaml               every setting, for people and for `--config`
run.json                  settings, task, labels, host, counts, versions, digests, scores;
                          "status": running, interrupted, diverged, finished
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
from inlay.runs.record import read_record, signed
from inlay.runs.yaml_text import read_yaml
from inlay.storage.files import digest, write_whole
from inlay.storage.folders import reading, replacing
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

    def member_folders(self) -> list[Path]:
        """The members of a fusion; what a killed writer left beside them is none."""
        there = sorted(self.members.iterdir()) if self.members.is_dir() else []
        return [folder for folder in there if not folder.name.startswith(".")]

    def keep_member(self, folder: Path, name: str) -> None:
        """A copy of a fusion's member in `members/`, whole or not at all."""
        from inlay.checkpoints.manifest import CARD, MANIFEST, WEIGHTS  # torch only when there is something to do

        with reading(folder) as there, replacing(self.members / name, (MANIFEST,)) as copy:
            for file in (MANIFEST, WEIGHTS, CARD):
                if (there / file).exists():
                    shutil.copyfile(there / file, copy / file)

    # settings and record

    def write_config(self, settings: dict[str, Any]) -> None:
        text = yaml.safe_dump(json.loads(as_json(settings)), sort_keys=False, allow_unicode=True)
        write_whole(self.folder / CONFIG, text)

    def config(self) -> dict[str, Any]:
        """The run's settings: those of its record; earlier versions noted them in config.yaml alone."""
        settings = self.record().get("settings")
        if settings is not None:
            return dict(settings)
        file = self.folder / CONFIG
        if not file.is_file():
            raise CheckpointError(
                f"{self.folder} has no {CONFIG}: nothing was trained there yet. Start the run again without `resume`."
            )
        found = read_settings(file)
        return found if BEFORE.keys() & found.keys() else BEFORE | found

    def record(self) -> dict[str, Any]:
        """What run.json says; nothing, where there is none yet."""
        file = self.folder / RECORD
        return read_record(file) if file.is_file() else {}

    def note(self, **facts: Any) -> None:
        """Add facts to the record."""
        write_whole(self.folder / RECORD, as_json(signed(self.record() | facts), indent=1) + "\n")

    def check_host(self) -> None:
        """After full fine-tuning: the host's files are those that the run wrote."""
        wrong = [
            name for name, wanted in (self.record().get("files") or {}).items()
            if not (self.folder / name).is_file() or digest(self.folder / name) != wanted
        ]  # fmt: skip
        if wrong:
            raise CheckpointError(
                f"{', '.join(wrong[:4])} of {self.folder} is missing, cut or altered: "
                f"its sha256 is not the one in {RECORD}."
            )

    # metrics

    def log(self, entry: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as stream:
            stream.write(as_json(entry) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """Every evaluation; a line that a killed process left half is passed over."""
        file = self.folder / METRICS
        entries = []
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_entry(entry):
                entries.append(entry)
        return entries

    def forget_after(self, step: int) -> None:
        """Before going on from a checkpoint: drop what was logged after it."""
        kept = [entry for entry in self.history() if entry.get("step", 0) <= step]
        write_whole(self.folder / METRICS, "".join(as_json(entry) + "\n" for entry in kept))


def _is_entry(entry: Any) -> bool:
    """One evaluation: its step, and numbers or null by name."""
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return False
    return all(value is None or type(value) in (int, float) for value in entry.values())


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a YAML file, under the names that they have now."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    found = read_yaml(text, str(file))
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must have settings such as 'task: rte', one per line.")
    return with_new_names({str(name): value for name, value in found.items()})


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
