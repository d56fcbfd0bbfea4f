"""What a user says reaches what it is meant for, by Python, YAML and flags; a run can begin where another ended."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import inlay
from inlay.cli import main
from inlay.compose.activations import FusionActivations
from inlay.data import Task
from inlay.errors import CheckpointError, ConfigError, SetupError
from inlay.host.verbs import inlays_of
from inlay.report.plots import plot_fusion, targets_by_members
from inlay.runs import estimate as costs
from inlay.runs.allowed import Allowed
from inlay.runs.facts import check_same, facts_of
from inlay.runs.joint_settings import JointSettings
from inlay.runs.matrix import _with_head, matrix
from inlay.runs.ready import get_ready
from inlay.runs.settings import Settings
from inlay.runs.start import method_of
from inlay.runs.train import train_run
from inlay.runs.use import open_for_use
from inlay.training.codec import Codec
from inlay.training.evaluate import Route, ask
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import objective_for
from inlay.training.workbench import Workbench
from tests.training.small import rows, save_bert, save_t5, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    save_bert(folder / "bert")
    save_t5(folder / "t5")
    write_rows(folder / "train.jsonl", rows(48))
    write_rows(folder / "validation.jsonl", rows(24, seed=1))
    flipped = {"positive": "yes", "negative": "no"}
    for name, count in (("train", 48), ("validation", 24)):
        other = [
            row | {"label": flipped[row["label"]] if i % 3 else "maybe"} for i, row in enumerate(rows(count, seed=2))
        ]
        write_rows(folder / f"other-{name}.jsonl", other)
    return folder


def settings(place, out, **more):
    usual = {"host": str(place / "bert"), "batch_size": 16, "epochs": 1, "lr": 0.02, "threads": 1, "task": "first"}
    files = {"train_file": place / "train.jsonl", "validation_file": place / "validation.jsonl"}
    return Settings(**usual | files | {"out": place / out} | more)


def other(place, out, **more):
    files = {"train_file": place / "other-train.jsonl", "validation_file": place / "other-validation.jsonl"}
    return settings(place, out, **files | {"task": "second"} | more)


@pytest.fixture(scope="module")
def trained(place):
    """Two inlays of one method on two tasks, the second begun from the first, and a third from the host."""
    train_run(settings(place, "a", options={"reduction": 2}))
    train_run(other(place, "b", host=str(place / "a")))
    train_run(other(place, "c", options={"reduction": 2}))
    return place


# settings


def fusion_of(job):
    return inlays_of(job.host)[job.name].method


def test_fusion_settings_act(trained, tmp_path):
    more = {"mode": "fusion", "members": (trained / "a", trained / "c"), "options": {}}
    said = {"query": "output", "value": False, "strength": 0.5, "dropout": 0.2, "temperature": 2.0, "subset": 1}
    job = get_ready(other(trained, "f", **more, **said, sites=("ffn",), leave_out=(0,)))
    method = fusion_of(job)
    assert {name: getattr(method, name) for name in said} == said
    assert method.sites == ("encoder.1.ffn",)


def test_fusion_settings_reach_it_by_yaml_and_by_flags(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (trained / "job.yaml").write_text(
        "query: output\nstrength: 0.25\ntask: second\nbatch_size: 16\nepochs: 1\nlr: 0.02\nthreads: 1\n"
    )
    files = (
        "--train-file",
        "other-train.jsonl",
        "--validation-file",
        "other-validation.jsonl",
        "--host",
        "bert",
        "--quiet",
    )
    main(
        ["fuse", "a", "c", "--config", "job.yaml", *files, "--no-value", "--leave-out", "0", "--out", "flags", "--json"]
    )
    assert json.loads(capsys.readouterr().out)["mode"] == "fusion"
    saved = json.loads((trained / "flags" / "inlay" / "inlay.json").read_text())["method"]
    assert (saved["query"], saved["strength"], saved["value"], saved["sites"]) == (
        "output",
        0.25,
        False,
        ["encoder.1.ffn"],
    )


def test_a_place_where_no_member_acts_is_refused(trained):
    more = {"mode": "fusion", "members": (trained / "a", trained / "c")}
    with pytest.raises(ConfigError, match=r"no member acts at 'attention'. Members act at: ffn"):
        get_ready(other(trained, "f", **more, sites=("attention",)))


def test_norms_pooling_and_the_head(place):
    job = get_ready(settings(place, "x", norms=True, pooling="first", head_layers=2, head_dropout=0.3))
    made = inlays_of(job.host)[job.name]
    assert made.norms
    assert made.head is not None
    assert (made.head.pooling, made.head.layers, made.head.dropout) == ("first", 2, 0.3)
    own = inlays_of((job := get_ready(settings(place, "x", pooling="host"))).host)[job.name].head
    assert own is not None
    assert own.pooling is None


def test_every_unused_setting_is_named_at_once_and_nothing_is_written(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    files = ("--train-file", "train.jsonl", "--validation-file", "validation.jsonl", "--batch-size", "16")
    with pytest.raises(SystemExit) as left:
        main(
            [
                "train",
                "--host",
                "bert",
                *files,
                "--answering",
                "ranking",
                "--select",
                "f2",
                "--rows-seed",
                "3",
                "--out",
                "nothing",
            ]
        )
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "--answering is 'ranking', but nothing would use it: it needs a host that answers in text" in told
    assert "--rows-seed is 3" in told
    assert "--select is 'f2', but this task has the metrics accuracy, macro_f1" in told
    assert not (place / "nothing").exists()


def test_files_and_columns_that_nothing_reads_are_refused(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (place / "own").mkdir()
    shutil.copy("train.jsonl", "own/train.jsonl")
    words = ("--task", "own", "--data-dir", ".", "--validation-file", "validation.jsonl", "--test-file", "none.csv")
    told = refused(capsys, "train", "--host", "bert", *words, "--out", "nothing")
    for flag, file in (("validation", "validation.jsonl"), ("test", "none.csv")):
        assert f"--{flag}-file is '{file}', but nothing would use it: it needs --train-file" in told
    numbers = [{"text": "w1", "label": 0.5 * i} for i in range(20)]
    picks = [{"text": "w1", "choices": ["w2", "w3"], "label": i % 2} for i in range(20)]
    for kind, rows_, words in (
        ("regression", numbers, ("--labels", "a,b", "--choices", "text")),
        ("choice", picks, ("--labels", "a,b", "--pair", "text")),
    ):
        write_rows(place / "few.jsonl", rows_)
        told = refused(
            capsys, "train", "--host", "bert", "--train-file", "few.jsonl", "--kind", kind, *words, "--out", "nothing"
        )
        for flag in words[::2]:
            assert re.search(rf"{flag} is .*, but nothing would use it: it needs .*kind", told), told


def test_heads_are_refused_on_a_host_that_answers_in_text(place):
    with pytest.raises(ConfigError, match="`pooling` is 'mean', but nothing would use it"):
        get_ready(settings(place, "x", host=str(place / "t5"), mode="full", pooling="mean"))


def test_class_weights_and_smoothing(place):
    codec = get_ready(settings(place, "x", class_weights="balanced", label_smoothing=0.1)).codec
    assert codec.class_weights == (1.0, 1.0)
    logits, labels = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([0, 1])
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    assert torch.equal(codec.loss(logits, labels), wanted)
    with pytest.raises(ConfigError, match="`class_weights` has 3 numbers, but there are 2 labels: negative, positive"):
        get_ready(settings(place, "x", class_weights=(1.0, 2.0, 3.0)))
    weighted: Codec = replace(codec, class_weights=(3.0, 1.0), label_smoothing=0.0)
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert float(weighted.loss(logits, labels)) == pytest.approx(float(3 * each[0] + each[1]))


def test_the_seed_of_the_rows_draws_other_rows(place):
    drawn = [get_ready(settings(place, "x", rows=20, rows_seed=seed)).prepared for seed in (42, 42, 7)]
    assert drawn[0].train == drawn[1].train != drawn[2].train
    assert drawn[0].validation == drawn[2].validation


MIXTURE = {"method": "mixture", "options": {"method": {"kind": "pfeiffer", "reduction": 2}, "modules": 3}}


def test_the_consistency_of_a_mixture(place):
    for said, wanted in (
        ({}, (1.0, True)),
        ({"consistency": 0.0}, (0.0, True)),
        ({"consistency_detach": False}, (1.0, False)),
    ):
        job = get_ready(settings(place, "x", **MIXTURE, **said, pairs=0.0))
        found = objective_for(job.host, job.name, job.settings)
        assert (found.keywords["weight"], found.keywords["detach"]) == wanted


def test_the_routes_of_a_mixture(place, monkeypatch, capsys):
    train_run(settings(place, "mixture", **MIXTURE))
    opened = open_for_use(place / "mixture")
    split = opened.codec.encode(opened.rows("validation", None)[1])

    def shares(**route):
        torch.manual_seed(0)
        told = ask(opened.host, opened.codec, split, route=Route(**route))
        return torch.tensor([answer.probabilities for answer in told], dtype=torch.float64)

    merged, first, random = shares(), shares(routing="first"), shares(routing="random")
    ensemble, by_shares = shares(routing="ensemble"), shares(routing="ensemble", mean="probabilities")
    for a, b in ((merged, first), (merged, random), (merged, ensemble), (ensemble, by_shares)):
        assert not torch.equal(a, b)
    assert torch.allclose(by_shares.sum(-1), torch.ones(len(by_shares), dtype=by_shares.dtype))
    assert torch.equal(shares(), merged), "afterwards it is the mean again"
    monkeypatch.chdir(place)
    main(
        [
            "eval",
            "mixture",
            "--routing",
            "ensemble",
            "--passes",
            "2",
            "--mean",
            "probabilities",
            "--json",
            "--threads",
            "1",
        ]
    )
    assert json.loads(capsys.readouterr().out)["scores"]["accuracy"] >= 0


def test_only_a_mixture_has_routes(trained):
    opened = open_for_use(trained / "a")
    split = opened.codec.encode(opened.rows("validation", None)[1])
    with pytest.raises(SetupError, match="not a mixture"):
        ask(opened.host, opened.codec, split, route=Route(routing="first"))


# stages


def tensors(run, head=False):
    return {
        k: t for k, t in load_file(run / "inlay" / "weights.safetensors").items() if head or not k.startswith("head.")
    }


def test_an_inlay_starts_from_another(trained, tmp_path):
    for start in (trained / "a", trained / "a" / "inlay"):
        job = get_ready(other(trained, "x", **{"from": start}))
        now = {k: t for k, t in inlays_of(job.host)[job.name].tensors().items() if not k.startswith("head.")}
        assert job.settings.method == "pfeiffer"
        assert all(torch.equal(now[key], tensor) for key, tensor in tensors(trained / "a").items())
    same = get_ready(settings(trained, "x", start=trained / "a"))
    whole = inlays_of(same.host)[same.name].tensors()
    assert all(torch.equal(whole[key], tensor) for key, tensor in tensors(trained / "a", head=True).items())


def test_a_start_of_another_method_is_refused(trained):
    with pytest.raises(ConfigError, match="is a pfeiffer inlay with settings of its own"):
        get_ready(other(trained, "x", start=trained / "a", method="lora"))


def test_a_method_that_is_named_is_meant_also_if_it_is_the_default(trained, tmp_path):
    bench = Workbench.open(str(trained / "bert"), Task(labels=("a", "b")))
    inlay.add(bench.host, "lora", inlay.LoRA(rank=2), head=bench.head())
    start = inlay.save(bench.host, "lora", tmp_path / "lora")
    with pytest.raises(ConfigError, match="is a lora inlay with settings of its own"):
        method_of(settings(trained, "x", start=start, method="pfeiffer"))
    found = method_of(settings(trained, "x", start=start))
    assert found is not None
    assert found.kind == "lora"


def test_a_run_is_a_host_also_when_labels_differ(trained):
    record = json.loads((trained / "b" / "run.json").read_text())
    assert record["host"] == str(trained / "bert")
    assert record["task"]["labels"] == ["maybe", "no", "yes"]
    assert tensors(trained / "b").keys() == tensors(trained / "a").keys()


def test_a_full_run_is_a_host(trained):
    full = train_run(settings(trained, "full", mode="full"))
    for mode in ("full", "inlay"):
        job = get_ready(other(trained, "x", host=str(full.folder), mode=mode))
        body = {k: t for k, t in load_file(full.host / "model.safetensors").items() if not k.startswith("classifier")}
        now = job.host.state_dict()
        assert all(torch.equal(now[key], tensor) for key, tensor in body.items())
    with pytest.raises(ConfigError, match="mode inlay, whose inlay full fine-tuning would not use"):
        get_ready(other(trained, "x", host=str(trained / "a"), mode="full"))
    found = matrix([full.folder, trained / "b"])
    assert found.tasks == ("first", "second")


def test_the_matrix_shows_what_is_forgotten(trained, monkeypatch, capsys):
    found = matrix([trained / "a", trained / "b"])
    assert found.tasks == ("first", "second")
    for n, run in enumerate(("a", "b")):
        record = json.loads((trained / run / "run.json").read_text())
        assert found.scores[n][n] == pytest.approx(record["scores"]), "the diagonal is what the runs say themselves"
    by_hand = open_for_use(trained / "a")  # the second state's modules under the first one's head
    mine = inlays_of(by_hand.host)[by_hand.name].tensors()
    for key, tensor in tensors(trained / "b").items():
        mine[key].copy_(tensor)
    split = by_hand.codec.encode(by_hand.rows(None, None)[1])
    assert found.scores[1][0] == by_hand.codec.measure(split, ask(by_hand.host, by_hand.codec, split))
    monkeypatch.chdir(trained)
    main(["eval", "a", "b", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert "first (accuracy)" in lines[0]
    assert "second (accuracy)" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["a", "b"]


def test_the_matrix_asks_a_task_as_its_own_run_does(place, tmp_path):
    said = {"host": str(place / "t5"), "answering": "ranking", "options": {"reduction": 2}}
    runs = [make(place, tmp_path / name, **said) for make, name in ((settings, "one"), (other, "two"))]
    one, two = (train_run(each) for each in runs)
    codec = _with_head(one, two).codec
    assert codec.answering == "ranking"


def test_a_matrix_is_of_finished_runs(place, tmp_path):
    with pytest.raises(CheckpointError, match="is not a run"):
        matrix([tmp_path, tmp_path])


# fusions


def fusion(place, out, **more):
    return other(place, out, **{"mode": "fusion", "members": (place / "a", place / "c")} | more)


def test_members_are_kept_as_they_were_when_the_run_began(trained, tmp_path, monkeypatch):
    for name in "ac":
        shutil.copytree(trained / name, tmp_path / name)
    train = TrainingLoop.run

    def meanwhile(loop):
        shutil.rmtree(tmp_path / "a")
        return train(loop)

    monkeypatch.setattr(TrainingLoop, "run", meanwhile)
    run = train_run(fusion(trained, tmp_path / "f", members=(tmp_path / "a", tmp_path / "c")))
    assert open_for_use(run.folder).name == "f"


def test_a_fusion_does_not_go_on_over_other_members(trained):
    facts = facts_of(get_ready(fusion(trained, "f")))
    assert list(facts["members_sha256"]) == ["a", "c"]
    check_same(facts, facts, Allowed())
    begun = facts | {"members_sha256": facts["members_sha256"] | {"c": "0" * 64}}
    with pytest.raises(ConfigError, match="c: not what the run began to fuse"):
        check_same(begun, facts, Allowed())
    check_same({name: value for name, value in facts.items() if name != "members_sha256"}, facts, Allowed())


def test_a_fusion_without_validation_rows_can_be_looked_at_pruned_and_collapsed(trained, tmp_path, capsys):
    files = {"validation_file": None, "test_file": trained / "other-validation.jsonl", "validation": False}
    run = train_run(fusion(trained, tmp_path / "unjudged", **files)).folder
    main(["inspect", str(run), "--picture", str(tmp_path / "heat.png")])
    main(["prune", str(run), "--keep", "1", "--out", str(tmp_path / "pruned")])
    main(["collapse", str(run), "--out", str(tmp_path / "collapsed")])
    assert re.search(r"^train +fusion +collapsed", capsys.readouterr().out, re.M), "it says which rows these are"
    assert (tmp_path / "heat.png").exists()
    pruned = open_for_use(tmp_path / "pruned")
    assert pruned.name == "unjudged-pruned"
    assert pruned.run.record()["validation"] == {}, "training rows validate nothing"


def test_a_step_is_measured_in_the_portions_that_training_takes(place, monkeypatch):
    seen = []

    def watched(host, name, recipe):
        objective = objective_for(host, name, recipe)

        def spy(model, host, codec, portion):
            seen.append(len(portion.batch["labels"]))
            return objective(model, host, codec, portion)

        return spy

    monkeypatch.setattr(costs, "objective_for", watched)
    costs.estimate(get_ready(settings(place, "x", accumulate=4, precision="bf16", gradient_checkpointing=True)))
    assert seen == [4] * 8, "two steps of sixteen rows"


# what another mode would use


def refused(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main([*words])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_settings_of_another_mode_are_named_at_once_as_flags(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    files = ("--train-file", "train.jsonl", "--validation-file", "validation.jsonl", "--batch-size", "16")
    words = ("--strength", "0.1", "--query", "output", "--leave-out", "1", "--consistency", "2", "--no-value")
    told = refused(capsys, "train", "--host", "bert", *files, *words, "--out", "nothing")
    for flag in ("--strength is 0.1", "--query is 'output'", "--leave-out is", "--value is False"):
        assert f"{flag}" in told, told
    assert told.count("it needs mode fusion") == 4
    assert "--consistency is 2.0, but nothing would use it: it needs method mixture" in told
    told = refused(capsys, "fuse", "a", "b", *files, "--options", "rank=2", "--from", "a", "--out", "nothing")
    assert "--options is {'rank': 2}" in told
    assert "--from is" in told
    assert told.count("it needs mode inlay") == 2
    assert not (trained / "nothing").exists()


def test_a_fusions_places_layers_and_subset_are_checked_together(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    files = ("--train-file", "train.jsonl", "--validation-file", "validation.jsonl", "--batch-size", "16")
    words = ("--sites", "nowhere", "--leave-out", "9", "--subset", "7")
    told = refused(capsys, "fuse", "a", "b", *files, *words, "--out", "nothing")
    assert "--subset is 7, but there are 2 members" in told
    assert "no member acts at 'nowhere'" in told
    assert "9" in told.replace("--subset is 7", "")
    assert not (trained / "nothing").exists()


def test_a_way_of_answering_is_refused_where_there_is_a_head(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    told = refused(capsys, "eval", "a", "--answering", "ranking")
    assert "--answering is 'ranking', but nothing would use it: it needs a host that answers in text" in told


# looking


def seen(fusion, members, first):
    rest = (1 - first) / (len(members) - 1)
    mean = {f"encoder.{i}.ffn": torch.tensor([first * (i + 1) / 2] + [rest] * (len(members) - 1)) for i in range(2)}
    return FusionActivations(fusion, members, mean, dict.fromkeys(mean, 1))


def test_heat_maps_of_targets_and_members(tmp_path):
    several = {"rte": seen("f", ("a", "b"), 0.5), "cb": seen("g", ("b", "c"), 0.25)}
    values, targets, members = targets_by_members(several, "1")
    assert (targets, members) == (["rte", "cb"], ["a", "b", "c"])
    assert torch.allclose(values.nan_to_num(-1), torch.tensor([[0.5, 0.5, -1], [-1, 0.25, 0.75]]))
    assert torch.equal(targets_by_members(several, "encoder.1")[0].nan_to_num(-1), values.nan_to_num(-1))
    others = {"rte": seen("f", ("mnli", "own"), 0.5), "cb": seen("g", ("mnli", "rte", "own"), 0.5)}
    assert targets_by_members(others)[2] == ["mnli", "rte", "own"], "what each has last stays the last"
    for layer in (None, 0, "encoder.1", "all"):
        files = plot_fusion(several, tmp_path / f"heat-{layer}", layer=layer)
        assert all(file.stat().st_size > 1000 for file in files)
    plot_fusion(several["rte"], tmp_path / "one", layer="all")
    with pytest.raises(SetupError, match="no fusion acts in layer 7. They act in encoder.0, encoder.1"):
        plot_fusion(several, tmp_path / "none", layer=7)


# the page


def test_the_page_of_settings_is_made_from_the_code():
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parents[2] / "tools" / "settings_table.py"
    spec = importlib.util.spec_from_file_location("settings_table", file)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run: python tools/settings_table.py"
    assert tool.flag_names() == set(JointSettings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())
