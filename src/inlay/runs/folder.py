"""A run is a folder that describes itself.

config.yaml               every setting, for people and for `--config`
run.json                  settings, task, labels, host, counts, versions, digests, scores;
                          "status": running, interrupted, diverged, finished
metrics.jsonl             one line per evaluation
inlay/                    the best inlay or fusion
inlays/<task>/            a joint run: the inlay of each task
members/<name>/           what a fusion is over
host/                     the host, where it was trained
report.html               all of it on one page
checkpoint.safetensors    while it is not finished
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from inlay.errors import CheckpointError, ConfigError, nearest
from inlay.runs.record import read_record, signed
from inlay.runs.yaml_text import read_yaml
from inlay.storage.files import digest, write_whole
from inlay.storage.folders import reading, replacing
from inlay.storage.locks import InUse, locked
from inlay.storage.names import NAME
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
"""What applied in runs that were begun before these settings existed; newer runs record at least one of them."""
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
        """A run that is there, or one task of a joint run, as in `runs/joint:rte`."""
        run = run_at(folder)
        if run is None:
            raise CheckpointError(
                f"{folder} is not a run: it has no {RECORD}. Give the folder that `inlay train` wrote."
            )
        return run

    @property
    def address(self) -> str:
        """What a user calls it."""
        return str(self.folder)

    def tasks(self) -> list[TaskRun]:
        """The tasks of a joint run, each as a run of its own; none: it is a run of one task."""
        return [TaskRun(self.folder, task) for task in self.record().get("tasks") or {}]

    def of_one_task(self) -> Run:
        """This run, if it has one task; otherwise which one is meant is not known."""
        tasks = self.tasks()
        if tasks:
            names = [run.task for run in tasks]
            raise CheckpointError(
                f"{self.folder} is a joint run of {', '.join(names)}: say which, as in {self.folder}:{names[0]}"
            )
        return self

    def inlay_of(self, task: str) -> Path:
        """Where the inlay of one task of a joint run is."""
        if not NAME.fullmatch(task):
            raise CheckpointError(
                f"{self.folder / RECORD} names a task {task!r}, which cannot be the name of a folder."
            )
        return self.folder / "inlays" / task

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


class TaskRun(Run):
    """One task of a joint run, as if it were a run of its own: its record, its settings, its inlay, its host."""

    def __init__(self, folder: Path, task: str) -> None:
        super().__init__(folder)
        self.task, self.inlay = task, self.inlay_of(task)

    def record(self) -> dict[str, Any]:
        whole = super().record()
        mine: dict[str, Any] = (whole.get("tasks") or {}).get(self.task, {})
        host = {"host": str(self.host.absolute())} if self.host.is_dir() else {}
        return {name: value for name, value in whole.items() if name != "tasks"} | mine | host

    @property
    def address(self) -> str:
        return f"{self.folder}:{self.task}"

    def tasks(self) -> list[TaskRun]:
        return []

    def history(self) -> list[dict[str, Any]]:
        """Every evaluation, of this task."""
        shared = ("step", "epoch", "lr")
        return [
            {name.removeprefix(f"{self.task}/"): v for name, v in entry.items() if _is_of(name, self.task, shared)}
            for entry in super().history()
        ]

    def note(self, **facts: Any) -> None:
        raise ConfigError(f"{self.folder}:{self.task} is one task of a joint run, whose record is written as a whole.")


def _is_of(name: str, task: str, shared: tuple[str, ...]) -> bool:
    return name in shared or name.startswith(f"{task}/")


def run_at(path: str | Path) -> Run | None:
    """The run of a folder, or one task of a joint run, as in `runs/joint:rte`; None: there is no run."""
    if (Path(path) / RECORD).is_file():
        return Run(Path(path))
    folder, colon, task = str(path).rpartition(":")
    if not colon or not (Path(folder) / RECORD).is_file():
        return None
    tasks = [run.task for run in Run(Path(folder)).tasks()]
    if task not in tasks:
        known = nearest(task, tasks) if tasks else " It is a run of one task: leave out what follows the colon."
        raise ConfigError(f"{folder} has no task {task!r}.{known}")
    return TaskRun(Path(folder), task)


def finished_runs(paths: Iterable[str | Path]) -> list[Run]:
    """These runs; of a joint one each task."""
    given = [Run.opened(path) for path in paths]
    runs = [each for run in given for each in (list[Run](run.tasks()) or [run])]
    unfinished = [run.address for run in runs if run.record().get("status") != "finished"]
    if unfinished:
        raise CheckpointError(f"not finished: {', '.join(unfinished)}. Go on: inlay train --resume {unfinished[0]}")
    return runs


def task_names(runs: Sequence[Run]) -> dict[str, str]:
    """What to call each run's task, by the run's address; where one name is that of several, with its first run."""
    firsts: dict[tuple[str, ...], Run] = {}
    keys = {run.address: _asks(run) for run in runs}
    for run in runs:
        firsts.setdefault(keys[run.address], run)
    count = Counter(name for name, *_ in firsts)
    return {at: key[0] if count[key[0]] == 1 else f"{key[0]} of {firsts[key].address}" for at, key in keys.items()}


def _asks(run: Run) -> tuple[str, ...]:
    """What tells a task from others of its name: own rows are often all called own."""
    record, settings = run.record(), run.config()
    source = settings.get(f"{record.get('judged')}_file") or settings.get("train_file") or settings.get("hub")
    task = record["task"]
    return task["name"], str(source), *(str(task.get(field)) for field in ("kind", "label", "labels"))


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


def inlay_in(path: Path) -> Path:
    """The inlay of a run, or of one task of a joint run; or the inlay itself."""
    run = run_at(path)
    return path if run is None else run.of_one_task().inlay


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file, under the names that they have now."""
    return {
        name if isinstance(value, bool) else OLD_NAMES.get(name, name): value for name, value in settings.items()
    }  # `validation` is a setting again, of whether and not of where


def versions() -> dict[str, str]:
    """What a run was made with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def usual_name(folder: Path) -> str:
    """An inlay is called like its run's folder, with what a name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(folder).absolute().name).strip("._-")[:64] or "own"


def find_runs(folder: Path) -> list[Run]:
    """Every run in a folder and one level below."""
    return [Run(record.parent) for pattern in (RECORD, f"*/{RECORD}") for record in sorted(folder.glob(pattern))]
