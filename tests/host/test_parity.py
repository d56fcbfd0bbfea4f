"""The configs of `adapters` 1.3.0 are these methods; that they give the same logits is tests/interop/test_golden.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

import inlay
from tests.checkpoints.foreign.golden import FAMILIES, GOLDEN, host_of, logits_of

METHODS: dict[str, Callable[[], inlay.Method]] = {
    "seq_bn": lambda: inlay.Pfeiffer(reduction=3),
    "seq_bn_factor_map": lambda: inlay.Pfeiffer(reduction={1: 2, "default": 3}),
    "seq_bn_leave_out": lambda: inlay.Pfeiffer(reduction=3, leave_out=(0,)),
    "double_seq_bn": lambda: inlay.Houlsby(reduction=3),
    "par_bn": lambda: inlay.Parallel(),
    "scaled_par_bn": lambda: inlay.Parallel(scale="learned"),
    "compacter": lambda: inlay.Compacter(activation="gelu", before_dropout=False, reduction=3),
    "compacter++": lambda: inlay.CompacterPlusPlus(
        activation="gelu", reads="normed", before_dropout=False, reduction=3
    ),
    "lora": lambda: inlay.LoRA(rank=4, alpha=16),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_host_is_the_same(family: str) -> None:
    bare = load_file(GOLDEN / family / "inputs.safetensors")["bare"]
    torch.testing.assert_close(logits_of(host_of(family), family), bare, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
@pytest.mark.parametrize("case", METHODS)
def test_their_configs_are_these_methods(family: str, case: str) -> None:
    host = host_of(family)
    assert host_method(host, inlay.load(host, GOLDEN / family / case)) == METHODS[case]()


def test_their_lora_on_t5_is_in_cross_attention_too() -> None:
    host = host_of("t5")
    name = inlay.load(host, GOLDEN / "t5" / "lora")
    assert host_method(host, name) == inlay.LoRA(rank=4, alpha=16, targets=("q", "v", "cross_q", "cross_v"))


def host_method(host: torch.nn.Module, name: str) -> inlay.Method:
    return host.inlays[name].method
