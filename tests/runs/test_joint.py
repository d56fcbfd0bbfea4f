"""Joint runs as a user has them: the folder, its tasks by their addresses, fusions over them, and how they compare."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

import inlay
from inlay.cli import main
from inlay.data.mixing import Sampling
from inlay.errors import ConfigError
from inlay.runs.comparison import Cell, Comparison, compare, way_of
from inlay.runs.folder import Run
from inlay.runs.joint import train_jointly
from inlay.runs.joint_settings import JointSettings, settings_from
from inlay.runs.settings import Settings
from inlay.runs.train import train_run
from inlay.runs.use import open_for_use
from inlay.training.interrupt import Interrupted
from tests.training.ranks import launch
from tests.training.small import rows, save_bert, write_rows

RECIPE: dict[str, Any] = {"batch_size": 8, "epochs": 2, "lr": 1e-2, "threads": 1, "max_length": 16, "head_dropout": 0.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host without dropout, and rows of two tasks."""
    folder = tmp_path_factory.mktemp("joint")
    save_bert(folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for name, count, seed in (("long", 48, 0), ("short", 24, 5)):
        write_rows(folder / f"{name}.jsonl", rows(count, seed=seed))
        write_rows(folder / f"{name}-validation.jsonl", rows(20, seed=seed + 1))
    return folder


def files(place: Path, name: str) -> dict[str, str]:
    return {
        "train_file": str(place / f"{name}.jsonl"),
        "validation_file": str(place / f"{name}-validation.jsonl"),
    }


def joint(place: Path, out: Path, **more: Any) -> JointSettings:
    tasks = {name: files(place, name) for name in ("long", "short")}
    said = {"host": str(place / "bert"), "tasks": tasks, "out": out, "options": {"reduction": 2}}
    if more.get("mode") in ("full", "head"):
        said.pop("options")
    return JointSettings(**RECIPE | said | more)


@pytest.fixture(scope="module")
def trained(place: Path) -> dict[str, Run]:
    """A run of every mode, single ones, and fusions over both kinds."""
    runs = {
        mode: train_jointly(joint(place, place / "runs" / mode, mode=mode))
        for mode in ("mt-a", "inlay", "full", "head")
    }
    alone = {"host": str(place / "bert"), "options": {"reduction": 2}}
    for name in ("long", "short"):
        said = RECIPE | alone | files(place, name) | {"task": name, "name": name, "out": place / "runs" / name}
        runs[name] = train_run(Settings(**said))
    for name, members in (("fused", ("long", "short")), ("fused-mt-a", ("mt-a:long", "mt-a:short"))):
        host = place / "runs" / "mt-a" / "host" if "mt-a" in name else place / "bert"
        said = RECIPE | files(place, "short") | {"task": "short", "host": str(host), "out": place / "runs" / name}
        paths = [place / "runs" / member for member in members]
        runs[name] = train_run(Settings(**said, mode="fusion", members=paths))
    return runs


def test_a_run_has_a_host_and_an_inlay_per_task(trained: dict[str, Run]) -> None:
    run = trained["mt-a"]
    record = run.record()
    assert list(record["tasks"]) == ["long", "short"]
    assert (record["status"], record["mode"]) == ("finished", "mt-a")
    assert sorted(folder.name for folder in (run.folder / "inlays").iterdir()) == ["long", "short"]
    assert (run.host / "model.safetensors").is_file()
    assert not run.checkpoint.exists()
    entry = run.history()[-1]
    for name in ("long", "short"):
        assert {f"{name}/validation_accuracy", f"{name}/loss"} <= entry.keys()
    assert entry["alpha"] == pytest.approx(0.2), "the last of two epochs"
    assert [record["tasks"][name]["shares"] for name in ("long", "short")] == [
        pytest.approx([2 / 3, 2**0.2 / (1 + 2**0.2)], abs=1e-6), pytest.approx([1 / 3, 1 / (1 + 2**0.2)], abs=1e-6),
    ]  # fmt: skip
    page = run.report.read_text(encoding="utf-8")
    for words in ("66.7%", "one task per step, in proportion to rows^α, α annealed", "The most confident mistakes"):
        assert words in page
    assert "mt-a of 2 tasks" in page
    assert "<svg" in page
    assert "short" in page


def test_what_trains_in_each_mode(place: Path, trained: dict[str, Run]) -> None:
    before = safetensors.torch.load_file(place / "bert" / "model.safetensors")
    for mode, (host, changes) in {
        "mt-a": (True, True), "inlay": (False, True), "full": (True, False), "head": (False, False),
    }.items():  # fmt: skip
        run = trained[mode]
        assert run.host.is_dir() == host, mode
        if host:
            after = safetensors.torch.load_file(run.host / "model.safetensors")
            moved = [name for name in before if not torch.equal(before[name], after[f"bert.{name}"])]
            assert len(moved) > len(before) / 2
        for task in ("long", "short"):
            tensors = safetensors.torch.load_file(run.inlay_of(task) / "weights.safetensors")
            assert any("ffn" in name for name in tensors) == changes
            assert any(name.startswith("head.") for name in tensors)


@pytest.mark.parametrize("mode", ["mt-a", "inlay", "full", "head"])
def test_a_task_is_opened_and_measured_by_its_address(trained: dict[str, Run], mode: str) -> None:
    run = trained[mode]
    for task in ("long", "short"):
        opened = open_for_use(f"{run.folder}:{task}")
        _, asked = opened.rows(None)
        encoded = opened.codec.encode(asked)
        assert opened.codec.measure(encoded, opened.answers(encoded)) == run.record()["tasks"][task]["scores"]
    with pytest.raises(inlay.InlayError, match="say which"):
        open_for_use(run.folder)
    with pytest.raises(ConfigError, match="no task 'lang'. Did you mean 'long'"):
        open_for_use(f"{run.folder}:lang")


def test_eval_and_predict_of_a_task(trained: dict[str, Run], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained["mt-a"].folder
    main(["eval", str(folder), "--json", "--quiet"])
    told = json.loads(capsys.readouterr().out)
    assert [each["scores"] for each in told["tasks"]] == [
        t["scores"] for t in trained["mt-a"].record()["tasks"].values()
    ]
    main(["predict", f"{folder}:short", "--file", str(place / "short-validation.jsonl"), "--quiet"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 20
    assert all(row["predicted_label"] in ("positive", "negative") for row in said)


def test_a_fusion_over_a_joint_run_is_one_over_its_inlays_on_its_host(
    trained: dict[str, Run], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said by the joint run alone: its host, its members, the target's last."""
    words = ["--task", "short", "--epochs", "1", "--batch-size", "8", "--threads", "1", "--json", "--quiet"]
    rows_of = [word for name, file in files(place, "short").items() for word in (f"--{name.replace('_', '-')}", file)]
    main(["fuse", str(trained["mt-a"].folder), *words, *rows_of, "--out", str(tmp_path / "fused")])
    record = json.loads(capsys.readouterr().out)
    assert record["host"] == str(trained["mt-a"].host.absolute())
    assert [Path(member).name for member in record["settings"]["members"]] == ["mt-a:long", "mt-a:short"]
    assert sorted(folder.name for folder in (tmp_path / "fused" / "members").iterdir()) == ["long", "short"]
    opened = open_for_use(tmp_path / "fused")
    theirs = safetensors.torch.load_file(trained["mt-a"].host / "model.safetensors")
    ours = opened.host.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name.startswith("bert."))


def test_ways_to_train_are_compared_with_training_alone(
    trained: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("full", "mt-a", "inlay", "fused-mt-a", "fused", "long", "short")
    main(["eval", "--matrix", *(str(trained[name].folder) for name in names), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ways"] == ["single", "multi-task", "MT-A", "side by side", "fusion of MT-A", "fusion of single"]
    alone = {name: trained[name].record()["scores"]["accuracy"] for name in ("long", "short")}
    for task in ("long", "short"):
        mine = told["scores"][task]
        assert mine["single"]["score"] == alone[task]
        for way, run in (("MT-A", "mt-a"), ("multi-task", "full")):
            score = trained[run].record()["tasks"][task]["scores"]["accuracy"]
            assert mine[way]["score"] == score
            assert mine[way]["points"] == pytest.approx(100 * (score - alone[task]))
    assert "fusion of single" not in told["scores"]["long"]
    assert told["scores"]["short"]["fusion of single"]["score"] == trained["fused"].record()["scores"]["accuracy"]
    assert told["means"] == {way: each["score"] for way, each in told["scores"]["short"].items()}
    main(["eval", "--matrix", *(str(trained[name].folder) for name in ("mt-a", "long", "short"))])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["single", "MT-A"]
    assert [line.split()[0] for line in table[1:]] == ["long", "short", "mean"]


def test_marks_and_means_of_a_comparison() -> None:
    scores = {
        ("a", "single"): 0.700, ("a", "MT-A"): 0.703, ("a", "multi-task"): 0.697, ("b", "single"): 0.5, ("b", "MT-A"): 0.5029,
        ("b", "multi-task"): 0.40, ("c", "single"): 0.1,
    }  # fmt: skip
    cells = {at: Cell(score, ("run",)) for at, score in scores.items()}
    found = Comparison({"a": "accuracy", "b": "f1", "c": "f1"}, ("single", "multi-task", "MT-A"), cells)
    _, table = found.table()
    assert table[0] == ("a (accuracy)", "70.00", "69.70 ▼ −0.30", "70.30 ▲ +0.30")
    assert table[1] == ("b (f1)", "50.00", "40.00 ▼ −10.00", "50.29   +0.29")
    assert table[2] == ("c (f1)", "10.00", "—", "—")
    assert table[3] == ("mean of the 2 with all", "60.00", "54.85 ▼ −5.15", "60.30   +0.29")
    _, fewer = Comparison({"a": "ter"}, ("single", "multi-task", "MT-A"), cells).table()
    assert fewer[0] == ("a (ter)", "70.00", "69.70 ▲ −0.30", "70.30 ▼ +0.30"), "fewer mistakes are the better"


def test_what_cannot_be_compared_is_refused(trained: dict[str, Run], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([trained["mt-a"].folder])
    assert way_of(trained["head"].tasks()[0]) == "heads side by side"
    with pytest.raises(SystemExit):
        main(["eval", "--matrix", "runs/a", "--file", "rows.jsonl"])
    assert "--file can be given for one run only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "runs/a", "runs/b", "--no-repeat-ngram", "0"])
    assert "--no-repeat-ngram can be given for one run only" in capsys.readouterr().err


def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(place: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    write_rows(tmp_path / "odd.jsonl", [{"text": "w1", "label": "perhaps"}, {"text": "w2", "label": "never"}] * 8)
    pair = {"premise": "w1", "hypothesis": "w2"}
    write_rows(tmp_path / "pairs.jsonl", [pair | {"label": "perhaps"}, pair | {"label": "never"}] * 8)
    tasks = [
        ("long", files(place, "long")), ("long", files(place, "long")),
        ("empty", {"train_file": str(tmp_path / "none.jsonl")}),
        ("far", files(place, "short") | {"host": "bert-large-uncased"}),
        ("rte", {"train_file": str(tmp_path / "pairs.jsonl"), "labels": ["never", "perhaps"]}),
        ("x", {"train_file": str(tmp_path / "odd.jsonl"), "task": "same"}),
        ("y", files(place, "short") | {"task": "same"}),
        ("z", files(place, "short") | {"max_lenght": 3}),
    ]  # fmt: skip
    said = {"host": str(place / "bert"), "tasks": tasks, "out": tmp_path / "run", "alpha": 1.5, "cap": 0}
    with pytest.raises(ConfigError) as told:
        train_jointly(JointSettings(**said, stop_on="nobody"))
    for words in (
        "'long' is there twice", "empty:", "names the host bert-large-uncased", "'rte' is a built-in task with the labels",
        "x and y are both called 'same'", "no setting 'max_lenght'", "`alpha`: lies between 0", "`cap`: a task counts as one row",
        "`stop_on` is 'nobody'",
    ):  # fmt: skip
        assert words in str(told.value), words
    assert not (tmp_path / "run").exists()


def test_without_validation_rows_the_last_state_is_the_result(place: Path, tmp_path: Path) -> None:
    tasks: dict[str, dict[str, Any]] = {
        name: {"train_file": files(place, name)["train_file"], "test_file": files(place, name)["validation_file"]}
        for name in ("long", "short")
    }
    run = train_jointly(joint(place, tmp_path / "run", tasks=tasks, validation=False))
    assert run.record()["status"] == "finished"
    for task in run.tasks():
        assert task.record()["best_step"] == run.record()["steps"]
        assert task.record()["validation"] == {}
    tasks = {"long": tasks["long"] | {"validation": False}, "short": files(place, "short")}
    with pytest.raises(ConfigError, match="long: no validation rows, but the others have some"):
        train_jointly(joint(place, tmp_path / "other", tasks=tasks))
    assert not (tmp_path / "other").exists()


def test_settings_of_single_and_of_joint_runs_are_told_apart(tmp_path: Path) -> None:
    for said in ({"cap": 3}, {"mixed": True, "alpha": 0.5}, {"mode": "mt-a"}, {"recipe": "mt-a"}):
        with pytest.raises(ConfigError, match="several tasks"):
            settings_from({"task": "rte", "host": "bert", "out": tmp_path} | said)
    with pytest.raises(ConfigError, match="inlay fuse"):
        JointSettings(tasks=["rte"], host="bert", out=tmp_path, mode="fusion")
    made = settings_from(
        yaml.safe_load("{host: bert, out: run, cap: 9, tasks: {rte: {cap: 3}, mnli: , qqp: {max_length: 8}}}")
    )
    assert isinstance(made, JointSettings)
    assert made.drawing() == Sampling(cap={"rte": 3, "mnli": 9, "qqp": 9})
    made = settings_from({"host": "bert", "out": "run", "tasks": {"rte": {"weight": 3}, "mnli": {"weight": 1}}})
    assert made.drawing().shares({"rte": 1, "mnli": 100}, 1, 2) == {"rte": 0.75, "mnli": 0.25}


def test_a_run_that_is_stopped_goes_on_to_the_same_files(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PALs, whose attention drops out, on mixed batches; stopped as by a signal, and by nothing in particular."""
    how = {"method": "pal", "options": {"size": 8, "heads": 2}, "mixed": True, "save_every": 4, "eval_every": 5}
    whole = train_jointly(joint(place, tmp_path / "whole", **how))
    for step, kind in ((5, Interrupted(signal.SIGTERM)), (11, RuntimeError("the power went"))):
        with monkeypatch.context() as patch:
            patch.setattr("inlay.training.joint.JointLoop._leave_if_asked", _leave_at(step, kind))
            with pytest.raises(type(kind)):
                train_jointly(joint(place, tmp_path / "cut", **how), resume=(tmp_path / "cut").exists())
    cut = train_jointly(joint(place, tmp_path / "cut", **how), resume=True)
    assert cut.history() == whole.history()
    for file in ("host/model.safetensors", "inlays/long/weights.safetensors", "inlays/short/weights.safetensors"):
        ours, theirs = (safetensors.torch.load_file(run.folder / file) for run in (cut, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), file


def _leave_at(step: int, kind: Exception):
    def leave(self, interrupts) -> None:
        if self.position.step == step:
            if isinstance(kind, Interrupted):
                self._save()
            raise kind

    return leave


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.long
def test_two_processes_are_one(place: Path, tmp_path: Path, mixed: bool) -> None:
    """A task that is not drawn gets no gradient in either process, and mixed rows fall to both."""
    pal = {"method": "pal", "options": {"size": 8, "heads": 2, "dropout": 0.0}}
    how: dict[str, Any] = {"mixed": mixed, "accumulate": 2, "alpha": 0.5, "seed": 2} | ({} if mixed else pal)
    one = train_jointly(joint(place, tmp_path / "one", **how))
    settings = joint(place, tmp_path / "two" / "run", **how)
    said = RECIPE | how | {"host": settings.host, "tasks": dict(settings.tasks), "options": settings.options}
    file = tmp_path / "joint.yaml"
    file.write_text(yaml.safe_dump(said))
    told, learned = launch(
        tmp_path / "two", "train", "--config", str(file), "--out", str(settings.out), "--json", "--quiet"
    )
    assert json.loads(told)["processes"] == 2
    for name, tensor in learned[0].items():
        assert torch.equal(tensor, learned[1][name]), name
    for file in ("host/model.safetensors", "inlays/long/weights.safetensors", "inlays/short/weights.safetensors"):
        ours, theirs = (safetensors.torch.load_file(folder / file) for folder in (one.folder, settings.out))
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name], tensor, atol=2e-5, rtol=1e-3, msg=name)
