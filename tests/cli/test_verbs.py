"""Every verb, run as a process."""

import json
import time

import pytest

from inlay.cli.app import VERBS
from tests.cli.conftest import DATA


def test_help_is_quick_and_does_not_import_torch(inlay_cli, place):
    told = inlay_cli("--help").stdout
    assert all(verb in told for verb in VERBS)
    import subprocess
    import sys

    for verb in ("train", "demo"):
        script = f"import sys; sys.argv = ['inlay', '{verb}', '--help']\nfrom inlay.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=place).returncode == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    import contextlib
    import io

    from inlay.cli import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    assert "Example" in told.getvalue()
    assert f"inlay {verb}" in told.getvalue()


def test_train_writes_a_run_that_describes_itself(trained):
    run = trained / "a"
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["task"]["labels"] == ["negative", "positive"]
    assert record["scores"]["accuracy"] > 0.6
    assert record["versions"]["torch"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (run / "checkpoint.safetensors").exists()
    page = (run / "report.html").read_text()
    assert "Confusion matrix" in page
    assert "<svg" in page
    fetched = ("<script", "<link", '<img src="http', "@import", "url(http")
    assert not any(word in page for word in fetched), "the page must open without a network"


def test_fuse_keeps_its_members_and_draws_them(fused):
    assert sorted(member.name for member in (fused / "members").iterdir()) == ["a", "b"]
    assert "What the fusion listens to" in (fused / "report.html").read_text()


def test_eval_gives_the_scores_of_the_run(inlay_cli, fused):
    told = json.loads(inlay_cli("eval", "runs/fused", "--json").stdout)
    assert told["scores"] == json.loads((fused / "run.json").read_text())["scores"]
    told = json.loads(inlay_cli("eval", "runs/a/inlay", "--file", "validation.jsonl", "--json").stdout)
    assert told["scores"] == json.loads((fused.parent / "a" / "run.json").read_text())["scores"]


def test_predict_from_stdin_agrees_with_a_file(inlay_cli, trained, place):
    texts = ["w1 good w2", "bad w3"]
    from_stdin = [
        json.loads(line) for line in inlay_cli("predict", "runs/a", stdin="\n".join(texts) + "\n").stdout.splitlines()
    ]
    assert [entry["text"] for entry in from_stdin] == texts
    assert all(abs(sum(entry["probabilities"].values()) - 1) < 1e-4 for entry in from_stdin)
    assert all(entry["label"] == max(entry["probabilities"], key=entry["probabilities"].get) for entry in from_stdin)
    (place / "texts.csv").write_text("text\n" + "\n".join(texts) + "\n")
    inlay_cli("predict", "runs/a", "--file", "texts.csv", "--out", "labels.jsonl")
    assert [json.loads(line) for line in (place / "labels.jsonl").read_text().splitlines()] == from_stdin


def test_inspect_and_ls_know_the_runs(inlay_cli, fused, place):
    told = inlay_cli("inspect", "runs/fused", "--picture", "heat.png")
    assert "members" in told.stdout
    assert (place / "heat.png").exists()
    assert (place / "heat.svg").exists()
    assert json.loads(inlay_cli("inspect", "runs/a/inlay", "--json").stdout)["method"]["kind"] == "pfeiffer"
    began = time.process_time()
    runs = json.loads(inlay_cli("ls", "runs", "--json").stdout)
    assert {run[0] for run in runs} >= {"runs/a", "runs/b", "runs/fused"}
    assert time.process_time() - began < 1


def test_prune_measures_what_it_costs(inlay_cli, fused):
    told = json.loads(inlay_cli("prune", "runs/fused", "--keep", "1", "--out", "runs/pruned", "--json").stdout)
    assert len(told["kept"]) == len(told["gone"]) == 1
    assert told["before"] == json.loads((fused / "run.json").read_text())["scores"]
    again = json.loads(inlay_cli("eval", "runs/pruned", "--json").stdout)
    assert again["scores"] == told["after"]


def test_merge_makes_a_mixture_plain_with_the_same_answers(inlay_cli, place):
    mixture = ("--method", "mixture", "--options", "method={kind: pfeiffer, reduction: 2}", "--options", "modules=2")
    inlay_cli("train", *DATA, "--name", "m", *mixture, "--out", "runs/m")
    inlay_cli("merge", "runs/m", "--out", "merged")
    told = json.loads(inlay_cli("eval", "merged", "--file", "validation.jsonl", "--json").stdout)
    assert told["scores"] == json.loads((place / "runs" / "m" / "run.json").read_text())["scores"]
    assert json.loads((place / "merged" / "inlay.json").read_text())["method"]["kind"] == "pfeiffer"


def test_params_counts_as_published(inlay_cli):
    assert json.loads(inlay_cli("params", "bert-base", "--method", "pfeiffer", "--json").stdout)["trainable"] == 894_528
    assert {row["method"] for row in json.loads(inlay_cli("params", "bert", "--json").stdout)} >= {
        "pfeiffer",
        "houlsby",
        "compacter",
    }


def test_validate_shows_labels_lengths_and_cost(inlay_cli, place):
    (place / "job.yaml").write_text(
        "host: bert\ntrain: train.jsonl\nvalidation: validation.jsonl\nbatch_size: 16\nepochs: 2\n"
    )
    told = json.loads(inlay_cli("validate", "--config", "job.yaml", "--json").stdout)
    assert told["labels"] == {"negative": 48, "positive": 48}
    assert told["steps_at_most"] == 12
    assert not (place / "runs" / "unnamed").exists(), "validate writes nothing"


def test_full_fine_tuning_keeps_its_host(inlay_cli, place):
    inlay_cli("train", *DATA, "--mode", "full", "--name", "all", "--out", "runs/full")
    told = json.loads(inlay_cli("eval", "runs/full", "--json").stdout)
    assert told["scores"] == json.loads((place / "runs" / "full" / "run.json").read_text())["scores"]


def test_demo_refuses_a_folder_that_is_not_empty(inlay_cli, place):
    assert "is not empty" in inlay_cli("demo", "--out", ".", code=2).stderr
