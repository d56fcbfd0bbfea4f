"""What there is to serve in the folders that were named: runs and inlays, each with its task and its host.

PATH                a run, an inlay, or a folder of runs
NAME=PATH           the same under another name
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.checkpoints.manifest import MANIFEST, read_manifest
from inlay.data.task import Task
from inlay.errors import CheckpointError, InlayError, NamingError
from inlay.runs.folder import RECORD, Run, TaskRun, find_runs, run_at, usual_name
from inlay.runs.use import finished_record, generation_of, task_of
from inlay.storage.names import NAME, NAMES_HAVE
from inlay.studies.cells import STUDY
from inlay.studies.plan import Cell, View, view_of
from inlay.studies.ways import JOINT


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
    """What its fusion is over, where that lies beside it."""
    own_host: bool = False
    """Whether it changed the whole host."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings."""
    needs: tuple[str, ...] = ()
    """The members that a fusion names."""
    joint: str | None = None
    """Which task of a joint run it is."""
    allowed: Callable[[Path], bool] = Path.is_dir
    """Whether a folder may be opened: for what a request loaded only those below the server's root."""

    def again(self) -> Piece:
        """What lies there now."""
        if self.joint is None:
            return piece_at(self.folder, self.name, self.allowed)
        run = run_at(f"{self.folder}:{self.joint}")
        if run is None:
            raise CheckpointError(f"{self.folder} is no run any more.")
        return replace(_run(run), name=self.name)

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
        name, path = split_name(given)
        try:
            found += [_renamed(piece, name, several) for several, piece in _at(path)]
        except InlayError as error:
            problems.append(str(error))
    twice = [name for name, times in Counter(piece.name for piece in found).items() if times > 1]
    for name in twice:
        same = [str(piece.folder) for piece in found if piece.name == name]
        problems.append(f"{' and '.join(same)} are both called {name!r}. Give one another name: NAME=PATH.")
    if problems:
        raise CheckpointError("\n".join(problems))
    return sorted(found, key=lambda piece: len(piece.members) < len(piece.needs))  # such fusions need others first


def split_name(given: str) -> tuple[str | None, str]:
    """NAME=PATH, or a path alone."""
    name, equals, path = given.partition("=")
    return (None, given) if not equals or Path(given).exists() else (name, path)


def _renamed(piece: Piece, name: str | None, several: bool) -> Piece:
    """The piece under the name that was given; as a prefix of its own name where a path stands for several pieces."""
    if name is not None:
        piece = replace(piece, name=f"{name}-{piece.name}" if several else name)
    if not NAME.fullmatch(piece.name):
        raise NamingError(f"{piece.name!r} cannot be a model's name: {NAMES_HAVE}. Give another one: NAME=PATH.")
    return piece


def _at(path: str) -> list[tuple[bool, Piece]]:
    """What a path stands for, and whether it may be several."""
    run, folder = run_at(path), Path(path)
    if run is not None:
        return [(bool(run.tasks()), _run(each)) for each in _each(run)]
    if (folder / MANIFEST).is_file() or not folder.is_dir():
        return [(False, piece_at(folder))]
    if (folder / STUDY).is_file():
        return [(True, piece) for piece in _best_cells(folder)]
    runs = [run for run in find_runs(folder) if run.record().get("status") == "finished"]
    found = [_run(each) for run in runs for each in _each(run)]
    inlays = [file.parent for file in sorted(folder.glob(f"*/{MANIFEST}")) if not file.parent.name.startswith(".")]
    found += [piece_at(each) for each in inlays]
    if not found:
        raise CheckpointError(
            f"{folder} holds no finished run and no inlay. Give folders that `inlay train` or `inlay fuse` wrote."
        )
    return [(True, piece) for piece in found]


def _each(run: Run) -> list[Run]:
    """The tasks of a joint run, or the run itself."""
    return [*run.tasks()] or [run]


