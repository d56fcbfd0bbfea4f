"""One process at a time, on every system: a lock ends with its process, however that ends.

`locked(file)` holds a lock file that the caller names. `folder_locked(folder)` keeps its lock file in the cache folder,
under a digest of the folder's path, so that nothing is left beside what the user saved.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
def folder_locked(folder: Path, *, to_write: bool = False) -> Iterator[None]:
    """Read or replace a folder alone: others wait. Its path must be resolved, so that links lead to the same lock.

    On a system that is read-only everywhere a reader needs no lock: nobody replaces the folder there.
    """
    name = hashlib.sha256(os.fsencode(os.path.normcase(folder))).hexdigest()[:32]
    place = _lock_folder()
    if place is None and to_write:
        raise OSError(
            errno.EROFS, "there is no writable folder for a lock: set INLAY_CACHE to one", str(cache_folder())
        )
    with locked(place / f"{name}.lock") if place is not None else nullcontext():
        yield


def _lock_folder() -> Path | None:
    """In the cache folder; if that cannot be written, in the system's folder for temporary files; or nowhere."""
    for parent in (cache_folder, _temporary_folder):
        with suppress(OSError):
            folder = parent() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


def _temporary_folder() -> Path:
    """Ours alone: everybody can make a folder of this name there, and put links in it in place of our locks."""
    folder = Path(tempfile.gettempdir()) / f"inlay-{_user()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to somebody else", str(folder))
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
