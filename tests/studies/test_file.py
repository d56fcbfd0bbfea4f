"""A study's file: what it means, and everything that is wrong in it at once."""

import errno
import json
from pathlib import Path

import pytest
import yaml

from inlay import InlayError
from inlay.cli import main
from inlay.recipes import read_recipe
from inlay.studies import worker
from inlay.studies.cells import StudyFolder
from inlay.studies.file import read_study, study_from, study_names
from inlay.studies.plan import Plan, View
from inlay.studies.schedule import Schedule
from inlay.studies.ways import drafts, slots_of
from tests.studies.tiny import FILE, Inline, run_here, study_in


@pytest.fixture
def mistake(here, tmp_path, capsys):
    """What `inlay study …` says of a file with these parts changed; nothing is written."""

    def tell(verb="plan", *more, **changed):
        said = {
            k: v
            for k, v in (
                FILE | {"hosts": {"bert": str(here / "bert")}, "data_dir": str(here / "data")} | changed
            ).items()
            if v is not None
        }
        file = tmp_path / "wrong.yaml"
        file.write_text(yaml.safe_dump(said, sort_keys=False))
        words = ["study", verb, str(file), *(["--out", str(tmp_path / "out")] if verb == "run" else []), *more]
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return tell


def test_every_paper_has_its_studies_and_small_forms():
    wanted = {
        "adapterfusion", "adapterfusion-small", "adamix-glue", "adamix-nlg", "adamix-fewshot", "adamix-ablations",
        "adamix-small", "adamix-nlg-small", "adamix-fewshot-small", "compacter-glue", "compacter-superglue",
        "compacter-low-resource", "compacter-efficiency", "compacter-small", "compacter-superglue-small",
        "compacter-low-resource-small", "compacter-efficiency-small",
    }  # fmt: skip
    assert wanted <= set(study_names())


