"""Folders that are replaced whole or not at all, by one writer at a time.

A new folder is made beside its target, flushed to disk and then renamed. An old one steps aside for the length of one
rename; if the process dies just then, readers find it there and the next writer puts it back. Writers and readers of a
folder wait for each other; the lock leaves no file beside the folder and ends with the process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inlay.errors import CheckpointError
from inlay.storage.files import flush as _flush
from inlay.storage.locks import folder_locked

OURS = (".json", ".safetensors", ".md", ".bin")
"""Endings of the files that a checkpoint may hold; a folder with anything else is never replaced."""


@contextmanager
def replacing(folder: Path, known_by: tuple[str, ...]) -> Iterator[Path]:
    """A temporary folder that takes `folder`'s name at the end of the block.

    known_by: an old folder is replaced only if it has one of these files, and nothing that is not a checkpoint's.
    """
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_locked(folder, to_write=True):
        _settle(folder)
        _check_replaceable(folder, known_by)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
        try:
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                _flush(file)
            temporary.chmod(0o755)
            if folder.exists():
                folder.rename(_aside(folder))
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
        yield _aside(folder) if not folder.exists() and _aside(folder).exists() else folder


def _check_replaceable(folder: Path, known_by: tuple[str, ...]) -> None:
    if not folder.exists():
        return
    there = list(folder.iterdir()) if folder.is_dir() else [folder]
    if there and not any((folder / file).exists() for file in known_by):
        raise CheckpointError(f"{folder} exists and is not an inlay; it is left as it is. Choose another folder.")
    foreign = sorted(file.name for file in there if file.is_dir() or not file.name.endswith(OURS))
    if foreign:
        raise CheckpointError(
            f"{folder} also holds {', '.join(foreign[:5])}, which saving would delete; it is left as it is. "
            f"Move that away, or choose another folder."
        )


def _settle(folder: Path) -> None:
    """Finish what a killed writer left: put the old folder back, or away if the new one is there; drop its drafts."""
    old = _aside(folder)
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)
    for draft in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(draft, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
