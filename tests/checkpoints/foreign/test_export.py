"""What is exported reads back bit for bit, and the peer library loads it whole and gives the same logits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest
import safetensors.torch
import torch
from torch import nn

import inlay
from tests.checkpoints.foreign.exports import ALL, CASES, export_all, host_and_inputs, prepare, set_in
from tests.hosts import classifier, shake

TOOL = Path(__file__).parents[3] / "tools" / "check_export.py"


def same_tensors(name: str, family: str) -> bool:
    """In peft the parts of a fused module become one LoRA of it, and a bias is a value and not a difference."""
    fused = family in ("gpt2", "gpt_neox", "modernbert") and name.startswith("peft") and name != "peft_qkv"
    return "bias" not in name and not fused


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


def test_a_merged_mixture_needs_no_patterns(tmp_path: Path) -> None:
    """On GPT-2 q and v become one LoRA of twice the rank; servers that know one rank and one alpha can serve it."""
    host, _ = host_and_inputs("gpt2")
    exported, _ = set_in(host, CASES["peft_adamix"])
    folder = inlay.export(host, exported, tmp_path / "x", "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 64, ["c_attn"])
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "modernbert"])
def test_a_fused_module_and_a_part_of_it_become_one_lora(family: str, tmp_path: Path) -> None:
    """Both at once: the module's LoRA has the rank of both, so that it is another than the one of the same place."""
    host, inputs = host_and_inputs(family)
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("qkv", "q")))
    shake(host, "a")
    inlay.export(host, "a", tmp_path / "a", "peft")
    inlay.load(host, tmp_path / "a", name="b")
    found = []
    for name in ("a", "b"):
        inlay.activate(host, name)
        with torch.no_grad():
            found.append(host(**inputs).logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_what_does_not_read_back_the_same_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the parts of a fused module become one LoRA, whose tensors have other names than theirs."""
    host, _ = host_and_inputs("gpt2")
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q", "v")))
    shake(host, "a")
    save_file = safetensors.torch.save_file
    louder = lambda tensors, *rest, **more: save_file({key: 2 * t for key, t in tensors.items()}, *rest, **more)
    monkeypatch.setattr(safetensors.torch, "save_file", louder)
    with pytest.raises(inlay.ConfigError, match="does not read back the same"):
        inlay.export(host, "a", tmp_path / "a", "peft")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("format", "method"), [("peft", inlay.LoRA(rank=2)), ("adapterhub", inlay.Pfeiffer(size=2))])
def test_what_was_trained_in_single_precision_on_a_half_host(
    format: Literal["peft", "adapterhub"], method: inlay.Method, tmp_path: Path
) -> None:
    host = classifier().to(torch.bfloat16)
    inlay.add(host, "a", method)
    inlay.train(host, "a")
    shake(host, "a")
    inlay.export(host, "a", tmp_path / "a", format)
    inlay.load(host, tmp_path / "a", name="again")
    mine, theirs = host.inlays["a"].tensors(), host.inlays["again"].tensors()
    assert {tensor.dtype for tensor in mine.values()} == {torch.float32}
    assert all(torch.equal(mine[key].bfloat16(), theirs[key]) for key in mine)


def test_a_bias_beside_a_half_hosts_keeps_the_digits_of_its_change(tmp_path: Path) -> None:
    host = classifier()
    for name, parameter in host.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    host.to(torch.bfloat16)
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="all"))
    inlay.train(host, "a")
    shake(host, "a")
    inlay.export(host, "a", tmp_path / "a", "peft")
    inlay.load(host, tmp_path / "a", name="again")
    mine, theirs = host.inlays["a"].tensors(), host.inlays["again"].tensors()
    for key, change in mine.items():
        torch.testing.assert_close(theirs[key].float(), change, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("library", ["adapters", "peft"])
@pytest.mark.long
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
