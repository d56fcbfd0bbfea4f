"""Two processes train to the same result as one with the same global batch."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch


@pytest.mark.long
def test_two_processes_are_one(small, tmp_path):
    from inlay.runs.settings import Settings
    from inlay.runs.train import train_run
    from tests.training.small import save_bert

    host = save_bert(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    fields = {
        "host": str(host), "train_file": str(small / "train.jsonl"), "validation_file": str(small / "validation.jsonl"), "threads": 1, "lr": 1e-2,
        "batch_size": 15, "accumulate": 2, "epochs": 2, "head_dropout": 0.0, "name": "own", "pairs": 0.0,
    }  # fmt: skip
    one = train_run(Settings(**fields, options={"reduction": 2}, out=tmp_path / "one"))
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
        "-m", "inlay.cli", "train", *flags, "--options", "reduction=2", "--out", str(tmp_path / "two"), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["processes"] == 2, "one process speaks for both"
    weights = [
        safetensors.torch.load_file(run / "inlay" / "weights.safetensors") for run in (one.folder, tmp_path / "two")
    ]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-5), name
    logs = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one.folder, tmp_path / "two")
    ]
    for alone, together in zip(*logs, strict=True):
        assert alone["validation_accuracy"] == together["validation_accuracy"]
        assert abs(alone["loss"] - together["loss"]) < 1e-5
