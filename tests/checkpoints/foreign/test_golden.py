"""Every checkpoint that the peer libraries wrote is read by `inlay.load` and gives their logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import inlay
from tests.checkpoints.foreign.golden import GOLDEN, cases, expected, host_of, logits_of, named
from tests.hosts import fused_steps

SINGLE = cases(without=("fusion", "stack", "setup"))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", SINGLE, ids=named)
def test_one_adapter(case: Path) -> None:
    host = host_of(case.parent.name)
    bare = logits_of(host, case.parent.name)
    name = inlay.load(host, case, pickled=case.name == "seq_bn_bin")
    assert torch.equal(logits_of(host, case.parent.name), bare), "loading activates nothing"
    inlay.activate(host, name)
    close(logits_of(host, case.parent.name), expected(case)["logits"])
    inlay.strip(host)
    assert torch.equal(logits_of(host, case.parent.name), bare)


@pytest.mark.parametrize("case", [c for c in cases() if c.name.startswith("stack")], ids=named)
def test_stack(case: Path) -> None:
    host = host_of(case.parent.name)
    inlay.activate(host, inlay.Stack(*(inlay.load(host, case / name) for name in ("first", "second"))))
    close(logits_of(host, case.parent.name), expected(case)["logits"])


@pytest.mark.parametrize("case", [c for c in cases() if c.name.startswith("fusion")], ids=named)
def test_fusion_with_its_attention(case: Path) -> None:
    family = case.parent.name
    host = host_of(family)
    members = [inlay.load(host, folder) for folder in sorted(case.glob("m*"))]
    name = inlay.load(host, case / "fusion")
    assert name == ".".join(members)
    inlay.activate(host, name)
    steps = fused_steps(host)
    for step in steps.values():
        step.record = []
    wanted = expected(case)
    close(logits_of(host, family), wanted["logits"])
    depth = host.inlays.anatomy.depth
    numbers = [f"{stack}.{i}.ffn" for stack, layers in depth.items() for i in range(layers)]
    seen = {f"attention.{numbers.index(place)}.output_adapter": step.record[-1] for place, step in steps.items()}
    assert seen.keys() == wanted.keys() - {"logits"}
    for key, attention in seen.items():
        close(attention, wanted[key])


def test_whole_setup() -> None:
    host = host_of("bert")
    bare = logits_of(host, "bert")
    setup = inlay.load(host, GOLDEN / "bert" / "setup")
    assert setup == inlay.Stack("first", "m0.m1")
    assert host.inlays.names() == ["first", "m0", "m1", "m0.m1"]
    assert torch.equal(logits_of(host, "bert"), bare), "loading activates nothing"
    inlay.activate(host, setup)
    close(logits_of(host, "bert"), expected(GOLDEN / "bert" / "setup")["logits"])
