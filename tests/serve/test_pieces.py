"""What can be served: runs, fusions with their members, joint runs, studies, folders of them; and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

import inlay
from inlay.data.rows import Table
from inlay.errors import InlayError
from inlay.runs.joint import train_jointly
from inlay.runs.joint_settings import JointSettings
from inlay.runs.use import open_for_use
from inlay.serve import Engine
from inlay.serve.pieces import pieces_of
from inlay.studies.cells import StudyFolder
from inlay.training.workbench import Workbench
from tests.serve.shop import TASKS, keep, put_in
from tests.serve.test_engine import near
from tests.studies.tiny import place, run_here, study_in


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A small study, in whose cells single runs and fusions are; and two joint runs."""
    folder = place(tmp_path_factory.mktemp("pieces"))
    ways = {
        "source": {"tasks": "sources", "rows": ["all"], "options": {"size": 4}},
        "fused": {"kind": "fusion", "members": [{"way": "source", "tasks": "sources"}]},
    }
    run_here(
        study_in(
            folder, ways=ways, seeds=[0], rows=[32], groups={"sources": ["a", "b"], "targets": ["c"]}, against=None
        ),
        folder / "study",
    )
    tasks = {
        name: {
            "train_file": str(folder / "data" / name / "train.jsonl"),
            "validation_file": str(folder / "data" / name / "test.jsonl"),
        }
        for name in "ab"
    }
    common = {
        "host": str(folder / "bert"),
        "tasks": tasks,
        "epochs": 1,
        "batch_size": 16,
        "lr": 0.02,
        "method": "pfeiffer",
        "options": {"size": 4},
    }
    for mode in ("inlay", "mt-a"):
        train_jointly(JointSettings(**common, mode=mode, out=folder / f"joint-{mode}"))
    return folder


def predicted(path, texts):
    opened = open_for_use(path)
    return [row["probabilities"] for row in opened.predict(Table([{"text": text} for text in texts], "rows"))]


def said(engine, name, texts):
    return [{entry["label"]: entry["score"] for entry in answer} for answer in engine.classify(name, texts)]


def ordered(shares):
    return [dict(sorted(each.items())) for each in shares]


def test_a_studys_best_cells_answer_as_predict_does(there):
    with Engine.open([there / "study"]) as engine:
        assert set(engine.models) == {"a", "b", "c"}
        fused = engine.models["c"]
        assert fused.method == "fusion"
        assert len(fused.members) == 2
        for name, model in engine.models.items():
            assert near(
                ordered(said(engine, name, ["good w1", "bad w2"])),
                ordered(predicted(model.piece.folder, ["good w1", "bad w2"])),
            )
        assert len(list(engine.shelf.host.inlays)) == 3, "the fusion's members are the other two"
        engine.unload("c")
        assert len(list(engine.shelf.host.inlays)) == 2


def served_study(there, ways, **more):
    """The models of a small study, each asked as `inlay predict` would ask it; where their inlays are."""
    out = there / f"study-{'-'.join(ways)}"
    view, _ = run_here(study_in(there, ways=ways, seeds=[0], rows=[32], against=None, **more), out)
    assert not view.failures, next(iter(view.failures.values())).error
    with Engine.open([out]) as engine:
        for name, model in engine.models.items():
            at = model.piece.folder if model.piece.joint is None else f"{model.piece.folder}:{model.piece.joint}"
            assert near(ordered(said(engine, name, ["good w1"])), ordered(predicted(at, ["good w1"])))
        return {name: model.piece for name, model in engine.models.items()}


def test_a_studys_joint_cells_are_served_and_those_without_their_host_are_not(there):
    ways = {
        "side": {"kind": "joint", "joint": "inlay", "tasks": ["a", "b"], "options": {"size": 4}},
        "whole": {"kind": "joint", "joint": "full", "tasks": ["a", "b"]},
        "single": {"tasks": ["c"], "options": {"size": 4}},
    }
    pieces = served_study(there, ways)
    assert set(pieces) == {"a", "b", "c"}
    assert pieces["a"].joint == "a"
    assert pieces["a"].folder == pieces["b"].folder != pieces["c"].folder
    assert not any(piece.own_host for piece in pieces.values())


def test_a_studys_best_cells_are_all_on_one_host(there):
    ways = {
        "mt-a": {"kind": "joint", "tasks": ["a", "b", "c"], "options": {"size": 4}},
        "fused": {"kind": "fusion", "tasks": ["c"], "members": [{"way": "mt-a", "tasks": ["a", "b"]}]},
        "single": {"tasks": ["b", "c"], "options": {"size": 4}},
    }
    pieces = served_study(there, ways)
    assert set(pieces) == {"a", "b", "c"}
    assert len({piece.host for piece in pieces.values()}) == 1
    assert pieces["a"].own_host


