"""The one folder below which inlays may be loaded by request: no path leads out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from inlay.serve.errors import Forbidden, Invalid, NotFound, ServeError

MOST = 10_000
"""Files of one run."""


def below(root: Path, given: str) -> Path:
    """A folder below the root, with all that is in it; whatever leads elsewhere is refused unopened."""
    parts = given.replace("\\", "/").split("/")
    if not given or "\0" in given or given.startswith(("/", "\\", "~")) or ".." in parts or ":" in parts[0]:
        raise Invalid(f"path is {given[:80]!r}; give the way from the server's root folder down, without '..'.")
    if any(ord(char) < 32 or "\ud800" <= char <= "\udfff" for char in given) or len(given) > 1024:
        raise Invalid("path has characters that no folder's name has, or is too long.")
    real_root = Path(os.path.realpath(root))
    try:
        folder = Path(os.path.realpath(real_root / given))
        inside = folder.is_relative_to(real_root) and folder != real_root
        there = inside and folder.is_dir()
    except (OSError, ValueError):
        there, inside = False, True
    if not inside:
        raise Forbidden("path leads out of the server's root folder.")
    if not there:
        raise NotFound(f"the server's root folder has no folder {given[:200]!r}.")
    for number, (at, folders, files) in enumerate(os.walk(folder)):
        if number + len(files) > MOST:
            raise Invalid(f"{given[:80]!r} holds too many files for a run or an inlay.")
        for name in (*folders, *files):
            file = Path(at) / name
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(real_root):
                raise Forbidden(f"{name!r} in it leads out of the server's root folder.")
    return folder


def inside(root: Path) -> Callable[[Path], bool]:
    """Whether a folder is below the root, with all that is in it."""

    def check(folder: Path) -> bool:
        try:
            below(root, str(folder.relative_to(os.path.realpath(root))))
        except (ServeError, ValueError):
            return False
        return True

    return check