def _best_cells(folder: Path) -> list[Piece]:
    """Of each task of a study the cell that its validation rows like best, among those whose inlay is there.

    Joint training may leave a host of its own. All of them are on one: the one that answers most tasks, and best.
    """
    view = view_of(folder)
    found: dict[tuple[str, str | None], dict[str, tuple[float, str]]] = {}
    for slot, cell in view.filled.items():
        if slot.task == JOINT or not view.folder.has_weights(cell.name) or _lost_its_host(view, cell):
            continue
        value = view.results[cell.name]["selected"]
        mine = (-math.inf if value is None else value, cell.name)
        here = found.setdefault((slot.host, view.folder.host_of([cell.name, *cell.needs()])), {})
        here[slot.task] = max(here.get(slot.task, mine), mine)
    best: dict[str, dict[str, tuple[float, str]]] = {}
    for (host, _), here in found.items():
        best[host] = max(best.get(host, {}), here, key=_worth)
    if not best:
        raise CheckpointError(f"{folder} is a study without a finished cell whose inlay is there.")
    return [
        replace(_run(_run_of(view, cell)), name=f"{task}-{host}" if len(best) > 1 else task)
        for host, here in best.items()
        for task, (_, cell) in here.items()
    ]


def _worth(cells: Mapping[str, tuple[float, str]]) -> tuple[int, float]:
    """How many tasks the cells of one host answer, and how well."""
    return len(cells), sum(value for value, _ in cells.values())


def _lost_its_host(view: View, cell: Cell) -> bool:
    """Whether joint training changed the host of a cell and that host was not kept."""
    whole = view.folder.joint_of(cell.name)
    changed = whole is not None and view.results[whole].get("host_bytes")
    return bool(changed) and view.folder.host_of([cell.name]) is None


def _run_of(view: View, cell: str) -> Run:
    """A cell as a run: its own folder, or one task of the joint cell that it is a part of."""
    whole = view.folder.joint_of(cell)
    if whole is None:
        return Run(view.folder.cell(cell))
    return TaskRun(view.folder.cell(whole), view.folder.place(cell).name)


def piece_at(folder: Path, name: str | None = None, allowed: Callable[[Path], bool] = Path.is_dir) -> Piece:
    """The run or inlay of one folder, under its own or another name.

    allowed: whether a folder may be opened; it is asked about those beside it too, where a fusion's members may be.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give a run, or an inlay.")
    if not allowed(folder):
        raise CheckpointError(f"{folder} leads out of the server's root folder, or something in it does.")
    is_run = (folder / RECORD).is_file()  # not `run_at`: what precedes a colon in its name may lead elsewhere
    piece = _run(Run(folder).of_one_task()) if is_run else _inlay(folder, allowed)
    return replace(_renamed(piece, name, False), allowed=allowed)


def _run(run: Run) -> Piece:
    record = finished_record(run)
    own = run.host.is_dir()
    inlay = run.inlay if record["name"] else None
    folder = run.folder.resolve()
    usual = folder.name if NAME.fullmatch(folder.name) else record["name"] or usual_name(folder)
    name = run.task if isinstance(run, TaskRun) else usual
    return Piece(
        name, run.folder, Task(**record["task"]), record["max_length"],
        str(run.host) if own else record["host"], inlay, tuple(run.member_folders()), own, run.config(),
        () if inlay is None else tuple(read_manifest(inlay).members), run.task if isinstance(run, TaskRun) else None,
    )  # fmt: skip


def _inlay(folder: Path, allowed: Callable[[Path], bool] = Path.is_dir) -> Piece:
    manifest = read_manifest(folder)
    task, max_length = task_of(manifest)
    members = [_beside(folder, member, allowed) for member in manifest.members]
    return Piece(
        manifest.name, folder, task, max_length, manifest.host["name"] or None, folder,
        tuple(member for member in members if member is not None), config=generation_of(manifest),
        needs=tuple(manifest.members),
    )  # fmt: skip


def _beside(folder: Path, member: str, allowed: Callable[[Path], bool]) -> Path | None:
    """A member in its fusion's run, or what has its name beside the fusion; loading notices if that is another."""
    places = (folder.absolute().parent / "members" / member, folder.absolute().parent / member)
    for place in places if NAME.fullmatch(member) else ():
        if allowed(place) and (place / MANIFEST).is_file():
            return place
    return None


def common_host(pieces: Iterable[Piece], given: str | None) -> str:
    """The one host that all pieces are for: the one given, or the one that they name."""
    pieces = list(pieces)
    whole = [piece for piece in pieces if piece.own_host]
    if whole and len({Path(str(piece.host)).resolve() for piece in pieces}) > 1:
        raise CheckpointError(
            f"{', '.join(piece.name for piece in whole)} changed the whole host, so nothing else fits on it. "
            f"Serve what was trained on the same host together."
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
