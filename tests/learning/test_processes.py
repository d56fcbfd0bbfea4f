"""Two processes train to the same result as one with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from inlay.learning import Settings, train
train(Settings(**json.loads(sys.argv[1])))
"""


def test_two_processes_are_one(small, tmp_path):
    from inlay.learning import Settings, train
    from tests.learning.small import save_bert

    host = save_bert(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    fields = {
        "host": str(host), "train": str(small / "train.jsonl"), "validation": str(small / "validation.jsonl"), "threads": 1, "lr": 1e-2,
        "batch_size": 15, "epochs": 2, "options": {"reduction": 2}, "head_dropout": 0.0,
    }  # fmt: skip
    one = train(Settings(**fields, out=tmp_path / "one"))
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", str(script), json.dumps(fields | {"out": str(tmp_path / "two")}),
    ]  # fmt: skip
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