@pytest.mark.parametrize("name", study_names())
def test_the_studies_that_ship_can_be_planned(name, here, tmp_path, capsys):
    """With stand-ins for hosts and rows: every cell has a name or waits for one, and costs something."""
    from inlay.data.builtin import builtin_tasks

    study = read_study(name)
    for task in study.tasks:
        folder = tmp_path / (builtin_tasks()[task].folder or task) if task in builtin_tasks() else tmp_path / task
        folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            (folder / f"{split}.jsonl").write_text("")
    hosts = [word for host in study.hosts for word in ("--host", f"{host}={here / 'bert'}")]
    main(["study", "plan", name, *hosts, "--data-dir", str(tmp_path), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert {line["way"] for line in facts["ways"]} == set(study.ways)
    assert facts["cells_left"] >= sum(len(slots_of(study, way)) for way in study.ways)
    assert facts["seconds"] > 0


@pytest.mark.parametrize("name", study_names())
def test_the_studies_that_ship_have_no_mistakes(name):
    study = read_study(name)
    assert study.about
    assert study.name == name
    assert all(slots_of(study, way) for way in study.ways)


@pytest.mark.parametrize("name", study_names())
def test_the_studies_that_ship_say_what_they_do(name):
    """A study's default for splits stands above its recipe's, which then has no effect; `search` needs a choice."""
    study = read_study(name)
    recipe = study.settings.get("recipe")
    if recipe is not None and "splits" in read_recipe(recipe)["settings"]:
        assert "splits" in study.settings
    if "search" in study.model_fields_set:
        assert any(len(drafts(study, slot)) > 1 for way in study.ways for slot in slots_of(study, way))


def test_every_mistake_is_told_at_once(mistake):
    told = mistake(
        groups={"targets": ["b", "d"]},
        settings={"batchsize": 8},
        against="singel",
        ways=FILE["ways"]
        | {
            "more": {"kind": "fusion", "members": [{"way": "singles"}]},
            "x": {"learning": 1},
            "silver": {"train_file": "silver.jsonl"},
            "y": {"grid": {"lrr": [1]}},
        },
    )
    for line in (
        "group 'targets': no task 'd'",
        "settings: no setting 'batchsize'. Did you mean 'batch_size'?",
        "against: no way 'singel'. Did you mean 'single'?",
        "way 'more': no way 'singles'. Did you mean 'single'?",
        "way 'x': no setting 'learning'",
        "way 'silver': train_file says where rows are, which a task does",
        "way 'y', grid: no setting 'lrr'",
    ):
        assert line in told


def test_ways_that_need_each_other(mistake):
    ways = {
        "one": {"kind": "fusion", "members": [{"way": "two"}, {"way": "two", "tasks": "targets"}]},
        "two": {"kind": "fusion", "members": [{"way": "one"}, {"way": "one", "tasks": "targets"}]},
    }
    assert "one → two → one need each other in a circle" in mistake(ways=ways, against=None)


@pytest.mark.parametrize("name", study_names())
def test_fusions_that_ship_have_one_member_of_the_target_and_no_more(name):
    """A member that learned the target from other rows would be a fusion's secret."""
    study = read_study(name, data_dir=Path("rows"))
    for way in (name for name, way in study.ways.items() if way.kind == "fusion"):
        for slot in slots_of(study, way):
            own = [member for draft in drafts(study, slot)[:1] for member in draft.members if member.task == slot.task]
            assert [member.rows for member in own] == [slot.rows], str(slot)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ({"kind": "fusion", "members": [{"way": "single"}]}, "needs at least two members, here it has 1"),
        ({"kind": "fusion"}, "needs members"),
        ({"kind": "routing", "of": "single", "routing": "first"}, "which trains no mixture"),
        ({"kind": "sequential", "from": {"way": "single", "tasks": ["b"]}, "tasks": ["b"]}, "no task to start from"),
        ({"kind": "fusion", "tasks": ["a"], "members": [{"way": "single"}, {"way": "source", "tasks": "sources"}]}, "for the task 'a', which that way does not learn"),
        ({"options": {"reduktion": 4}}, "has no setting 'reduktion'"),
        ({"method": "pfeifer"}, "unknown method 'pfeifer'. Did you mean 'pfeiffer'?"),
        ({"kind": "head", "method": "lora"}, "nothing would use it"),
        ({"kind": "heads"}, "Input should be 'inlay', 'head'"),
        ({"batch_size": 64}, "32 training rows are fewer than a batch of 64"),
        ({"kind": "embeddings", "lr": 1e-3}, "no use for lr"),
        ({"kind": "embeddings", "grid": {"lr": [1]}}, "C alone"),
        ({"kind": "setfit", "pairs": 1.0}, "SetFit's own are lr, epochs, batch_size"),
        ({"kind": "setfit", "grid": {"C": [1]}}, "no setting 'C'"),
        ({"kind": "setfit", "by_rows": {32: {"pairs": 1.0}}}, "SetFit's own are lr, epochs, batch_size"),
        ({"kind": "setfit", "lr": -1}, "greater than 0"),
        ({"kind": "setfit", "epochs": 1.7}, "valid integer"),
        ({"kind": "setfit", "batch_size": 0}, "greater than or equal to 1"),
        ({"kind": "fusion", "members": [{"way": "logreg"}, {"way": "single"}]}, "'logreg' (kind embeddings) leaves no inlay to build on"),
        ({"kind": "fusion", "members": [{"way": "fused"}, {"way": "single"}]}, "'fused' (kind fusion) leaves no inlay to build on"),
        ({"kind": "sequential", "from": {"way": "fused", "tasks": ["b"]}, "tasks": ["c"]}, "'fused' (kind fusion) leaves no inlay to build on"),
        ({"kind": "embeddings", "by_rows": {32: {"lr": 1e-3}}}, "no use for lr"),
        ({"seed": 3}, "seed is what the study itself says"),
        ({"grid": {"lr": []}}, "nothing to choose from"),
        ({"lr": -1}, "greater than 0"),
        ({"settings": None}, "settings: Input should be a valid dictionary"),
        ({"method": "mixture", "routing": "ensemble"}, "does not use routing; kind routing does"),
        ({"passes": 8}, "does not use passes"),
        ({"kind": "embeddings", "grid": {"C": ["a", 0, 1]}}, "the grid's C has numbers above 0, got 'a', 0."),
        ({"by_rows": {64: {"lr": 0.1}}}, "way 'new', by_rows 64: there are only 32 training rows."),
        ({"grid": {"members": [1]}}, "members is what the study itself says"),
        ({"kind": "joint", "grid": {"title": ["x"]}}, "way 'new', grid: title is no setting, but a word of the way itself"),
    ],
)  # fmt: skip
def test_a_way_that_no_task_can_have(mistake, way, told):
    assert told in mistake(ways=FILE["ways"] | {"new": way})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"by_rows": {64: {"lr": 0.1}}}, "by_rows 64: there are only 32, all training rows."),
        ({"groups": FILE["groups"] | {"both": ["sources", "c"]}}, "group 'both': no task 'sources'"),
        ({"groups": FILE["groups"] | {"none": []}}, "group 'none' has no task."),
        ({"groups": FILE["groups"] | {"all": ["a"]}}, "group 'all': that is what all tasks are called"),
        ({"against": "source"}, "against: tables do not have way 'source' (show: false)"),
        ({"score": "acuracy"}, "score: no score 'acuracy'. Did you mean 'accuracy'?"),
        ({"settings": {"seeds": [1]}}, "settings: seeds is no setting, but a word of the study itself"),
    ],
)
def test_words_of_a_study_that_mean_nothing(mistake, changed, told):
    assert told in mistake(**changed)


