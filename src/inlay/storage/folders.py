"""Folders that are replaced whole or not at all, by one writer at a time.

A new folder is made beside its target, flushed to disk and then renamed. An old one steps aside for the length of one
rename; if the process dies just then, readers find it there and the next writer puts it back. Writers and readers of a
folder wait for each other; the lock leaves no file beside the folder and ends with the process.

    .<name>.new-<process>-<random>    a draft                  each holds the file MARK, which says whose process it is:
    .<name>.old-<random>              what stepped aside       a folder without it is not ours, whatever its name
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inlay.errors import CheckpointError
from inlay.storage.files import flush as _flush
from inlay.storage.files import is_dead, process_mark
from inlay.storage.locks import folder_locked

OURS = (".json", ".safetensors", ".md", ".bin")
"""Endings of the files that a checkpoint may hold; a folder with anything else is never replaced."""
MARK = ".inlay-temporary"
"""The file that makes a draft, or a folder that stepped aside, ours to remove."""


@contextmanager
def replacing(folder: Path, known_by: tuple[str, ...], *, holds: tuple[str, ...] | None = OURS) -> Iterator[Path]:
    """A temporary folder that takes `folder`'s name at the end of the block.

    known_by: an old folder is replaced only if it has one of these files, and nothing that is not a checkpoint's.
    holds:    the endings of files that it may have; None: any.
    """
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_locked(folder, to_write=True):
        _settle(folder)
        _check_replaceable(folder, known_by, holds)
        temporary = folder.parent / f".{folder.name}.new-{process_mark()}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            _mark(temporary)
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                _flush(file)
            if folder.exists():
                temporary.chmod(folder.stat().st_mode & 0o7777)
                _mark(folder)
                folder.rename(folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}"))
            temporary.rename(folder)
            _flush(folder.parent)
            _settle(folder)
        except BaseException:
            _settle(folder)
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def reading(folder: Path) -> Iterator[Path]:
    """Where to read a folder for the length of the block, in which no writer replaces it."""
    folder = Path(os.path.realpath(folder))
    if not folder.parent.is_dir():
        yield folder
        return
    with folder_locked(folder):
        aside = [] if folder.exists() else _marked(folder, "old")
        yield aside[0] if aside else folder


def check_new(folder: Path, overwrite: bool = False) -> None:
    """Refuse to write over something unless told to; what is no checkpoint is never written over."""
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists and is left as it is. Choose another folder, or say that it may be replaced: `overwrite`"
        )


def _check_replaceable(folder: Path, known_by: tuple[str, ...], holds: tuple[str, ...] | None) -> None:
    if not folder.exists():
        return
    there = list(folder.iterdir()) if folder.is_dir() else [folder]
    if there and not any((folder / file).exists() for file in known_by):
        raise CheckpointError(f"{folder} exists and is not an inlay; it is left as it is. Choose another folder.")
    foreign = [] if holds is None else [f.name for f in there if f.is_dir() or not f.name.endswith((*holds, MARK))]
    if foreign:
        raise CheckpointError(
            f"{folder} also holds {', '.join(sorted(foreign)[:5])}, which saving would delete; it is left as it is. "
            f"Move that away, or choose another folder."
        )


def _settle(folder: Path) -> None:
    """Finish what a killed writer left: put the old folder back, or away if the new one is there; drop its drafts."""
    for old in _marked(folder, "old"):
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)
    with suppress(OSError):
        (folder / MARK).unlink(missing_ok=True)
    for draft in _beside(folder, "new"):
        mark = draft.name.removeprefix(f".{folder.name}.new-").rpartition("-")[0]
        if mark == process_mark() or is_dead(mark):
            if (draft / MARK).is_file():
                shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # killed before it was marked: removed only if there is nothing in it
                draft.rmdir()


def _marked(folder: Path, what: str) -> list[Path]:
    """The folders beside this one that are drafts of it, or itself stepped aside, and ours."""
    return sorted(path for path in _beside(folder, what) if (path / MARK).is_file())


def _beside(folder: Path, what: str) -> list[Path]:
    prefix = f".{folder.name}.{what}-"
    with os.scandir(folder.parent) as entries:
        return [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]


def _mark(folder: Path) -> None:
    (folder / MARK).write_text(process_mark(), encoding="utf-8")
