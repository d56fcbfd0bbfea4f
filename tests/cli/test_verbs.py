"""Every verb, from its words to what it says and writes."""

import json
import re
import shlex
import shutil

import click
import pytest
import torch
from safetensors.torch import load_file

import inlay
from inlay.cli import app, main
from inlay.cli.app import VERBS
from inlay.runs.use import open_for_use
from tests.cli.words import DATA
from tests.training.small import rows, write_rows


def test_help_is_quick_and_does_not_import_torch(inlay_process, place):
    told = inlay_process("--help").stdout
    assert all(verb in told for verb in VERBS)
    import subprocess
    import sys

    for verb in ("train", "demo"):
        script = f"import sys; sys.argv = ['inlay', '{verb}', '--help']\nfrom inlay.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=place).returncode == 0


def test_a_list_of_everything_does_not_import_torch(inlay_cli):
    import subprocess
    import sys

    script = "import sys; sys.argv = ['inlay', 'ls', '--json']\nfrom inlay.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"] == json.loads(inlay_cli("ls", "methods", "--json").stdout)["methods"]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_every_verb_can_be_said(verb, capsys, tmp_path, monkeypatch):
    """Each has one at least, and every flag and argument of it is one that the verb takes."""
    monkeypatch.chdir(tmp_path)
    main([verb, "--help"])
    told = capsys.readouterr().out
    examples = [shlex.split(line.split(" > ")[0]) for line in re.findall(rf"^ .*?\binlay {verb}\b(.*)$", told, re.M)]
    assert "Example" in told
    assert examples
    command = app.inlay.get_command(click.Context(app.inlay), verb)
    for words in examples:
        for word in words:  # some paths must be there
            if "/" in word:
                (tmp_path / word).mkdir(parents=True, exist_ok=True)
        command.make_context(verb, words)  # raises where a word is not understood


