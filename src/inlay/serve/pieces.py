"""What there is to serve in the folders that were named: runs and inlays, each with its task and its host.

PATH                a run, an inlay, or a folder of runs
NAME=PATH           the same under another name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.checkpoints.manifest import MANIFEST, read_manifest
from inlay.data.task import Task
from inlay.errors import CheckpointError, InlayError, NamingError
from inlay.host.verbs import NAME
from inlay.runs.folder import RECORD, Run, find_runs
from inlay.runs.use import finished_record, generation_of, task_of


@dataclass(frozen=True)
class Piece:
    """One model to serve, as it lies on disk."""

    name: str
    """What requests call it."""
    folder: Path
    """The run, or the inlay."""
    task: Task
    max_length: int
    host: str | None
    """The name or folder of its host."""
    inlay: Path | None
    """The folder of its inlay; None: the host alone answers."""
    members: tuple[Path, ...] = ()
    """What its fusion is over, where the run has that beside it."""
    own_host: bool = False
    """Whether it changed the whole host."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings."""
    needs: tuple[str, ...] = ()
    """The members that a fusion names."""

    @property
    def mark(self) -> tuple[Any, ...]:
        """Changes when the folder is replaced by another."""
        file = (self.inlay or self.folder) / (MANIFEST if self.inlay is not None else RECORD)
        try:
            seen = file.stat()
        except OSError:
            return ()
        return seen.st_mtime_ns, seen.st_size, seen.st_ino


def pieces_of(paths: Sequence[str]) -> list[Piece]:
    """Everything that these paths name; all that is wrong is said at once."""
    found: list[Piece] = []
    problems: list[str] = []
    for given in paths:
        name, folder = _named(given)
        try:
            folders = [folder] if name is not None or _is_one(folder) else _inside(folder)
            found += [piece_at(each, name) for each in folders]
        except InlayError as error:
            problems.append(str(error))
    twice = [name for name, times in Counter(piece.name for piece in found).items() if times > 1]
    for name in twice:
        same = [str(piece.folder) for piece in found if piece.name == name]
        problems.append(f"{' and '.join(same)} are both called {name!r}. Give one another name: NAME=PATH.")
    if problems:
        raise CheckpointError("\n".join(problems))
    return sorted(found, key=lambda piece: bool(piece.needs and not piece.members))  # such fusions need others first


def _named(given: str) -> tuple[str | None, Path]:
    name, equals, path = given.partition("=")
    if not equals or Path(given).exists():
        return None, Path(given)
    return name, Path(path)


def _is_one(folder: Path) -> bool:
    return (folder / RECORD).is_file() or not folder.is_dir() or (folder / MANIFEST).is_file()


def _inside(folder: Path) -> list[Path]:
    """The finished runs of a folder, and the inlays directly in it."""
    runs = [run.folder for run in find_runs(folder) if run.record().get("status") == "finished"]
    inlays = [file.parent for file in sorted(folder.glob(f"*/{MANIFEST}")) if not file.parent.name.startswith(".")]
    if not runs and not inlays:
        raise CheckpointError(
            f"{folder} holds no finished run and no inlay. Give folders that `inlay train` or `inlay fuse` wrote."
        )
    return [*runs, *inlays]


def piece_at(folder: Path, name: str | None = None) -> Piece:
    """The run or inlay of one folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give a run, or an inlay.")
    piece = _run(Run(folder), name) if (folder / RECORD).is_file() else _inlay(folder, name)
    if not NAME.fullmatch(piece.name):
        raise NamingError(
            f"{piece.name!r} cannot be a model's name: use 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or "
            f"a digit. Give another one: NAME=PATH."
        )
    return piece


def _run(run: Run, name: str | None) -> Piece:
    record = finished_record(run)
    own = run.host.is_dir()
    inlay = run.inlay if record["name"] else None
    return Piece(
        name or run.folder.resolve().name, run.folder, Task(**record["task"]), record["max_length"],
        str(run.host) if own else record["host"], inlay, tuple(run.member_folders()), own, run.config(),
        () if inlay is None else tuple(read_manifest(inlay).members),
    )  # fmt: skip


def _inlay(folder: Path, name: str | None) -> Piece:
    manifest = read_manifest(folder)
    task, max_length = task_of(manifest)
    host = manifest.host["name"] or None
    return Piece(
        name or manifest.name, folder, task, max_length, host, folder,
        config=generation_of(manifest), needs=tuple(manifest.members),
    )  # fmt: skip


def common_host(pieces: Iterable[Piece], given: str | None) -> str:
    """The one host that all pieces are for: the one given, or the one that they name."""
    pieces = list(pieces)
    whole = [piece for piece in pieces if piece.own_host]
    if whole and len({piece.host for piece in pieces}) > 1:
        raise CheckpointError(
            f"{', '.join(piece.name for piece in whole)} changed the whole host, so nothing else fits on it. "
            f"Serve it by itself."
        )
    if whole:
        return str(whole[0].host)
    if given:
        return given
    hosts = {piece.host for piece in pieces if piece.host}
    if not hosts:
        raise CheckpointError("none of the folders names its host; give it with --host.")
    if len({Path(host).name for host in hosts}) > 1:
        listed = "; ".join(f"{piece.name}: {piece.host or 'not named'}" for piece in pieces)
        raise CheckpointError(f"one server has one host, and these folders name several ({listed}). Say which: --host.")
    return min(hosts, key=lambda host: not Path(host).is_dir())
