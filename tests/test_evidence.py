"""Pages of evidence: their tables are what the committed records say, and the records say nothing that they may not."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy.stats import ttest_rel

from inlay.studies.file import Study, read_study
from inlay.studies.plan import view_of
from inlay.studies.ways import Slot

ROOT = Path(__file__).parents[1]
EVIDENCE = sorted(folder for folder in (ROOT / "evidence").iterdir() if folder.is_dir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]
SIZE = {"seeds": (), "rows": ()}


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
    command = re.compile(rf"^\$ inlay study table evidence/{re.escape(folder.name)}( --\w|$)", re.MULTILINE)
    assert any(command.search(page.read_text(encoding="utf-8")) for page in PAGES)


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
    """Or a part of it: fewer ways, seeds and rows, and nothing else."""
    said = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
    assert said["name"] == folder.name
    study, ships = Study(**said), read_study(folder.name, data_dir=Path("rows"))
    for name, way in study.ways.items():
        assert way.model_copy(update=SIZE) == ships.ways[name].model_copy(update=SIZE), name
    for rows in study.rows:
        assert study.by_rows.get(rows) == ships.by_rows.get(rows), rows
    here = SIZE | {"about": "", "hosts": {}, "data_dir": None, "by_rows": {}, "ways": {}}  # places, and what is above
    assert study.model_copy(update=here) == ships.model_copy(update=here)


@pytest.mark.parametrize("folder", EVIDENCE, ids=lambda folder: folder.name)
def test_every_record_is_of_a_cell_of_its_study(folder):
    """Records that no table reads are those of a study that was changed since."""
    assert {file.stem for file in (folder / "records").glob("*.json")} <= set(view_of(folder).names())


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


@pytest.fixture
def seen(monkeypatch):
    """Records of two ways, one of which stayed as it began in one of two runs."""
    costs = [{"flops_per_row": 4e9, "bytes_per_row": 2**21, "fixed_bytes": 2**22}] * 2
    costs += [{"flops_per_row": 1e9, "bytes_per_row": 2**20, "fixed_bytes": 2**20}] * 2
    names = [("full", 0), ("full", 1), ("inlay", 0), ("inlay", 1)]
    results = {
        f"{way}{seed}": {
            "costs": cost,
            "seconds": 10.0 + 2 * seed,
            "whole_seconds": 60.0,
            "scores": {"bleu": 0.5 + seed / 10, "nist": 4.0 + seed},
            "resumed": (way, seed) == ("full", 1),
            "best_step": 0 if (way, seed) == ("inlay", 1) else 9,
        }
        for (way, seed), cost in zip(names, costs, strict=True)
    }
    slots = [Slot("h", "a", way, 50, seed) for way, seed in names]
    filled = {slot: SimpleNamespace(name=f"{slot.way}{slot.seed}") for slot in slots}
    ways = {"full": SimpleNamespace(show=True), "inlay": SimpleNamespace(show=True)}
    view = SimpleNamespace(filled=filled, results=results, plan=SimpleNamespace(study=SimpleNamespace(ways=ways)))
    monkeypatch.setattr("inlay.studies.plan.view_of", lambda folder: view)


def test_what_a_step_costs(tool, seen):
    _, full, inlay = tool.step("x", "full").splitlines()
    assert full.split() == ["full", "4.0", "(1.00)", "2.0", "(1.00)", "4", "(1.00)", "11.0"]
    assert inlay.split() == ["inlay", "1.0", "(0.25)", "1.0", "(0.50)", "1", "(0.25)", "11.0"]


def test_every_metric_is_shown(tool, seen):
    head, full, inlay = (line.split() for line in tool.metrics("x").splitlines())
    assert head == ["a", "runs", "bleu", "nist"]
    assert (full, inlay) == (["full", "2", "0.550", "4.500"], ["inlay", "2", "0.550", "4.500"])


def test_stars_that_hold_from_seed_to_seed_are_counted(tool):
    folder = "evidence/adamix-nlg-small"
    scores, p = {}, {}
    for row in tool._runs(folder):
        scores.setdefault(row["way"], []).append(float(row["score"]))
        p[row["way"]] = float(row["p"] or 1)
    stars = [way for way in ("full", "adamix") if p[way] < 0.05]
    gains = {way: [a - b for a, b in zip(scores[way], scores["lora"], strict=True)] for way in stars}
    same = sum(len({gain > 0 for gain in each}) == 1 for each in gains.values())
    likely = sum(ttest_rel(scores[way], scores["lora"]).pvalue < 0.05 for way in stars)
    _, line, whole = (text.split() for text in tool.stars(folder).splitlines())
    assert line[1:] == whole[1:] == [str(n) for n in (2, len(stars), same, likely)]
    assert stars


def test_time_before_a_break_is_not_known(tool, seen):
    assert tool.spent("x") == "4 runs, at least 4 minutes of one core"


def test_runs_that_ended_as_they_began(tool, seen):
    _, full, inlay = tool.unmoved("x").splitlines()
    assert (full.split(), inlay.split()) == (["full", "50", "2", "0"], ["inlay", "50", "2", "1"])


def test_where_nothing_has_trained_yet_nothing_is_listed(tool, monkeypatch):
    view = SimpleNamespace(filled={}, results={})
    monkeypatch.setattr("inlay.studies.plan.view_of", lambda folder: view)
    assert len(tool.unmoved("x").splitlines()) == 1
    monkeypatch.setattr(
        tool, "_inlay", lambda *arguments: "host,rows,task,way,seed,state,score\nh,50,a,l,0,done,70.0\n"
    )
    assert len(tool.below("x", "l").splitlines()) == 1


def test_the_demos_words_are_of_the_seeds_that_were_asked_for(tool):
    folder = str(ROOT / "evidence" / "demo")
    every, some = tool.told(folder).splitlines(), tool.told(folder, "0,1,2", "fused,full").splitlines()
    assert "seeds are few" not in "".join(every)
    assert sum("3 seeds are few" in line and "over full fine-tuning" in line for line in some) == 2


def test_runs_that_are_far_below_are_named_one_by_one(tool, monkeypatch, tmp_path):
    told = (
        "host,rows,task,way,seed,state,score,validation,cell\n"
        "h,50,a,l,0,done,70.0,60.0,x\nh,50,a,f,0,done,67.5,61.0,low\nh,50,b,l,0,done,70.0,60.0,x\n"
        "h,50,b,f,0,done,68.5,61.0,near\nh,50,a,g,0,done,10.0,61.0,other\nh,50,c,f,0,done,10.0,1.0,alone\n"
    )
    monkeypatch.setattr(tool, "_inlay", lambda *arguments: told)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "low.json").write_text('{"best_step": 24}')
    found = [line.split() for line in tool.far(str(tmp_path), "l", "f").splitlines()[1:]]
    assert found == [["f", "50", "a", "0", "-2.5", "+1.0", "24"]]


def test_what_a_search_tried_has_the_scores_of_what_it_chose(tool):
    folder = "evidence/compacter-small"
    table = {row["way"]: row for row in tool._runs(folder) if (row["task"], row["seed"]) == ("sst2", "0")}
    lines = [line.rsplit(maxsplit=5) for line in tool.tried(folder, "sst2").splitlines()[1:]]
    assert len(lines) == 2 * (len(table) - 1), "T5 as it is has nothing to choose"
    for way, point, runs, validation, judged, chosen in lines:
        best = max(float(other[3]) for other in lines if other[0] == way)
        assert (runs, chosen == "1") == ("1", point == table[way]["chosen"])
        if chosen == "1":
            assert float(validation) == best
            assert judged == f"{float(table[way]['score']):.1f}"


def test_a_search_that_has_candidates_left_to_run_is_left_out(tool, tmp_path):
    folder = shutil.copytree(ROOT / "evidence" / "adamix-steps-small", tmp_path / "adamix-steps-small")
    whole = view_of(folder)
    searched = next(cells for slot, cells in whole.cells.items() if slot.way == "pfeiffer" and slot.task == "sst2")
    (folder / "records" / f"{searched[-1].name}.json").unlink()
    runs = {line.split()[0]: line.split()[2] for line in tool.tried(str(folder)).splitlines()[1:]}
    assert runs == {"pfeiffer": "1", "adamix": "2"}