def test_train_writes_a_run_that_describes_itself(trained):
    run = trained / "a"
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["task"]["labels"] == ["negative", "positive"]
    assert record["scores"]["accuracy"] > 0.6
    assert record["versions"]["torch"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4, "the fitted head, then three epochs"
    assert not (run / "checkpoint.safetensors").exists()
    page = (run / "report.html").read_text()
    assert "Confusion matrix" in page
    assert "<svg" in page
    fetched = ("<script", "<link", '<img src="http', "@import", "url(http")
    assert not any(word in page for word in fetched), "the page must open without a network"


def test_fuse_keeps_its_members_and_draws_them(fused):
    assert sorted(member.name for member in (fused / "members").iterdir()) == ["a", "b"]
    assert "What the fusion listens to" in (fused / "report.html").read_text()


def test_members_of_one_name_fuse_and_a_run_gives_its_own_name(inlay_here, trained, place):
    (place / "elsewhere").mkdir()
    inlay_here("train", *DATA, "--options", "reduction=4", "--out", "elsewhere/a", "--quiet")
    inlay_here("fuse", "runs/a", "elsewhere/a", *DATA, "--out", "runs/a fused", "--quiet")
    run = place / "runs" / "a fused"
    assert json.loads((run / "run.json").read_text())["name"] == "a-fused"
    assert sorted(member.name for member in (run / "members").iterdir()) == ["a", "a-2"]
    assert json.loads(inlay_here("eval", "runs/a fused", "--json"))["scores"] == scores_of(run)


def test_own_rows_of_one_name_are_tasks_of_their_own_in_a_matrix(inlay_here, trained, place):
    """Both are called own, and have the same labels: the one's rows are not the other's column."""
    turned = {"positive": "negative", "negative": "positive"}
    for name in ("train", "validation"):
        told = [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]
        write_rows(place / f"{name}-turned.jsonl", [row | {"label": turned[row["label"]]} for row in told])
    words = [word.replace(".jsonl", "-turned.jsonl") for word in DATA]
    inlay_here("train", *words, "--options", "reduction=2", "--out", "turned", "--quiet")
    found = json.loads(inlay_here("eval", "runs/a", "runs/b", "turned", "--json"))
    assert found["tasks"] == ["own of runs/a", "own of turned"]
    assert found["states"][2]["scores"]["own of turned"] == scores_of(place / "turned")
    compared = json.loads(inlay_here("eval", "--matrix", "runs/a", "runs/b", "turned", "--json"))["scores"]
    runs = {task: ways["single"]["runs"] for task, ways in compared.items()}
    assert runs == {"own of runs/a": ["runs/a", "runs/b"], "own of turned": ["turned"]}


def test_a_report_of_odd_labels_and_of_a_metric_that_is_not_defined(inlay_here, place):
    odd = {"positive": "<script>alert(1)</script> $x_$", "negative": "日本語"}
    write_rows(place / "odd.jsonl", [row | {"label": odd[row["label"]]} for row in rows(32)])
    flags = ("--host", "bert", "--epochs", "1", "--batch-size", "8", "--quiet")
    inlay_here("train", *flags, "--train-file", "odd.jsonl", "--out", "runs/odd")
    page = (place / "runs" / "odd" / "report.html").read_text()
    assert "<script" not in page
    assert "日本語" in page[page.index("Confusion matrix") :]
    write_rows(place / "numbers.jsonl", [{"text": f"w{i}", "label": i} for i in range(10)])  # one row validates
    told = inlay_here("train", *flags, "--kind", "regression", "--train-file", "numbers.jsonl", "--out", "runs/numbers")
    assert told.splitlines()[1].split() == ["pearson", "—"]
    assert "pearson nan" in (place / "runs" / "numbers" / "report.html").read_text()


def scores_of(run):
    return json.loads((run / "run.json").read_text())["scores"]


def test_eval_gives_the_scores_of_the_run(inlay_cli, inlay_here, fused):
    assert json.loads(inlay_cli("eval", "runs/fused", "--json").stdout)["scores"] == scores_of(fused)
    told = json.loads(inlay_here("eval", "runs/a/inlay", "--file", "validation.jsonl", "--json"))
    assert told["scores"] == scores_of(fused.parent / "a")


def test_predict_from_stdin_agrees_with_a_file(inlay_process, inlay_here, trained, place):
    texts = ["w1 good w2", "bad w3"]
    told = inlay_process("predict", "runs/a", stdin="\n".join(texts) + "\n").stdout
    from_stdin = [json.loads(line) for line in told.splitlines()]
    assert [entry["text"] for entry in from_stdin] == texts
    for entry in from_stdin:
        assert abs(sum(entry["probabilities"].values()) - 1) < 1e-4
        assert entry["label"] == max(entry["probabilities"], key=entry["probabilities"].get)
    (place / "texts.csv").write_text("text\n" + "\n".join(texts) + "\n")
    inlay_here("predict", "runs/a", "--file", "texts.csv", "--out", "labels.jsonl")
    assert [json.loads(line) for line in (place / "labels.jsonl").read_text().splitlines()] == from_stdin


def test_predict_keeps_every_column_of_a_row(inlay_here, trained, place):
    """An answer whose name a row has already gets a name of its own; here the label is the right one."""
    given = [{"id": 7, "text": "w1 good", "label": "negative", "probabilities": "mine"}, {"id": 8, "text": "bad w3"}]
    write_rows(place / "labelled.jsonl", given)
    told = [json.loads(line) for line in inlay_here("predict", "runs/a", "--file", "labelled.jsonl").splitlines()]
    assert [{name: row[name] for name in asked} for row, asked in zip(told, given, strict=True)] == given
    for row in told:
        assert row["predicted_label"] == max(row["predicted_probabilities"], key=row["predicted_probabilities"].get)
    assert "label" not in told[1], "the names are the same in all rows"
    (again,) = inlay_here("predict", "runs/a", "bad w3").splitlines()
    assert json.loads(again)["label"] == told[1]["predicted_label"]


def test_a_line_of_a_text_file_may_begin_with_a_brace(inlay_here, trained, place):
    """Only on stdin, which has no name to say what it is, such a line is JSON."""
    lines = ["{w1} good", '{"text": "bad"}']
    (place / "braces.txt").write_text("\n".join(lines))
    told = [json.loads(line) for line in inlay_here("predict", "runs/a", "--file", "braces.txt").splitlines()]
    assert [row["text"] for row in told] == lines


def test_predict_takes_columns_of_any_type_along(inlay_here, trained, place):
    import datetime
    from decimal import Decimal

    import pyarrow
    import pyarrow.parquet

    row = {"text": "good w1", "day": datetime.date(2024, 5, 6), "price": Decimal("1.10"), "image": b"\xff"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), place / "typed.parquet")
    told = json.loads(inlay_here("predict", "runs/a", "--file", "typed.parquet"))
    assert (told["day"], told["price"], told["image"]) == ("2024-05-06", "1.10", "/w==")


