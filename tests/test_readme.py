"""The README's commands are what they say. Its Python is run by test_docs.py; `make test` is what runs this."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_inlay_command_runs() -> None:
    commands = [c for c in re.findall(r"`(inlay [^`…|]+)`", README) if " " in c]
    assert commands
    for command in commands:
        words = [sys.executable, "-m", "inlay.cli", *command.split()[1:]]
        words += ["--help"] if words[3] == "demo" else []  # which takes minutes, and a download
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        if "--method pfeiffer" in command:
            assert "894,528" in done.stdout, "the count that the README's table has"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_two_commands_set_up_and_run() -> None:
    for target, what in (("demo", "inlay demo"), ("test", "pytest")):
        assert f"make {target}" in README
        plan = subprocess.run(
            [str(shutil.which("make")), "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        steps = [plan.index(step) for step in ("-m venv", "install", what)]
        assert steps == sorted(steps)


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
