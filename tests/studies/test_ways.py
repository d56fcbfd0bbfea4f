"""The kinds of ways, each run for real on a tiny host."""

import json
import shutil
import sys
import warnings

import pytest
import yaml

from inlay import InlayError
from inlay.cli import main
from inlay.runs.folder import Run
from inlay.studies.records import export
from inlay.studies.tables import tables
from inlay.studies.ways import JOINT, drafts, slots_of
from tests.studies.tiny import run_here, study_in
from tests.training.small import save_decoder, save_t5, write_rows

JOINTLY = {
    "mt-a": {"kind": "joint", "tasks": "all", "options": {"size": 4}, "grid": {"lr": [0.01, 0.02]}, "epochs": 1},
    "fused": {"kind": "fusion", "members": [{"way": "mt-a", "tasks": "sources"}, {"way": "mt-a"}]},
    "next": {"kind": "sequential", "from": {"way": "mt-a", "tasks": ["a"]}, "tasks": ["c"]},
}


@pytest.fixture(scope="module")
def jointly(here, tmp_path_factory):
    out = tmp_path_factory.mktemp("joint") / "out"
    view, ran = run_here(study_in(here, ways=JOINTLY, against="mt-a", seeds=[0]), out)
    assert not view.failures, next(iter(view.failures.values())).error
    return out, view, ran


def test_joint_training_runs_once_and_fills_every_task(jointly):
    _, view, ran = jointly
    wholes = [cell for slot, cells in view.cells.items() if slot.task == JOINT for cell in cells]
    assert len(wholes) == 2  # the grid
    assert len(ran) == 2 + 3 + 2 + 1
    parts = {slot.task: cell for slot, cell in view.filled.items() if slot.way == "mt-a" and slot.task != JOINT}
    assert set(parts) == {"a", "b", "c"}
    chosen = {cell.of for cell in parts.values()}
    best = max(wholes, key=lambda cell: view.results[cell.name]["selected"])
    assert chosen == {best.name}
    record = Run(view.folder.cell(best.name)).record()
    assert record["mode"] == "mt-a"
    for task, cell in parts.items():
        assert view.results[cell.name]["scores"] == record["tasks"][task]["scores"]
        assert len(view.results[cell.name]["said"]) == 40
        assert view.results[cell.name]["trained_parameters"] > view.results[cell.name]["host_parameters"] // 2
    assert [line.way for line in tables(view)[0].lines] == ["mt-a", "fused", "next"]
    assert JOINT not in tables(view)[0].tasks


def test_a_fusion_of_joint_inlays_stands_on_the_host_that_they_trained(jointly):
    _, view, _ = jointly
    for way in ("fused", "next"):
        slot, cell = next((slot, cell) for slot, cell in view.filled.items() if slot.way == way and slot.task == "c")
        whole = view.folder.joint_of(cell.needs()[0])
        assert Run(view.folder.cell(cell.name)).record()["host"] == str(view.folder.cell(whole) / "host")
        assert slot.task == "c"


def test_joint_records_count_as_done_and_are_trained_again_for_weights_alone(here, jointly, tmp_path):
    out, view, _ = jointly
    export(out, tmp_path / "records")
    text = "".join(file.read_text() for file in (tmp_path / "records").rglob("*.json"))
    assert str(out.parent) not in text
    shutil.copytree(tmp_path / "records", tmp_path / "on")
    study = study_in(here, ways=JOINTLY, against="mt-a", seeds=[0])
    again, ran = run_here(study, tmp_path / "on")
    assert ran == []
    assert {str(s): c.name for s, c in again.filled.items()} == {str(s): c.name for s, c in view.filled.items()}
    ways = JOINTLY | {"static": JOINTLY["fused"] | {"value": False, "tasks": ["c"]}}
    again, ran = run_here(study_in(here, ways=ways, against="mt-a", seeds=[0]), tmp_path / "on")
    assert not again.failures, next(iter(again.failures.values())).error
    assert len(ran) == 1 + 3 + 1  # the chosen joint training, its three tasks, the fusion


