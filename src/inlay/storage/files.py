"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
from pathlib import Path

PART = ".inlay-part"
"""The end of a file's name while it is incomplete."""
THROUGH = ("/dev/", "/proc/")
"""What has a path in these folders is written to as it is, and never replaced: open files and devices."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Write beside the target, flush to disk, then rename: a reader sees the old file or the new one."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_parts_of_the_dead(path)
    temporary = path.parent / f".{path.name}.{process_mark()}-{secrets.token_hex(4)}{PART}"
    try:
        with temporary.open("xb") as stream:  # with the mode that the user's new files have
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if path.is_file():
            temporary.chmod(path.stat().st_mode & 0o7777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_out(path: Path, content: str) -> None:
    """Write where a user says: a file is whole or not there; into a pipe, a device or what a link leads to."""
    there = str(path.absolute())
    if there.startswith(THROUGH) or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            stream.write(content.encode())
    else:
        write_whole(Path(os.path.realpath(path)), content)


def flush(path: Path) -> None:
    """Wait until a file that others wrote, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folder, and needs no flush of one
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Whether the disk is full, or what this user may have of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def digest(file: Path) -> str:
    """The sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def process_mark() -> str:
    """Identifies this machine and process, in the names of incomplete files and folders."""
    return f"{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-{os.getpid()}"


def is_dead(mark: str) -> bool:
    """Whether a process of this machine has ended; of other machines' nothing is known."""
    machine, _, process = mark.partition("-")
    if os.name == "nt" or machine != process_mark().partition("-")[0] or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass
    return False


def _remove_parts_of_the_dead(path: Path) -> None:
    """What killed writers of the same file left."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"([0-9a-f]{8}-[0-9]+)-\w+" + re.escape(PART))
    with os.scandir(path.parent) as entries:
        found = [(entry.path, match[1]) for entry in entries if (match := pattern.fullmatch(entry.name))]
    for part, mark in found:
        if is_dead(mark):
            Path(part).unlink(missing_ok=True)
