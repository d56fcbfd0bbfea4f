"""Cells: run once, shared, named by what decides them, chosen by validation rows alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inlay import InlayError
from inlay.cli import main
from inlay.errors import CheckpointError
from inlay.runs.folder import Run
from inlay.storage.plain_json import digest_of
from inlay.studies.cells import StudyFolder
from inlay.studies.file import study_from
from inlay.studies.formats import as_csv, as_text
from inlay.studies.identity import rows_digest
from inlay.studies.plan import Plan, View, view_of
from inlay.studies.records import Records, _without_places, export
from inlay.studies.schedule import Schedule
from inlay.studies.statistics import points
from inlay.studies.tables import tables
from inlay.studies.ways import _deciding_few
from inlay.studies.worker import _forget_peak
from tests.studies.tiny import FILE, Inline, run_here, study_in
from tests.training.small import rows, write_rows


def scores(view):
    return {str(slot): view.results[cell.name]["scores"] for slot, cell in view.filled.items()}


def test_every_slot_is_filled_and_shared_cells_run_once(finished):
    _, view, ran = finished
    assert set(view.filled) == set(view.plan.drafts)
    assert len(ran) == len(set(ran)) == 4 + 2 + 8 + 4
    sources = {cell.name for slot, cell in view.filled.items() if slot.way == "source"}
    fusions = [cell for slot, cell in view.filled.items() if slot.way == "fused"]
    assert {member for cell in fusions for member in cell.members[:-1]} == sources
    for cell in fusions:  # never the target's own among the sources, its own last
        assert [member.task for member in cell.draft.members] == [
            *(t for t in "ab" if t != cell.slot.task),
            cell.slot.task,
        ]


def test_a_finished_study_runs_nothing_again(here, finished):
    out, view, _ = finished
    again, ran = run_here(study_in(here), out)
    assert ran == []
    assert scores(again) == scores(view)


def test_a_cell_is_a_run_folder_that_can_be_used(finished):
    _, view, _ = finished
    slot, cell = next((slot, cell) for slot, cell in view.filled.items() if slot.way == "fused")
    run = Run.opened(view.folder.cell(cell.name))
    assert run.record()["status"] == "finished"
    assert run.record()["scores"] == view.results[cell.name]["scores"]
    assert run.report.is_file()
    assert run.record()["seed"] == slot.seed


def test_a_cells_answers_give_its_score(finished):
    _, view, _ = finished
    for result in view.results.values():
        assert points(result).mean() == pytest.approx(result["scores"]["accuracy"], abs=1e-9)
        assert len(points(result)) == 40


def test_a_new_way_leaves_the_others_valid(here, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    ways = FILE["ways"] | {"head": {"kind": "head"}}
    _, ran = run_here(study_in(here, ways=ways, name="tiny"), out)
    assert len(ran) == 4


@pytest.mark.parametrize("change", ["seed", "setting", "rows", "host"])
def test_what_decides_a_cell_is_in_its_name(here, finished, tmp_path, change):
    _, view, _ = finished
    before = set(view.names())
    shutil.copytree(here / "bert", tmp_path / "bert")
    shutil.copytree(here / "data", tmp_path / "data")
    changed = {}
    if change == "seed":
        changed = {"seeds": [7, 8]}
    elif change == "setting":
        changed = {"settings": FILE["settings"] | {"batch_size": 8}}
    elif change == "rows":
        for name in "abc":
            write_rows(tmp_path / "data" / name / "train.jsonl", rows(150, seed=3))
    else:
        config = json.loads((tmp_path / "bert" / "config.json").read_text())
        (tmp_path / "bert" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    after = View(Plan.of(study_in(tmp_path, **changed)), StudyFolder(tmp_path / "none")).look().names()
    kept = {name for name, cell in after.items() if name in before}
    assert after
    assert {after[name].slot.way for name in kept} <= {"seed": {"source"}, "setting": {"logreg"}}.get(change, set())


def test_rows_that_a_task_names_itself_are_in_a_cells_name(here, tmp_path):
    """A folder of rows counts by what is in it, wherever it is said."""
    shutil.copytree(here / "bert", tmp_path / "bert")
    shutil.copytree(here / "data", tmp_path / "data")

    def names():
        tasks = {name: {"data_dir": str(tmp_path / "data")} for name in "abc"}
        said = {name: value for name, value in (FILE | {"tasks": tasks}).items() if name != "data_dir"}
        study = study_from(said, "tiny", hosts={"bert": str(tmp_path / "bert")})
        return set(View(Plan.of(study), StudyFolder(tmp_path / "none")).look().names())

    before = names()
    for name in "abc":
        write_rows(tmp_path / "data" / name / "train.jsonl", rows(150, seed=3))
    assert before
    assert not before & names()


def test_what_few_rows_take_by_themselves_is_in_a_cells_name(here, tmp_path, monkeypatch):
    """A setting that is said as its default holds against the recipe for few rows; other recipes are not it."""

    def names(rows: int, **way: Any) -> set[str]:
        study = study_in(here, ways={"one": way}, rows=[rows], against="one", seeds=[0], tasks=["a"], groups=None)
        return set(View(Plan.of(study), StudyFolder(tmp_path / "none")).look().names())

    unsaid = names(32)
    assert names(32) == unsaid
    for said in ({"pairs": 0.0}, {"head_first": False}, {"recipe": "default"}):
        assert names(32, **said).isdisjoint(unsaid)
        assert names(1001, **said) == names(1001)  # these rows are not few
    monkeypatch.setattr("inlay.runs.settings.FEW_LABELS", "default")  # as if the recipe had been changed
    _deciding_few.cache_clear()
    assert names(32).isdisjoint(unsaid)
    _deciding_few.cache_clear()


def test_where_things_are_is_not_in_a_cells_name(here, finished, tmp_path):
    shutil.copytree(here / "bert", tmp_path / "bert")
    shutil.copytree(here / "data", tmp_path / "elsewhere" / "data")
    shutil.move(tmp_path / "elsewhere" / "data", tmp_path / "data")
    _, view, _ = finished
    after = View(Plan.of(study_in(tmp_path)), StudyFolder(tmp_path / "none")).look()
    assert set(after.names()) < set(view.names())


# selection


def test_the_judged_rows_choose_nothing(here, finished, tmp_path):
    """Judged scores are turned around in every candidate: the same ones are chosen, and the fusions are the same cells."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    _, view, _ = finished
    folder = StudyFolder(out)
    for name, result in view.results.items():
        other = {key: value for key, value in result.items() if key not in ("sha256", "format", "cell")}
        other["scores"] = {metric: 1 - value for metric, value in result["scores"].items()}
        other["said"] = "".join("10"[int(label)] for label in result["said"])
        folder.write_result(name, other)
    after = view_of(out)
    assert {str(s): c.name for s, c in after.filled.items()} == {str(s): c.name for s, c in view.filled.items()}
    single = [slot for slot in view.filled if slot.way == "single"]
    best = {slot: max(c.name for c in view.cells[slot]) for slot in single}
    for slot in single:  # and the validation rows do choose
        for cell in view.cells[slot]:
            result = {k: v for k, v in view.results[cell.name].items() if k not in ("sha256", "format", "cell")}
            folder.write_result(cell.name, result | {"selected": float(cell.name == best[slot])})
    assert {slot: view_of(out).filled[slot].name for slot in single} == best