def test_predict_labels_the_rows_of_a_folder(inlay_here, trained, place, mistake):
    own = place / "folder" / "own"
    own.mkdir(parents=True)
    write_rows(own / "train.jsonl", rows(8, seed=4))
    write_rows(own / "validation.jsonl", [{"id": i, "text": row["text"]} for i, row in enumerate(rows(6, seed=5))])
    words = ("predict", "runs/a", "--data-dir", "folder")
    told = [json.loads(line) for line in inlay_here(*words).splitlines()]
    assert [row["id"] for row in told] == list(range(6)), "validation rows where there are no test rows; without labels"
    (place / "six.txt").write_text("\n".join(row["text"] for row in told))
    alike = [json.loads(line)["label"] for line in inlay_here("predict", "runs/a", "--file", "six.txt").splitlines()]
    assert [row["label"] for row in told] == alike
    assert len(inlay_here(*words, "--split", "train", "--label", "label").splitlines()) == 8
    assert len(inlay_here("predict", "runs/a/inlay", "--data-dir", "folder").splitlines()) == 6
    assert "has no test rows of own; it has train, validation" in mistake(*words, "--split", "test")
    assert "no column 'lable'. Did you mean 'label'?" in mistake(*words, "--split", "train", "--label", "lable")
    assert "one place only" in mistake(*words, "some text")


def test_a_line_of_text_ends_where_a_file_says_so(inlay_here, trained, place):
    texts = ["w1\u2028good", "w2\x0cbad"]
    (place / "lines.txt").write_text("\r\n".join(texts) + "\r\n", newline="")
    told = inlay_here("predict", "runs/a", "--file", "lines.txt")
    assert [json.loads(line)["text"] for line in told.split("\n")[:-1]] == texts


def test_choices_are_predicted_from_the_command_line(inlay_here, place):
    some = [{"q": "w1", "of": ["good", "bad"][:: 1 - 2 * (i % 2)], "label": i % 2} for i in range(32)]
    write_rows(place / "choices.jsonl", some)
    flags = ("--kind", "choice", "--text", "q", "--choices", "of", "--batch-size", "8", "--epochs", "1", "--quiet")
    inlay_here("train", "--host", "bert", "--train-file", "choices.jsonl", *flags, "--out", "runs/choice")
    told = json.loads(inlay_here("predict", "runs/choice", "w1", "bad", "good", "fine"))
    assert told["of"] == ["bad", "good", "fine"]
    assert len(told["probabilities"]) == 3


def test_inspect_and_ls_know_the_runs(inlay_cli, inlay_here, fused, place):
    assert "members" in inlay_cli("inspect", "runs/fused").stdout
    inlay_here("inspect", "runs/fused", "--picture", "heat.png")
    assert (place / "heat.png").exists()
    assert (place / "heat.svg").exists()
    assert json.loads(inlay_here("inspect", "runs/a/inlay", "--json"))["method"]["kind"] == "pfeiffer"
    runs = json.loads(inlay_cli("ls", "runs", "--json").stdout)["runs"]
    assert {run["run"] for run in runs} >= {"runs/a", "runs/b", "runs/fused"}