@pytest.mark.parametrize("mode", ["inlay", "full", "head"])
def test_the_other_modes_of_joint_training(here, tmp_path, mode):
    ways = {"all": {"kind": "joint", "tasks": "all", "joint": mode, "alpha": 0.5}}
    view, _ = run_here(study_in(here, ways=ways, against=None, seeds=[0]), tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    assert len([slot for slot in view.filled if slot.task != JOINT]) == 3
    assert not list((tmp_path / "out").glob("cells/*/host/*.safetensors"))
    whole = next(view.results[cell.name] for slot, cell in view.filled.items() if slot.task == JOINT)
    assert bool(whole["host_bytes"]) == (mode == "full")
    for slot, cell in view.filled.items():
        if slot.task != JOINT:
            own = view.folder.cell(cell.of) / "inlays" / slot.task / "weights.safetensors"
            shared = whole["host_bytes"] // 3  # its files are gone
            assert view.results[cell.name]["stored_bytes"] == own.stat().st_size + shared


def test_what_joint_training_cannot_be(here):
    ways = {
        "one": {"kind": "joint", "tasks": ["a"]},
        "whole": {"kind": "joint", "tasks": "all", "joint": "full"},
        "mt-a": {"kind": "joint", "tasks": "all"},
        "single": {"options": {"size": 4}, "joint": "full"},
        "of-whole": {"kind": "fusion", "members": [{"way": "whole", "tasks": "sources"}, {"way": "whole"}]},
        "mixed": {"kind": "fusion", "members": [{"way": "mt-a", "tasks": "sources"}, {"way": "single"}]},
    }
    with pytest.raises(InlayError) as told:
        study_in(here, ways=ways, against=None)
    for words in (
        "at least two tasks, here it has 1",
        "leaves no inlays to build on",
        "trains its own host, so nothing of 'single' can be beside it",
        "does not use joint; kind joint does",
    ):
        assert words in str(told.value)


def test_few_rows_of_each_class_by_label_words(here, tmp_path):
    """AdaMix's few-shot protocol: K rows of each class, no validation rows, the label's word at the mask."""
    import transformers

    folder = tmp_path / "bert"
    transformers.BertForMaskedLM.from_pretrained(here / "bert").save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(here / "bert").save_pretrained(folder)
    words = {"answer_with": "words", "label_words": ["bad", "good"], "labels": ["negative", "positive"]}
    said = words | {"template": "{text} w1 {target}", "per_class": 8, "validation": False, "max_steps": 4, "lr": 0.02}
    ways = {
        "logreg": {"kind": "embeddings"},
        "full": {"kind": "full"},
        "mixed": {"method": "mixture", "options": {"modules": 2, "method": {"kind": "pfeiffer", "size": 4}}},
    }
    study = study_in(
        here, ways=ways, settings={"batch_size": 8} | said, rows=None, against="full", groups={"targets": ["c"]}
    )  # fmt: skip
    with pytest.raises(InlayError, match="nothing to choose by"):
        more = {"full": {"kind": "full", "grid": {"lr": [0.1, 0.2]}}}
        study_in(here, ways=more, settings={"batch_size": 8} | said, rows=None, against=None)
    study = study.model_copy(update={"hosts": {"bert": str(folder)}})
    view, _ = run_here(study, tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    assert {view.results[cell.name]["rows"]["train"] for cell in view.filled.values()} == {16}
    drawn = {
        slot.seed: Run(view.folder.cell(cell.name)).record()["rows_sha256"]["train"]
        for slot, cell in view.filled.items()
        if slot.way == "full"
    }
    assert drawn[0] != drawn[1], "each seed draws its own rows"
    assert tables(view)[0].title == "bert, 8 training rows of each class"


def test_text_is_learned_and_judged_in_a_study(tmp_path):
    says = ("name", "food", "is", "cheap", "french")
    save_decoder(tmp_path / "gpt2", "gpt2", says=says)
    save_t5(tmp_path / "t5", says=says)
    lines = [
        {"text": "name w1 food french", "answers": ["w1 is french"]},
        {"text": "name w2", "answers": ["w2 is cheap"]},
    ]
    for split, count in (("train", 24), ("test", 6)):
        file = tmp_path / "data" / f"{split}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(lines[i % 2] | {"text": f"{lines[i % 2]['text']} w{i % 30}"}) + "\n"
                                for i in range(count)) if split == "train" else
                        "".join(json.dumps(lines[i % 2] | {"text": f"w{i} {lines[i % 2]['text']}"}) + "\n"
                                for i in range(count)))  # fmt: skip
    task = {"kind": "text", "text": "text", "label": "answers", "metrics": ["exact_match", "token_f1"]}
    said = {
        "hosts": {"gpt2": str(tmp_path / "gpt2"), "t5": str(tmp_path / "t5")},
        "tasks": {
            "e2e": task | {f"{split}_file": str(tmp_path / "data" / f"{split}.jsonl") for split in ("train", "test")}
        },
        "settings": {"batch_size": 8, "epochs": 1, "max_length": 32},
        "ways": {
            "full": {"kind": "full"},
            "lora": {"method": "lora", "options": {"rank": 2}, "grid": {"lr": [0.001, 0.01]}},
            "adamix": {"method": "mixture", "options": {"modules": 2, "method": {"kind": "lora", "rank": 2}}},
        },
        "against": "full",
        "name": "text",
    }
    file = tmp_path / "text.yaml"
    file.write_text(yaml.safe_dump(said, sort_keys=False))
    main(["study", "plan", str(file)])
    from inlay.studies.file import read_study

    view, _ = run_here(read_study(file), tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    assert len(tables(view)) == 2
    for result in view.results.values():
        assert len(result["points"]) == 6
        assert "w1 is french" not in json.dumps(result)


def test_sources_of_several_ways_are_tried_and_the_best_by_validation_rows_is_taken(here, tmp_path):
    ways = {
        "long": {"tasks": ["a"], "seeds": [0], "options": {"size": 4}, "epochs": 2, "show": False},
        "short": {"tasks": ["b"], "seeds": [0], "options": {"size": 4}, "show": False},
        "next": {
            "kind": "sequential",
            "tasks": ["c"],
            "from": [{"way": "long", "tasks": ["a"]}, {"way": "short", "tasks": ["b"]}],
        },
    }
    view, _ = run_here(study_in(here, ways=ways, against=None, seeds=[0]), tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    (tried,) = (cells for slot, cells in view.cells.items() if slot.way == "next")
    assert [cell.draft.point["from"] for cell in tried] == ["a", "b"]
    begun = {cell.draft.point["from"]: cell.start for cell in tried}
    assert begun == {slot.task: cell.name for slot, cell in view.filled.items() if slot.way in ("long", "short")}
    best = max(tried, key=lambda cell: view.results[cell.name]["selected"])
    assert next(cell for slot, cell in view.filled.items() if slot.way == "next").name == best.name


def test_sources_of_one_task_are_told_apart_by_their_way(here):
    ways = {
        "long": {"tasks": ["a"], "seeds": [0], "epochs": 2, "show": False},
        "short": {"tasks": ["a"], "seeds": [0], "show": False},
        "next": {
            "kind": "sequential",
            "tasks": ["c"],
            "from": [{"way": "long", "tasks": ["a"]}, {"way": "short", "tasks": ["a"]}],
        },
    }
    study = study_in(here, ways=ways, against=None, search="first")
    (found,) = {tuple(d.point["from"] for d in drafts(study, slot)) for slot in slots_of(study, "next")}
    assert found == ("a (long)", "a (short)")  # seeds after the first look for the chosen one by it


def test_setfit_reads_what_holds_with_a_number_of_rows(here):
    way = {"kind": "setfit", "lr": 1e-4, "by_rows": {32: {"epochs": 5, "lr": 3e-5}}, "grid": {"batch_size": [4, None]}}
    study = study_in(here, ways={"setfit": way}, against=None)
    found = [draft.more for draft in drafts(study, slots_of(study, "setfit")[0])]
    assert found == [{"lr": 3e-5, "epochs": 5, "batch_size": size} for size in (4, 16)]


@pytest.mark.long
def test_setfit_answers_as_when_its_library_is_used_by_hand(here, tmp_path):
    """The rows, the seed and the settings that a user of SetFit would give it, and the same answers."""
    setfit = pytest.importorskip("setfit", reason="pip install 'inlay[setfit]'")
    import datasets
    from sentence_transformers import SentenceTransformer
    from sklearn.linear_model import LogisticRegression

    from inlay.data import prepare
    from inlay.runs.settings import Settings

    ways = {"setfit": {"kind": "setfit", "tasks": ["a"], "lr": 2e-3, "grid": {"epochs": [1, 2]}}}
    study = study_in(here, ways=ways, against=None, rows=[12], seeds=[3], settings={"max_length": 16, "epochs": 7})
    view, _ = run_here(study, tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    assert len(view.results) == 2  # the grid
    (cell,) = view.filled.values()
    result = view.results[cell.name]
    assert result["identity"]["more"].keys() == {"lr", "epochs", "batch_size"}
    assert result["trained_parameters"] > result["host_parameters"]
    assert "setfit" in result["versions"]

    settings = Settings(
        host=str(here / "bert"), out=tmp_path, task="a", data_dir=here / "data", rows=12, rows_seed=3, splits="held_out"
    )
    prepared = prepare(settings)
    body = SentenceTransformer(str(here / "bert"))
    body.max_seq_length = 16
    model = setfit.SetFitModel(model_body=body, model_head=LogisticRegression(max_iter=1000))
    asked = setfit.TrainingArguments(
        output_dir=str(tmp_path / "s"), seed=3, body_learning_rate=2e-3, num_epochs=cell.draft.point["epochs"],
        save_strategy="no", report_to="none",
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"text": e.texts[0][0], "label": e.target} for e in prepared.train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setfit.Trainer(model=model, args=asked, train_dataset=rows).train()
    answers = model.predict([e.texts[0][0] for e in prepared.test], as_numpy=True)
    assert result["said"] == "".join(str(label) for label in answers)


def test_setfit_without_validation_rows(here, tmp_path):
    pytest.importorskip("setfit", reason="pip install 'inlay[setfit]'")
    few = {"max_length": 16, "per_class": 4, "validation": False}
    study = study_in(
        here, ways={"setfit": {"kind": "setfit", "tasks": ["a"]}}, against=None, seeds=[0], rows=None, settings=few
    )
    view, _ = run_here(study, tmp_path / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    (result,) = view.results.values()
    assert result["validation"] == {}
    assert len(result["said"]) == 40


def test_what_setfit_cannot_do_is_told(here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "setfit", None)
    study = study_in(here, ways={"setfit": {"kind": "setfit", "tasks": ["a"]}}, against=None, seeds=[0])
    view, _ = run_here(study, tmp_path / "out")
    (failure,) = view.failures.values()
    assert "pip install 'inlay[setfit]'" in failure.error


def test_setfit_reads_single_texts_with_labels_alone(here, tmp_path):
    lines = [{"text": f"good w{i}", "pair": f"w{i}", "label": "yes" if i % 2 else "no"} for i in range(40)]
    write_rows(tmp_path / "data" / "pairs" / "train.jsonl", lines)
    write_rows(tmp_path / "data" / "pairs" / "test.jsonl", [line | {"text": "bad"} for line in lines[:8]])
    study = study_in(
        here, tasks={"pairs": {"pair": "pair"}}, groups=None, ways={"s": {"kind": "setfit"}}, against=None, seeds=[0]
    )
    study = study.model_copy(update={"data_dir": tmp_path / "data"})
    view, _ = run_here(study, tmp_path / "out")
    assert "SetFit answers classification of single texts" in next(iter(view.failures.values())).error