@pytest.mark.parametrize("written", ["alike", "otherwise"])
def test_a_planted_leak_is_refused(here, tmp_path, written):
    """The judged rows are put among the rows that choose, maybe from another file: the cells fail, and say why."""
    shutil.copytree(here / "bert", tmp_path / "bert")
    shutil.copytree(here / "data", tmp_path / "data")
    for name in "bc":
        told = [json.loads(line) for line in (tmp_path / "data" / name / "test.jsonl").read_text().splitlines()]
        if written == "otherwise":
            told = [row | {"text": f" {row['text'].capitalize()}  "} for row in told]
        write_rows(tmp_path / "data" / name / "validation.jsonl", told)
    ways = {"logreg": {"kind": "embeddings"}, "head": {"kind": "head"}}
    view, _ = run_here(study_in(tmp_path, ways=ways, against=None, seeds=[0]), tmp_path / "out")
    assert not view.filled
    assert not list((tmp_path / "out" / "cells").glob("*/run.json")), "before anything is trained"
    assert len(view.failures) == 4
    assert all("judged texts are validation rows as well" in failure.error for failure in view.failures.values())


@pytest.mark.parametrize("search", ["first", "mean"])
def test_one_point_of_the_grid_for_all_seeds(here, finished, tmp_path, search):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    ways = {"single": FILE["ways"]["single"]}
    view, ran = run_here(study_in(here, search=search, ways=ways), out)
    assert ran == []
    points = {(slot.task, cell.draft.point["lr"]) for slot, cell in view.filled.items()}
    assert len(points) == 2
    if search == "mean":
        for slot, cell in view.filled.items():
            means = {}
            for seed in (0, 1):
                for other in view.cells[slot.__class__(slot.host, slot.task, slot.way, slot.rows, seed)]:
                    means.setdefault(other.draft.point["lr"], []).append(view.results[other.name]["selected"])
            assert sum(means[cell.draft.point["lr"]]) == max(map(sum, means.values()))


