"""Two processes with what draws and what attends: a fusion is as with one, a mixture keeps both in step."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from inlay.cli import main
from tests.cli.words import TRAIN
from tests.training.ranks import launch
from tests.training.small import save_bert


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A host without dropout."""
    return save_bert(
        tmp_path_factory.mktemp("still") / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def flags(small, host):
    files = (
        TRAIN,
        str(small / "train.jsonl"),
        "--validation-file",
        str(small / "validation.jsonl"),
        "--host",
        str(host),
    )
    return (
        *files,
        "--threads",
        "1",
        "--lr",
        "0.01",
        "--batch-size",
        "15",
        "--epochs",
        "2",
        "--head-dropout",
        "0",
        "--quiet",
    )


def same_on_both(ranks):
    one, two = ranks
    assert one
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def history(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_two_processes_fuse_as_one(small, still, tmp_path):
    members = []
    for name, method in (("a", "pfeiffer"), ("b", "houlsby")):
        members.append(str(tmp_path / name))
        words = ("--method", method, "--options", "reduction=4", "--name", name, "--max-steps", "3")
        main(["train", *flags(small, still), *words, "--out", members[-1]])
    alike = ("--pairs", "0")  # each process has pairs of its own rows
    words = ("fuse", *members, *flags(small, still), *alike, "--name", "both", "--json")
    main([*words, "--out", str(tmp_path / "one")])
    told, ranks = launch(tmp_path / "ranks", *words, "--out", str(tmp_path / "two"))
    assert json.loads(told)["processes"] == 2, "one process speaks for both"
    same_on_both(ranks)
    one, two = (load_file(tmp_path / run / "inlay" / "weights.safetensors") for run in ("one", "two"))
    assert any("query" in name for name in one)
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-5), name
    for alone, together in zip(history(tmp_path / "one"), history(tmp_path / "two"), strict=True):
        assert alone["validation_accuracy"] == together["validation_accuracy"]
        assert abs(alone["loss"] - together["loss"]) < 1e-5


@pytest.mark.long
def test_two_processes_with_a_mixture_stay_in_step(small, still, tmp_path, capsys):
    """Each draws its own modules; what both have learned is the same to the bit, and is what is kept."""
    mixture = ("--method", "mixture", "--options", "method={kind: pfeiffer, reduction: 2}", "--options", "modules=3")
    words = ("train", *flags(small, still), *mixture, "--name", "own", "--json")
    told, ranks = launch(tmp_path / "ranks", *words, "--out", str(tmp_path / "two"))
    record = json.loads(told)
    assert (record["processes"], record["status"], record["steps"]) == (2, "finished", 14)
    same_on_both(ranks)
    kept = load_file(tmp_path / "two" / "inlay" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in kept.values()) >= sum(tensor.numel() for tensor in ranks[0].values())
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())
    capsys.readouterr()
    main(["eval", str(tmp_path / "two"), "--json"])
    assert json.loads(capsys.readouterr().out)["scores"] == record["scores"], "what was kept is what was measured"