def test_a_task_that_a_group_names_twice_is_there_once(here):
    study = study_in(here, groups=FILE["groups"] | {"targets": ["c", "c"]})
    assert [slot.task for slot in slots_of(study, "logreg")] == ["c", "c"], "one for each seed"


def test_fewer_rows_than_a_batch_are_one_batch_where_nothing_names_its_size(here):
    few = {"rows": [8], "settings": {"epochs": 1}, "ways": {"one": {}}, "against": None}
    assert Plan.of(study_in(here, **few)).drafts
    for said in ({"recipe": "default"}, {"batch_size": 16}):
        with pytest.raises(InlayError, match="8 training rows are fewer than a batch of"):
            Plan.of(study_in(here, **few | {"ways": {"one": said}}))


def test_rows_and_hosts_that_are_not_there(mistake, here):
    told = mistake("run", hosts={"bert": str(here / "nowhere")}, data_dir=str(here / "none"))
    assert "nowhere" in told
    for task in "abc":
        assert f"the rows of {task}:" in told


def test_choosing_and_judging_by_the_same_rows(mistake, here):
    own = {"train_file": str(here / "data/b/train.jsonl"), "validation_file": str(here / "data/b/test.jsonl")}
    told = mistake(
        tasks={"own": own},
        groups=None,
        settings=FILE["settings"] | {"splits": "official"},
        ways={"head": {"kind": "head"}},
        against=None,
    )
    assert "would choose and judge at once" in told