# what breaks


def test_a_broken_cell_is_shown_and_the_rest_goes_on(here, tmp_path):
    """A learning rate at which training diverges."""
    ways = {
        "mad": {"lr": 1e30, "options": {"size": 4}},
        "after": {"kind": "fusion", "members": [{"way": "single", "tasks": "targets"}, {"way": "mad"}]},
        "single": {"options": {"size": 4}},
    }
    view, _ = run_here(study_in(here, ways=ways, seeds=[0]), tmp_path / "out")
    assert {slot.way for slot in view.failed} == {"mad", "after"}
    assert {slot.way for slot in view.filled} == {"single"}
    text = as_text(tables(view), view)
    assert text.count("failed") >= 4
    assert "diverged" in next(iter(view.failures.values())).error


def test_a_candidate_that_fails_is_out_of_the_search(here, tmp_path):
    ways = {"single": {"options": {"size": 4}, "grid": {"lr": [1e30, 0.02]}}}
    view, _ = run_here(study_in(here, ways=ways, seeds=[0]), tmp_path / "out")
    assert {cell.draft.point["lr"] for cell in view.filled.values()} == {0.02}
    assert len(view.failures) == 2


@pytest.mark.parametrize("broken", ["member", "candidates"])
def test_the_mean_of_all_seeds_is_of_those_that_have_not_failed(here, finished, tmp_path, broken):
    out, before, _ = finished
    shutil.copytree(out, tmp_path / "out")
    study, folder = study_in(here, search="mean"), StudyFolder(tmp_path / "out")
    gone = {slot for slot in before.cells if (slot.seed, slot.task) == (1, "b") and slot.way in ("single", "fused")}
    for cell in (
        cell for slot in gone if broken == "candidates" or slot.way == "single" for cell in before.cells[slot]
    ):
        shutil.rmtree(folder.cell(cell.name))
        folder.note_failure(cell.name, "it broke", final=True)
    view, _ = run_here(study, tmp_path / "out")
    assert view.failed == gone
    assert set(view.filled) == set(view.plan.drafts) - gone
    assert all(cell.name in view.results for cell in view.filled.values())


