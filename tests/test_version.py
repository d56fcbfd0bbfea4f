"""One version, in src/inlay/__init__.py; everything else takes it from there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import inlay

ROOT = Path(__file__).parent.parent


def test_the_command_line_says_the_same_version() -> None:
    done = subprocess.run([sys.executable, "-m", "inlay.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == inlay.__version__, (
        "installed before the number changed? make clean, then make test"
    )
    assert version("inlay") == inlay.__version__


def test_no_other_file_has_a_version_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/inlay/__init__.py"
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)


def test_the_changelog_begins_with_it() -> None:
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first
    assert first[1] == inlay.__version__