@pytest.mark.parametrize("layer", ["1", "encoder.0", "all", None])
def test_several_fusions_are_one_heat_map(inlay_here, second_fusion, tmp_path, layer):
    words = ("inspect", "runs/fused", "runs/second", "--picture", str(tmp_path / "heat.png"))
    told = json.loads(inlay_here(*words, *(("--layer", layer) if layer else ()), "--json"))
    assert [facts["name"] for facts in told.values()] == ["both", "second"]
    assert all(len(facts["pictures"]) == 2 for facts in told.values())
    words_in_it = set(re.findall(r"<!-- (\w+) -->", (tmp_path / "heat.svg").read_text()))
    assert {"a", "b"} <= words_in_it, "every member has a column"
    assert {"fused", "second"} <= words_in_it, "every fusion has a row"
    assert (tmp_path / "heat.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def second_fusion(inlay_process, fused):
    inlay_process("fuse", "runs/b", "runs/a", *DATA, "--max-steps", "2", "--name", "second", "--out", "runs/second")


def test_fusions_in_folders_of_one_name_keep_a_row_each(inlay_here, fused, place, tmp_path):
    shutil.copytree(fused, place / "elsewhere" / "fused")
    inlay_here("inspect", "runs/fused", "elsewhere/fused", "--picture", str(tmp_path / "heat"))
    words_in_it = set(re.findall(r"<!-- (\S+) -->", (tmp_path / "heat.svg").read_text()))
    assert {"runs/fused", "elsewhere/fused"} <= words_in_it


def test_a_layer_without_a_fusion_is_refused(inlay_cli, fused, place):
    told = inlay_cli("inspect", "runs/fused", "--picture", "none.png", "--layer", "7", code=2).stderr
    assert "no fusion acts in layer 7. They act in encoder.0, encoder.1" in told
    assert not (place / "none.png").exists()


def test_the_mismatched_rows_of_mnli_are_a_split(inlay_here, place):
    labels = ("entailment", "neutral", "contradiction")
    for split, count in (("train", 24), ("validation", 9), ("mismatched", 6)):
        some = [{"premise": f"w{i}", "hypothesis": "good", "label": labels[i % 3]} for i in range(count)]
        write_rows(place / "glue" / "mnli" / f"{split}.jsonl", some)
    few = ("--batch-size", "8", "--max-steps", "1", "--quiet", "--out", "runs/mnli")
    inlay_here("train", "--host", "bert", "--task", "mnli", "--data-dir", "glue", *few)
    told = json.loads(inlay_here("eval", "runs/mnli", "--split", "mismatched", "--json"))
    assert (told["source"], told["rows"]) == ("mismatched", 6)
    assert json.loads(inlay_here("eval", "runs/mnli", "--json"))["rows"] == 9


def test_prune_measures_what_it_costs(inlay_cli, inlay_here, fused):
    told = json.loads(inlay_cli("prune", "runs/fused", "--keep", "1", "--out", "runs/pruned", "--json").stdout)
    assert len(told["kept"]) == len(told["gone"]) == 1
    assert told["before"] == scores_of(fused)
    assert told["faster"] > 0, "measured beside the scores"
    record = json.loads((fused.parent / "pruned" / "run.json").read_text())
    assert record["faster"] == round(told["faster"], 3)
    assert json.loads(inlay_here("eval", "runs/pruned", "--json"))["scores"] == told["after"]
    assert "What the fusion listens to" in (fused.parent / "pruned" / "report.html").read_text()


def test_a_fusion_is_exported_with_its_members(inlay_cli, inlay_here, fused, place):
    words = ("export", "runs/fused", "--format", "adapterhub", "--out", "as-adapters")
    assert "--without-head" in inlay_cli(*words, code=2).stderr
    inlay_here(*words, "--without-head")
    assert sorted(folder.name for folder in (place / "as-adapters").iterdir()) == ["a", "b", "fusion"]


def test_merge_makes_a_mixture_plain_with_the_same_answers(inlay_cli, inlay_here, place):
    mixture = ("--method", "mixture", "--options", "method={kind: pfeiffer, reduction: 2}", "--options", "modules=2")
    inlay_here("train", *DATA, "--name", "m", *mixture, "--out", "runs/m", "--quiet")
    inlay_cli("merge", "runs/m", "--out", "merged")
    told = json.loads(inlay_here("eval", "merged", "--file", "validation.jsonl", "--json"))
    assert told["scores"] == scores_of(place / "runs" / "m")
    assert json.loads((place / "merged" / "inlay.json").read_text())["method"]["kind"] == "pfeiffer"


def test_half_an_export_is_taken_away_whatever_ends_it(inlay_cli, inlay_here, fused, place, monkeypatch):
    from inlay.checkpoints import export as writing

    original, seen = writing.export, []

    def full(host, name, path, format):
        if seen:
            raise OSError(28, "No space left on device", str(path))
        seen.append(original(host, name, path, format))
        return seen[0]

    monkeypatch.setattr(writing, "export", full)
    words = ("export", "runs/fused", "--format", "adapterhub", "--without-head", "--out", "half")
    assert "the disk is full" in inlay_cli(*words, code=2).stderr
    assert seen
    assert not seen[0].exists()


def test_export_and_import_of_a_lora(inlay_cli, inlay_here, place):
    inlay_here(
        "train", *DATA, "--name", "low", "--method", "lora", "--options", "rank=2", "--out", "runs/low", "--quiet"
    )
    refused = inlay_cli("export", "runs/low", "--format", "peft", "--out", "as-peft", code=2)
    assert "pool" in refused.stderr, "its head pools, which peft has no word for"
    assert not (place / "as-peft").exists()
    inlay_here("export", "runs/low", "--format", "peft", "--out", "as-peft", "--without-head")
    assert json.loads((place / "as-peft" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    told = json.loads(
        inlay_cli("import", "as-peft", "--host", "bert", "--out", "back", "--name", "low", "--json").stdout
    )
    assert told["names"] == ["low"]
    ours, back = (load_file(place / p / "weights.safetensors") for p in ("runs/low/inlay", "back"))
    assert back
    assert all(torch.equal(tensor, ours[key]) for key, tensor in back.items())


def test_params_counts_as_published(inlay_cli, inlay_here):
    assert json.loads(inlay_cli("params", "bert-base", "--method", "pfeiffer", "--json").stdout)["trainable"] == 894_528
    assert {row["method"] for row in json.loads(inlay_here("params", "bert", "--json"))["methods"]} >= {
        "pfeiffer",
        "houlsby",
    }


def test_validate_shows_labels_lengths_and_cost(inlay_cli, place):
    (place / "job.yaml").write_text(
        "host: bert\ntrain_file: train.jsonl\nvalidation_file: validation.jsonl\nbatch_size: 16\nepochs: 2\n"
    )
    told = json.loads(inlay_cli("validate", "--config", "job.yaml", "--json").stdout)
    assert told["labels"] == {"negative": 48, "positive": 48}
    assert told["steps_at_most"] == 12
    assert not (place / "runs" / "unnamed").exists(), "validate writes nothing"


def test_validate_checks_a_joint_config(inlay_here, place):
    rows = {"train_file": "train.jsonl", "validation_file": "validation.jsonl"}
    job = {"host": "bert", "tasks": {"one": rows, "two": rows}, "batch_size": 16, "epochs": 2}
    (place / "joint.yaml").write_text(json.dumps(job))
    told = json.loads(inlay_here("validate", "--config", "joint.yaml", "--json"))
    assert list(told["tasks"]) == ["one", "two"]
    assert told["tasks"]["one"]["rows"]["train"] == 96
    text = inlay_here("validate", "--config", "joint.yaml")
    assert "Nothing is wrong with it." in text
    assert "two" in text
    assert not (place / "runs" / "unnamed").exists(), "validate writes nothing"


def test_full_fine_tuning_keeps_its_host(inlay_here, place):
    inlay_here("train", *DATA, "--mode", "full", "--name", "all", "--out", "runs/full", "--quiet")
    assert json.loads(inlay_here("eval", "runs/full", "--json"))["scores"] == scores_of(place / "runs" / "full")
    with pytest.raises(
        inlay.ConfigError, match="has a host of its own, which was trained, and can be used with no oth"
    ):
        open_for_use(place / "runs" / "full", str(place / "host"))


def test_demo_refuses_a_folder_that_is_not_empty(inlay_cli):
    assert "is not empty" in inlay_cli("demo", "--out", ".", code=2).stderr