def test_an_altered_result_is_refused(finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    file = next((out / "cells").glob("*/cell.json"))
    file.write_text(file.read_text().replace('"seed": 1', '"seed": 3').replace('"seed": 0', '"seed": 2'))
    with pytest.raises(InlayError, match="does not match its sha256"):
        view_of(out)
    file.write_bytes(file.read_bytes()[:-40] + b"\xff")
    with pytest.raises(InlayError, match=r"cut or altered: .*Delete the folder"):
        view_of(out)


# without weights


def respoken(file: Path, changes: dict[str, Any]) -> None:
    """A signed file that says something else, signed again: a digest is no signature."""
    found = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"} | changes
    file.write_text(json.dumps(found | {"sha256": digest_of(found)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": {}}, {"scores": {"=HYPERLINK(1)": 1.0}}, {"scores": {"accuracy": "x"}}, {"scores": None}, {"selected": "x"},
        {"judged": "x"}, {"rows": {"test": 40}}, {"trained_parameters": "=1+1"}, {"seconds": [None]}, {"said": "<script>"},
        {"costs": {"bytes_per_row": [None]}}, {"history": [[1]]}, {"versions": -1}, {"point": {"@x": 1.0}}, {"task": "b"},
        {"attention": {"members": ["a"], "places": {"x": []}}}, {"peak_megabytes": True}, {"validation": "x"},
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(finished, tmp_path, changes):
    export(finished[0], tmp_path / "records")
    file = sorted((tmp_path / "records" / "records").glob("*.json"))[0]
    respoken(file, changes)
    with pytest.raises(InlayError, match=f"{file.name} is not the result of a cell: {next(iter(changes))}|Value error"):
        view_of(tmp_path / "records")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"study": None}, "study"), ({"study": {}}, "it has no name"), ({"hosts": "x"}, "hosts"), ({"rows": {}}, "task 'a' has no digest"),
        ({"evil": 1}, "evil"), ({"ways": {"=cmd": {}}}, "way '=cmd'"), ({"groups": {"x": ["y"]}}, "no task 'y'"),
    ],
)  # fmt: skip
def test_a_study_of_another_form_is_refused(finished, tmp_path, changes, says):
    export(finished[0], tmp_path / "records")
    file = tmp_path / "records" / "study.json"
    inside = json.loads(file.read_text())["study"]
    respoken(file, {"study": inside | changes} if {"ways", "groups"} & changes.keys() else changes)
    with pytest.raises(InlayError, match=says):
        view_of(tmp_path / "records")


@pytest.mark.parametrize(
    "part", [{}, [], {"cell": "..", "task": "a"}, {"cell": "/etc", "task": "a"}, {"cell": "a", "task": "../b"}]
)
def test_a_part_of_a_joint_cell_leads_nowhere_else(tmp_path, part):
    folder = StudyFolder(tmp_path)
    folder.cell("one").mkdir(parents=True)
    (folder.cell("one") / "part.json").write_text(json.dumps(part))
    for ask in (folder.place, folder.joint_of, folder.has_weights):
        with pytest.raises(InlayError, match="does not say of which joint cell"):
            ask("one")


def test_records_give_the_same_table_and_a_study_goes_on_from_them(here, finished, tmp_path):
    out, view, _ = finished
    count, size = export(out, tmp_path / "records")
    assert count == len(view.results)
    assert size < 6000 * count
    text = "".join(file.read_text() for file in (tmp_path / "records").rglob("*.json"))
    assert "good" not in text
    assert "fine" not in text  # no word of a row
    kept = view_of(tmp_path / "records")
    assert as_csv(tables(kept), kept) == as_csv(tables(view), view)
    assert str(here) not in text  # nor where things were
    shutil.copytree(tmp_path / "records", tmp_path / "on")
    ways = FILE["ways"] | {"static": FILE["ways"]["fused"] | {"value": False, "tasks": ["c"]}}
    on, ran = run_here(study_in(here, ways=ways, name="tiny"), tmp_path / "on")
    assert len(ran) == 2 + 2 + 2  # two fusions, and what they are made of: two sources, two singles
    assert scores(on) == scores(on) | scores(view)
    again = [name for name in ran if name in view.results]
    assert len(again) == 4
    for name in again:  # for its weights; the record stays, and is what was trained again, bit for bit
        new = json.loads((tmp_path / "on" / "cells" / name / "cell.json").read_text())
        assert {k: new[k] for k in ("scores", "said", "history")} == {
            k: view.results[name][k] for k in ("scores", "said", "history")
        }
        assert (tmp_path / "on" / "records" / f"{name}.json").is_file()


def test_a_run_with_records_adds_to_them_and_goes_on_from_them(here, finished, tmp_path, capsys):
    """As on another machine: the study's folder is new, the records are what was committed."""
    kept = tmp_path / "kept"
    export(finished[0], kept)
    removed = sorted((kept / "records").iterdir())[:1]
    before = {file.name: file.read_bytes() for file in (kept / "records").iterdir()}
    removed[0].unlink()
    ways = FILE["ways"] | {"mad": {"lr": 1e30, "options": {"size": 4}, "tasks": ["c"], "seeds": [0]}}
    study = study_in(here, ways=ways)
    folder, records, engine = StudyFolder(tmp_path / "new"), Records(kept), Inline()
    plan = Plan.of(study)
    folder.claim(plan.facts())
    assert records.bring(folder) == len(before) - 1
    view = Schedule(View(plan, folder), engine, records=records).run()
    assert set(view.filled) | view.failed == set(plan.drafts)
    assert removed[0].stem in engine.ran
    after = {file.name: file.read_bytes() for file in (kept / "records").iterdir()}
    assert after.keys() == before.keys(), "the one that was missing is there again"
    assert all(after[name] == before[name] for name in before if name != removed[0].name)
    assert "failed" in as_text(tables(view_of(kept)), view_of(kept))
    assert str(here) not in "".join(file.read_text() for file in kept.rglob("*.json"))
    main(["study", "report", str(kept)])
    main(["study", "figure", str(kept), "differences", "--out", str(tmp_path / "one.svg")])
    assert (tmp_path / "one.svg").is_file()


