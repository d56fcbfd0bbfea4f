"""Pages of evidence: their tables are what the committed records say, and the records say nothing that they may not."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVIDENCE = sorted(folder for folder in (ROOT / "evidence").iterdir() if folder.is_dir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("evidence_tool", ROOT / "tools" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + page.stem)
def test_tables_are_what_their_commands_print(page, tool):
    text = page.read_text(encoding="utf-8")
    assert tool.renewed(text) == text
    assert len(tool.BLOCK.findall(text)) == text.count("\n$ ")  # none is written so that it is not found


@pytest.mark.parametrize("folder", EVIDENCE, ids=lambda folder: folder.name)
def test_every_folder_of_records_is_on_a_page(folder):
    assert any(f"\n$ inlay study table evidence/{folder.name}\n" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("folder", EVIDENCE, ids=lambda folder: folder.name)
def test_records_have_no_rows_and_no_places(folder):
    for file in folder.rglob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"/(tmp|home|root|work|Users)/", text), file
        assert len(text) < 60_000, file
        if file.parent.name == "records":
            record = json.loads(text)
            texts = [value for value in record.values() if isinstance(value, str) and " " in value]
            assert not [value for value in texts if len(value) > 200], file


@pytest.mark.parametrize("folder", EVIDENCE, ids=lambda folder: folder.name)
def test_a_study_of_records_is_one_that_ships(folder):
    study = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
    assert study["name"] == folder.name
    assert (ROOT / "src" / "inlay" / "recipes" / "studies" / f"{folder.name}.yaml").is_file()


def test_another_number_is_found(tool):
    page = "```\n$ inlay study table evidence/x\nold 1.0\n```\n"
    wanted = "```\n$ inlay study table evidence/x\nnew 2.0 by inlay study table evidence/x\n```\n"
    assert tool.renewed(page, lambda command: f"new 2.0 by {command}") == wanted
    assert tool.renewed("no table") == "no table"


def test_runs_below_another_way(tool, monkeypatch):
    table = (
        "host,rows,task,way,seed,state,score\n"
        "h,50,a,logreg,0,done,70.0\nh,50,a,logreg,1,done,71.0\nh,50,a,single,0,done,67.5\nh,50,a,single,1,done,73.0\n"
        "h,50,b,single,0,done,10.0\nh,50,a,single,2,waiting,\n"
    )
    monkeypatch.setattr(tool, "_inlay", lambda *arguments: table)
    head, line = tool.below("x", "logreg").splitlines()
    assert "below logreg" in head
    assert line.split() == ["single", "50", "2", "-0.2", "-2.5", "+2.0", "1"]
