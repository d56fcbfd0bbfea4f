"""One process at a time, on every system: a lock ends with its process, however that ends.

`locked(file)` holds a lock file that the caller names. `folder_locked(folder)` keeps its lock file in the cache folder,
under a digest of the folder's path, so that nothing is left beside what the user saved.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from inlay.storage.cache import cache_folder


class InUse(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file for the length of the block. Without `wait`, a lock that is taken raises `InUse` at once."""
    try:
        lock = FileLock(file, timeout=-1 if wait else 0).acquire(poll_interval=0.01)
    except Timeout:
        raise InUse(str(file)) from None
    with lock:
        yield


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Read or replace a folder alone: others wait. Its path must be resolved, so that links lead to the same lock."""
    name = hashlib.sha256(os.fsencode(os.path.normcase(folder))).hexdigest()[:32]
    with locked(_lock_folder() / f"{name}.lock"):
        yield


def _lock_folder() -> Path:
    """In the cache folder; where that cannot be written, in the system's folder for temporary files."""
    for parent in (cache_folder(), Path(tempfile.gettempdir()) / f"inlay-{_user()}"):
        folder = parent / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise OSError(f"no lock can be written: neither {cache_folder()} nor {tempfile.gettempdir()} is writable.")


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
