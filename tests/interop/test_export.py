"""What is exported reads back bit for bit, and the peer library loads it whole and gives the same logits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import inlay
from tests.interop.exports import ALL, CASES, export_all, host_and_inputs, prepare, set_in

TOOL = Path(__file__).parents[2] / "tools" / "check_export.py"


def same_tensors(name: str, family: str) -> bool:
    """In peft the parts of GPT-2's fused module become one LoRA of it, and a bias is a value and not a difference."""
    return "bias" not in name and not (family == "gpt2" and name.startswith("peft") and name != "peft_qkv")


@pytest.mark.parametrize(("name", "family"), ALL)
def test_round_trip(name: str, family: str, tmp_path: Path) -> None:
    case = CASES[name]
    host, inputs = host_and_inputs(family)
    exported, members = set_in(host, case)
    checkpoints = export_all(host, exported, members, case, tmp_path)
    inlay.activate(host, exported)
    other, _ = host_and_inputs(family)
    for checkpoint in checkpoints:
        inlay.load(other, tmp_path / checkpoint, name=checkpoint)
    inlay.activate(other, exported)
    with torch.no_grad():
        mine, theirs = host(**inputs).logits, other(**inputs).logits
    if not same_tensors(name, family):
        torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=0)
        return
    assert torch.equal(theirs, mine)
    for checkpoint in checkpoints:
        before, after = host.inlays[checkpoint].tensors(), other.inlays[checkpoint].tensors()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("library", ["adapters", "peft"])
def test_the_peer_loads_it(library: str, tmp_path: Path) -> None:
    python = os.environ.get(f"INLAY_{library.upper()}_PYTHON")
    if not python:
        pytest.skip(f"INLAY_{library.upper()}_PYTHON does not name an interpreter that has {library}")
    for name, family in ALL:
        if CASES[name].format == {"adapters": "adapterhub"}.get(library, library):
            prepare(name, family, tmp_path)
    done = subprocess.run([python, str(TOOL), str(tmp_path)], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