def test_a_folder_of_another_study(here, finished, capsys, tmp_path):
    out, _, _ = finished
    before = (out / "study.json").read_text()
    with pytest.raises(InlayError, match="belongs to the study 'tiny', not to 'other'"):
        StudyFolder(out).claim(Plan.of(study_in(here, name="other")).facts())
    assert (out / "study.json").read_text() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InlayError, match=r"is no study's folder and is not empty \(it holds notes.txt\)"):
        StudyFolder(tmp_path).claim(Plan.of(study_in(here)).facts())
    for words in (
        ["study", "show", str(tmp_path)],
        ["study", "table", str(tmp_path / "nothing")],
        ["study", "plan", "no-such-study"],
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
    assert "no study 'no-such-study'" in capsys.readouterr().err


def test_a_full_disk_ends_the_study_and_loses_nothing(here, tmp_path, monkeypatch, capsys):
    study = study_in(here, ways={"logreg": {"kind": "embeddings"}}, against=None, seeds=[0])
    write, written = StudyFolder.write_result, []

    def some(self, name, result):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(name)
        write(self, name, result)

    monkeypatch.setattr(StudyFolder, "write_result", some)
    plan, folder = Plan.of(study), StudyFolder(tmp_path / "out")
    folder.claim(plan.facts())
    with pytest.raises(OSError, match="the disk is full"):
        Schedule(View(plan, folder), Inline()).run()
    monkeypatch.undo()
    view, ran = run_here(study, tmp_path / "out")
    assert len(view.results) == 2
    assert ran == [name for name in view.results if name not in written], "what was done is not run again"
    assert not view.failures


def test_an_address_without_an_engine(mistake):
    assert "it needs --engine ray" in mistake("run", "--address", "127.0.0.1:1")


# meaning


def test_rows_of_a_seed_and_settings_in_their_order(here):
    ways = {"single": {"options": {"size": 4}, "lr": 0.3, "by_rows": {32: {"lr": 0.4}}}}
    study = study_in(
        here,
        ways=ways,
        against=None,
        by_rows={32: {"epochs": 5}},
        tasks={"b": {"max_length": 16}, "c": None, "a": None},
    )
    found = {slot: drafts(study, slot)[0].settings for slot in slots_of(study, "single")}
    for slot, settings in found.items():
        assert (settings["rows"], settings["rows_seed"], settings["seed"]) == (32, slot.seed, slot.seed)
        assert (settings["lr"], settings["epochs"], settings["splits"]) == (0.4, 5, "held_out")
        assert settings.get("max_length") == (16 if slot.task == "b" else None)


def test_a_grid_is_every_combination(here):
    grid = {"lr": [0.1, 0.2], "options.size": [2, 4, 8]}
    study = study_in(here, ways={"single": {"grid": grid}}, against=None)
    made = drafts(study, slots_of(study, "single")[0])
    assert [(d.settings["lr"], d.settings["options"]["size"]) for d in made] == [
        (lr, s) for lr in (0.1, 0.2) for s in (2, 4, 8)
    ]


def test_a_study_needs_its_parts():
    with pytest.raises(InlayError, match="hosts"):
        study_from({"tasks": {"rte": None}, "ways": {"head": {"kind": "head"}}})
    with pytest.raises(InlayError, match="a study's file has names"):
        study_from(["hosts"])


def test_plan_and_diff_by_command(here, finished, tmp_path, capsys):
    said = FILE | {"hosts": {"bert": str(here / "bert")}, "data_dir": str(here / "data"), "name": "tiny"}
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(said | {"seeds": [0, 2]}, sort_keys=False))
    out = str(finished[0])
    main(["study", "plan", str(file), "--out", out, "--json"])
    facts = json.loads(capsys.readouterr().out)
    left = {line["way"]: line["cells_left"] for line in facts["ways"]}
    assert left == {"logreg": 2, "source": 0, "single": 4, "fused": 2}
    assert facts["measured"]
    main(["study", "diff", out, str(file), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["changed"] == ["seeds: [0, 1] → [0, 2]"]
    assert facts["cells_done_and_valid"] == 2 + 2 + 4 + 2
    assert len(facts["cells_done_and_not_used"]) == 2 + 4 + 2
    main(["study", "diff", out, str(file)])
    assert "10 cells stay valid" in capsys.readouterr().out
    ways = {name: dict(way) for name, way in FILE["ways"].items()} | {"more": {"method": "lora"}}
    ways["source"]["options"] = {"size": 2}
    file.write_text(yaml.safe_dump(said | {"ways": ways}, sort_keys=False))
    main(["study", "diff", out, str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["changed"] == [
        "ways.source.settings.options.size: 4 → 2",
        "ways.more: nothing → {'settings': {'method': 'lora'}}",
    ]


def test_a_cell_that_is_broken_by_chance_is_tried_again(here, tmp_path, monkeypatch):
    study = study_in(here, ways={"logreg": {"kind": "embeddings"}}, against=None, seeds=[0], groups={"targets": ["b"]})
    work, tries = worker.WORK["embeddings"], []

    def some(*given):
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("not enough memory")
        return work(*given)

    monkeypatch.setitem(worker.WORK, "embeddings", some)
    view, ran = run_here(study, tmp_path / "out")
    assert len(ran) == 3
    assert len(view.filled) == 1
    assert not view.failures, "a cell that is done has not failed"


@pytest.mark.parametrize("twice", [{"seeds": [0, 1, 0]}, {"rows": [100, 100]}, {"ways": {"a": {"seeds": [2, 2]}}}])
def test_the_same_seed_or_number_of_rows_twice_is_refused(twice, tmp_path):
    told = {"hosts": {"h": "h"}, "tasks": ["sst2"], "ways": {"a": {}}} | twice
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump(told))
    with pytest.raises(InlayError, match="more than once"):
        read_study(tmp_path / "twice.yaml")