def test_records_of_older_code_still_give_their_table(here, finished, tmp_path, monkeypatch):
    """What would be trained anew today is still what was published then."""
    export(finished[0], tmp_path / "kept")
    before = as_csv(tables(view_of(tmp_path / "kept")), view_of(tmp_path / "kept"))
    monkeypatch.setattr("inlay.studies.plan.CODE", 99)
    monkeypatch.setattr(Plan.__init__, "__defaults__", (99,))
    assert as_csv(tables(view_of(tmp_path / "kept")), view_of(tmp_path / "kept")) == before
    assert not View(Plan.of(study_in(here)), StudyFolder(tmp_path / "kept")).look().filled


def test_records_of_something_else_are_refused(here, finished, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("hello")
    for wrong in (tmp_path / "letters", finished[0]):
        with pytest.raises(InlayError, match=r"holds no study|own folder"):
            export(finished[0], wrong)
    export(finished[0], tmp_path / "kept")
    with pytest.raises(InlayError, match="records of the study 'tiny', not of 'other'"):
        Records(tmp_path / "kept").check(StudyFolder(tmp_path / "out"), Plan.of(study_in(here, name="other")).facts())
    file = next((tmp_path / "kept" / "records").iterdir())
    file.write_text(file.read_text()[:-40])
    with pytest.raises(InlayError, match="cut or altered"):
        Records(tmp_path / "kept").bring(StudyFolder(tmp_path / "out"))


@pytest.mark.parametrize("what", ["host", "rows"])
def test_records_of_other_files_are_refused_and_left_as_they_are(here, finished, tmp_path, capsys, what):
    """A host from elsewhere would begin a committed study anew, and its tables would be empty from then on."""
    out, kept, other = finished[0], tmp_path / "kept", tmp_path / "other"
    export(out, kept)
    before = {file: file.read_bytes() for file in kept.rglob("*.json")}
    for name in ("bert", "data"):
        shutil.copytree(here / name, other / name)
    if what == "host":
        config = other / "bert" / "config.json"
        config.write_text(config.read_text() + "\n")
    else:
        write_rows(other / "data" / "a" / "train.jsonl", rows(150, seed=5))
    plan = Plan.of(study_in(other))
    seen = "the host 'bert'" if what == "host" else "the rows of 'a'"
    with pytest.raises(InlayError, match=f"records of other files than those given here: {seen}\\."):
        Records(kept).check(StudyFolder(tmp_path / "new"), plan.facts())
    StudyFolder(tmp_path / "again").claim(plan.facts())
    with pytest.raises(InlayError, match="records of other files"):
        export(tmp_path / "again", kept)
    assert {file: file.read_bytes() for file in kept.rglob("*.json")} == before
    Records(kept).check(StudyFolder(tmp_path / "new"), Plan.of(study_in(here)).facts())


def test_export_and_table_by_command(finished, tmp_path, capsys):
    out, _, _ = finished
    main(["study", "export", str(out), "--out", str(tmp_path / "records")])
    main(["study", "table", str(tmp_path / "records"), "--format", "markdown"])
    told = capsys.readouterr().out
    assert "| way |" in told
    main(["study", "show", str(tmp_path / "records"), "--json"])
    assert json.loads(capsys.readouterr().out)["states"] == {"done": 14, "chosen": 4}


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are Linux's")
def test_a_cells_peak_does_not_count_what_earlier_ones_left_free():
    script = (
        "import torch\n"
        "from inlay.runs.facts import peak_megabytes\n"
        "from inlay.studies.worker import _forget_peak\n"
        "_forget_peak()\n"
        "before = peak_megabytes()\n"
        "tensors = [torch.ones(16_000) for _ in range(6000)]\n"  # 64 KB each: below what is mapped by itself
        "last = tensors.pop()\n"  # keeps the heap from shrinking by itself
        "assert peak_megabytes() > before + 300\n"
        "del tensors\n"
        "_forget_peak()\n"
        "assert peak_megabytes() < before + 100, (before, peak_megabytes())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are Linux's")
def test_a_peak_is_not_that_of_the_process_that_started_this_one():
    child = "from inlay.runs.facts import peak_megabytes; print(peak_megabytes())"
    large = f"import subprocess, sys; held = b'1' * 1_500_000_000; subprocess.run([sys.executable, '-c', {child!r}])"
    told = subprocess.run([sys.executable, "-c", large], check=True, capture_output=True, text=True)
    assert float(told.stdout) < 1000


def test_where_peaks_cannot_be_forgotten_cells_run_all_the_same(monkeypatch):
    def refuse(name: object) -> None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")  # as on Windows

    monkeypatch.setattr("inlay.studies.worker.ctypes.CDLL", refuse)
    monkeypatch.setattr("inlay.studies.worker.sys.platform", "win32")
    _forget_peak()


def test_cells_whose_lease_cannot_be_written_are_given_up(here, tmp_path):
    """They were tried again for ever."""
    study = study_in(here, ways={"logreg": {"kind": "embeddings"}}, against=None, seeds=[0], tasks=["a"], groups=None)
    out = tmp_path / "out"
    StudyFolder(out).claim(Plan.of(study).facts())
    (out / "leases").write_text("no folder")
    view, ran = run_here(study, out)
    (failure,) = view.failures.values()
    assert "leases" in failure.error
    assert len(ran) == failure.tries
    assert not view.filled


def test_only_the_rows_that_are_read_are_in_a_cells_name(tmp_path):
    """Not those of an editor's copy, or of another format beside them."""
    folder = tmp_path / "rows" / "rte"
    write_rows(folder / "train.jsonl", [{"premise": "old", "hypothesis": "h", "label": "entailment"}])
    for beside in ("train.jsonl~", "train.tsv", "train.parquet"):
        (folder / beside).write_text("x")
    before = rows_digest("rte", {}, tmp_path / "rows")
    (folder / "train.tsv").write_text("y")
    assert rows_digest("rte", {}, tmp_path / "rows") == before
    write_rows(folder / "train.jsonl", [{"premise": "new", "hypothesis": "h", "label": "entailment"}])
    assert rows_digest("rte", {}, tmp_path / "rows") != before


def test_a_cell_that_another_runner_forgives_meanwhile_has_not_failed(tmp_path, monkeypatch):
    folder = StudyFolder(tmp_path)
    folder.note_failure("0" * 20, "broken", final=False)

    def forgiven(file):
        file.unlink()
        raise CheckpointError("no such file")

    monkeypatch.setattr("inlay.studies.cells.read_json", forgiven)
    assert folder.failure("0" * 20) is None


def test_a_look_asks_no_cell_that_has_not_begun(here, finished, tmp_path, monkeypatch):
    """A runner looks after every cell. Asking all that are left each time would grow with the square of their number."""
    folder, view, _ = finished
    asked = []
    usual = StudyFolder.result
    monkeypatch.setattr(StudyFolder, "result", lambda self, name: asked.append(name) or usual(self, name))
    there = View(Plan.of(study_in(here)), StudyFolder(tmp_path / "new")).look()
    assert there.names()
    assert not asked
    name = next(iter(there.names()))
    assert name in view.results
    shutil.copytree(StudyFolder(folder).cell(name), there.folder.cell(name))
    assert set(there.look().results) == {name} == set(asked)


def test_records_keep_texts_that_only_look_like_paths(here, tmp_path):
    """What a cell's name is made of stays, so that the records' tables find their cells."""
    study = study_in(here, settings=FILE["settings"] | {"prompt": "/no_think {text}"}, ways={"one": {}}, against=None)
    facts = Plan.of(study).facts()
    kept = _without_places(facts["study"])
    assert kept["settings"]["prompt"] == "/no_think {text}"
    assert str(here) not in json.dumps(kept)