@pytest.mark.parametrize("mode", ["inlay", "mt-a"])
def test_a_joint_run_answers_as_predict_does(there, mode):
    path = there / f"joint-{mode}"
    with Engine.open([path]) as engine:
        assert set(engine.models) == {"a", "b"}
        for name in "ab":
            assert near(ordered(said(engine, name, ["good w1"])), ordered(predicted(f"{path}:{name}", ["good w1"])))
    with Engine.open([f"mine={path}:a"]) as engine:
        assert set(engine.models) == {"mine"}
        assert engine.refresh() == []


def test_a_fusion_run_brings_its_members(there):
    """Served beside other runs that have the same members."""
    view = StudyFolder(there / "study")
    cells = [view.cell(name.name) for name in sorted((there / "study" / "cells").iterdir())]
    fused = next(cell for cell in cells if (cell / "members").is_dir())
    plain = [cell for cell in cells if cell != fused and (cell / "inlay").is_dir()]
    with Engine.open([f"f={fused}", f"g={fused}", f"p={plain[0]}"]) as engine:
        assert near(engine.classify("f", ["good"]), engine.classify("g", ["good"]))
        inside = engine.explain("f", "good")
        assert len(inside["members"]) == 2
        engine.unload("f")
        assert near(engine.classify("g", ["good"]), [inside["answer"]])
        engine.unload("g")
        engine.unload("p")
        assert list(engine.shelf.host.inlays) == []


def test_everything_that_is_wrong_is_told_at_once(there, shop):
    with pytest.raises(InlayError) as told:
        pieces_of(
            [
                str(there / "nothing"),
                str(there / "data"),
                f"a={shop / 'inlays' / 'b'}",
                f"{shop / 'inlays' / 'a'}",
                f"b a d={shop / 'inlays' / 'b'}",
            ]
        )
    text = str(told.value)
    for says in ("is not a folder", "holds no finished run", "both called 'a'", "cannot be a model's name"):
        assert says in text


def test_a_folder_whose_name_no_model_can_have_is_served_under_that_of_its_inlay(there, tmp_path):
    cells = [cell for cell in (there / "study" / "cells").iterdir() if (cell / "inlay").is_dir()]
    names = {json.loads((cell / "run.json").read_text())["name"]: cell for cell in cells}
    inside, run = next((name, cell) for name, cell in names.items() if name not in ("a", "b"))  # the joint run's
    for name in ("plain", "sp ace ünï"):
        shutil.copytree(run, tmp_path / "runs" / name)
    shutil.copytree(there / "joint-mt-a", tmp_path / "runs" / "a:b")
    assert {piece.name for piece in pieces_of([str(tmp_path / "runs")])} == {"plain", inside, "a", "b"}
    assert [piece.name for piece in pieces_of([f"mine={tmp_path / 'runs' / 'sp ace ünï'}"])] == ["mine"]
    shutil.copytree(run, tmp_path / "runs" / "sp:ace")
    with pytest.raises(InlayError, match=f"are both called '{inside}'"):
        pieces_of([str(tmp_path / "runs")])


def test_one_server_has_one_host(there):
    with pytest.raises(InlayError, match="changed the whole host"):
        Engine.open([f"j={there / 'joint-mt-a'}", there / "study"])


def test_an_unfinished_run_is_refused(there, tmp_path):
    shutil.copytree(there / "joint-inlay", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["status"] = "interrupted"
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    with pytest.raises(InlayError):
        pieces_of([str(tmp_path / "run")])


def test_a_fusions_inlay_finds_its_members_beside_it(there, shop):
    """Where the run keeps them, or in the folder that it lies in; they have the names that it was saved with."""
    cells = sorted((there / "study" / "cells").iterdir())
    fused = next(cell for cell in cells if (cell / "members").is_dir())
    with Engine.open([f"f={fused / 'inlay'}", f"other={fused}"]) as engine:
        assert engine.models["f"].facts()["members"] == engine.models["other"].facts()["members"]
        assert near(engine.classify("f", ["good"]), engine.classify("other", ["good"]))
    with Engine.open([f"mine={shop / 'inlays' / 'a'}", shop / "inlays" / "fused-classification"]) as engine:
        assert set(engine.models) == {"mine", "fused-classification"}
        assert engine.models["fused-classification"].facts()["members"] == ["a", "b"]
        assert len(list(engine.shelf.host.inlays)) == 3, "the member that is served by itself is there once"
        engine.unload("mine")
        assert len(list(engine.shelf.host.inlays)) == 3
        engine.unload("fused-classification")
        assert list(engine.shelf.host.inlays) == []


def test_members_with_the_same_weights_are_not_mistaken(shop, tmp_path):
    """Two members that are equal but for their names, which they lose on a server's host."""
    bench = Workbench.open(str(shop / "bert"), TASKS["classification"])
    for name in ("one", "two"):
        put_in(bench, name, inlay.Pfeiffer(size=2), 7)
        keep(bench, name, TASKS["classification"], tmp_path)
    inlay.add_fusion(bench.host, "both", ["one", "two"], head=bench.head())
    keep(bench, "both", TASKS["classification"], tmp_path)
    with Engine.open([tmp_path / "inlays"]) as engine:
        assert engine.models["both"].facts()["members"] == ["one", "two"]
        assert len(set(engine.models["both"].members.values())) == 2
