"""The same weights give the same logits as `adapters` 1.3.0. Golden files: tools/make_golden.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import inlay

GOLDEN = Path(__file__).parent / "golden"
HOSTS = ("bert", "roberta", "t5", "gpt2")
METHODS = {
    "seq_bn": lambda: inlay.Pfeiffer(reduction=3),
    "double_seq_bn": lambda: inlay.Houlsby(reduction=3),
    "par_bn": lambda: inlay.Parallel(),
    "scaled_par_bn": lambda: inlay.Parallel(scale="learned"),
}


def golden_host(family: str) -> hf.PreTrainedModel:
    kind = hf.AutoModelForSeq2SeqLM if family == "t5" else hf.AutoModelForSequenceClassification
    return kind.from_pretrained(GOLDEN / family / "host").eval()


def golden_inputs(family: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / family / "inputs.safetensors")


def golden_logits(host: hf.PreTrainedModel, family: str) -> torch.Tensor:
    inputs = {k: v for k, v in golden_inputs(family).items() if k != "bare"}
    with torch.no_grad():
        return host(**inputs).logits


def pour(host: hf.PreTrainedModel, name: str, folder: Path) -> None:
    """Copy a peer's tensors into an inlay of the same form; every tensor of both has to be used."""
    ours, used = host.inlays[name].tensors(), set()
    for key, tensor in load_file(folder / "adapter.safetensors").items():
        found = re.search(r"(?:(encoder|decoder)\.)?(?:layer|block|h)\.(\d+)\.", key)
        stack = found[1] or "decoder"
        site = "attention" if re.search(r"attention\.output|block\.\d+\.layer\.0\.|attention_adapters", key) else "ffn"
        part = re.sub(r".*\.adapters\.\w+\.", "", key).replace("adapter_down.0", "down").replace("adapter_up", "up")
        wanted = f"{stack}.{found[2]}.{site}.{part.replace('scaling', 'scale')}"
        ours[wanted].copy_(tensor.reshape(ours[wanted].shape))
        used.add(wanted)
    assert used == set(ours)


@pytest.mark.parametrize("family", HOSTS)
def test_the_bare_host_is_the_same(family: str) -> None:
    torch.testing.assert_close(
        golden_logits(golden_host(family), family), golden_inputs(family)["bare"], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("case", METHODS)
def test_one_adapter(family: str, case: str) -> None:
    host = golden_host(family)
    inlay.add(host, "a", METHODS[case]())
    with torch.no_grad():
        pour(host, "a", GOLDEN / family / case)
    inlay.activate(host, "a")
    expected = load_file(GOLDEN / family / case / "expected.safetensors")["logits"]
    torch.testing.assert_close(golden_logits(host, family), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize(("case", "method"), [("stack", inlay.Pfeiffer), ("stack_double", inlay.Houlsby)])
def test_stack(family: str, case: str, method: type) -> None:
    host = golden_host(family)
    for name in ("first", "second"):
        inlay.add(host, name, method(reduction=3))
        with torch.no_grad():
            pour(host, name, GOLDEN / family / case / name)
    inlay.activate(host, inlay.Stack("first", "second"))
    expected = load_file(GOLDEN / family / case / "expected.safetensors")["logits"]
    torch.testing.assert_close(golden_logits(host, family), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("case", "method"), [
    ("seq_bn_factor_map", lambda: inlay.Pfeiffer(reduction={1: 2, "default": 3})),
    ("seq_bn_leave_out", lambda: inlay.Pfeiffer(reduction=3, leave_out=(0,))),
])  # fmt: skip
def test_per_layer(case: str, method) -> None:
    host = golden_host("bert")
    inlay.add(host, "a", method())
    with torch.no_grad():
        pour(host, "a", GOLDEN / "bert" / case)
    inlay.activate(host, "a")
    expected = load_file(GOLDEN / "bert" / case / "expected.safetensors")["logits"]
    torch.testing.assert_close(golden_logits(host, "bert"), expected, atol=1e-5, rtol=0)
