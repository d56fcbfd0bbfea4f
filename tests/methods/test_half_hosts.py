"""Training on hosts in half precision: what trains is float32, the host and what comes out of it stay as they were."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import inlay
from tests.hosts import batch, classifier, logits, shake

WAYS = {
    "houlsby": (inlay.Houlsby(size=4), {}),
    "pfeiffer": (inlay.Pfeiffer(size=4), {"norms": True}),
    "parallel": (inlay.Parallel(size=4, scale="learned"), {"head": inlay.Head(labels=3)}),
    "bapna": (inlay.Bapna(size=4), {"head": inlay.Head(labels=3, pooling="mean", layers=2)}),
    "phm": (inlay.PHM(size=4), {}),
    "phm-fixed": (inlay.PHM(size=4, share_rule=True, learn_rule=False, rule_std=0.2), {}),
    "compacter": (inlay.Compacter(size=4), {"head": inlay.Head(labels=3, pooling="first")}),
    "lowrank": (inlay.LowRank(size=4), {}),
    "bitfit": (inlay.BitFit(), {}),
    "bitfit-head": (inlay.BitFit(head=True), {}),
    "lora": (inlay.LoRA(rank=2, bias="all"), {"norms": True}),
    "ia3": (inlay.IA3(), {"head": inlay.Head(labels=3, pooling="tokens")}),
    "prefix": (inlay.Prefix(length=2), {}),
    "prefix-made": (inlay.Prefix(length=2, reparametrised=True, hidden=8), {}),
    "prompt": (inlay.Prompt(length=2), {"norms": True}),
    "said": (inlay.SAID(d=20), {"head": inlay.Head(labels=3)}),
    "pal": (inlay.PAL(size=4, heads=2), {"norms": True}),
    "unipelt": (inlay.UniPELT(bottleneck=inlay.Pfeiffer(size=4)), {}),
    "unipelt-paper": (inlay.UniPELT(variant="paper", gates="two", prefix=inlay.Prefix(length=2, reparametrised=True)), {}),
    "adamix": (inlay.Mixture(inlay.Houlsby(size=4)), {}),
    "routed": (inlay.Mixture(inlay.LoRA(rank=2), routing="learned"), {}),
    "routed-texts": (inlay.Mixture(inlay.Prefix(length=2, at=("encoder",)), routing="learned", by="text"), {}),
    "head": (inlay.methods.HeadOnly(), {"head": inlay.Head(labels=3), "norms": True}),
    "fusion": (None, {"norms": True}),
}  # fmt: skip
ENCODERS_ONLY = ("unipelt", "unipelt-paper", "routed-texts")
LABELS = torch.tensor([0, 1, 1])
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def placed(family: str, way: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    host = classifier(family).to(dtype)
    method, settings = WAYS[way]
    if method is not None:
        inlay.add(host, "a", method, **settings)
    else:
        for seed, member in enumerate([inlay.Pfeiffer(size=4), inlay.Houlsby(size=3), inlay.Bapna(size=4)]):
            inlay.add(host, f"m{seed}", member)
            shake(host, f"m{seed}", seed)
        inlay.add_fusion(host, "a", ["m0", "m1", "m2"], **settings)
    shake(host, "a", std=0.2)
    return host


def loss_of(host: nn.Module) -> torch.Tensor:
    out = host(**batch()).logits
    assert out.dtype == host.dtype
    out = out.float().flatten(1, -2).mean(1) if out.dim() == 3 else out.float()
    return nn.functional.cross_entropy(out, LABELS) + inlay.penalty(host)


def one_step(host: nn.Module, rate: float) -> tuple[int, int]:
    """How many tensors that have a gradient moved, and how many have one."""
    learning = [p for p in host.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0)
    before = [p.detach().clone() for p in learning]
    loss_of(host).backward()
    optimizer.step()
    pairs = [(p, old) for p, old in zip(learning, before, strict=True) if p.grad is not None and p.grad.any()]
    return sum(not torch.equal(p, old) for p, old in pairs), len(pairs)


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_on_a_bf16_host(family: str, way: str, tmp_path: Path) -> None:
    if way in ENCODERS_ONLY and family in ("llama", "gpt2"):
        pytest.skip("needs an encoder")
    if way == "bitfit-head" and family in ("llama", "gpt2"):
        pytest.skip("their heads have no bias")
    host = placed(family, way)
    kept = {k: v.clone() for k, v in host.state_dict().items() if not k.startswith("inlays.all.a.")}
    there = list(host.inlays["a"].parameters())
    inlay.train(host, "a")
    assert all(a is b for a, b in zip(host.inlays["a"].parameters(), there, strict=True))
    assert {p.dtype for p in there} == {torch.float32}
    moved, learning = one_step(host, rate=1e-5)
    assert moved == learning > 0
    after = host.state_dict()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in kept.items())
    host.eval()
    wanted = logits(host)
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(logits(host), wanted)
    names = [row.name for row in inlay.summary(host).rows]
    for name in names:
        inlay.save(host, name, tmp_path / name)
    exact, served = classifier(family), classifier(family).bfloat16()
    for other in (exact, served):
        for name in names:
            inlay.load(other, tmp_path / name, **({"any_members": True} if name == "a" and way == "fusion" else {}))
    mine, theirs, rounded = (h.inlays["a"].tensors() for h in (host, exact, served))
    assert all(torch.equal(theirs[k], v.float()) for k, v in mine.items())
    assert all(torch.equal(rounded[k], v.bfloat16()) for k, v in mine.items())
    inlay.activate(served, "a")
    torch.testing.assert_close(logits(served), wanted, atol=0.3, rtol=0.1)


def test_steps_too_small_for_the_hosts_dtype_are_lost_where_it_is_kept() -> None:
    for keep in (False, True):
        host = classifier().bfloat16()
        inlay.add(host, "a", inlay.IA3())
        inlay.train(host, "a", keep_dtype=keep)
        assert {p.dtype for p in host.inlays["a"].parameters()} == {torch.bfloat16 if keep else torch.float32}
        moved, learning = one_step(host, rate=1e-4)
        assert moved == (0 if keep else learning)


@pytest.mark.parametrize("name", HALVES)
def test_only_what_trains_changes_its_dtype(name: str) -> None:
    host = classifier().to(HALVES[name])
    for each in "ab":
        inlay.add(host, each, inlay.Pfeiffer(size=4))
    inlay.train(host, inlay.Stack("a", "b"), only=["b"])
    assert {p.dtype for p in host.inlays["a"].parameters()} == {HALVES[name]}
    assert {p.dtype for p in host.inlays["b"].parameters()} == {torch.float32}
    assert logits(host).dtype == HALVES[name]


def test_double_precision_stays() -> None:
    host = classifier().double()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.train(host, "a")
    assert {p.dtype for p in host.parameters()} == {torch.float64}


def test_a_host_that_trains_too_is_float32_as_a_whole() -> None:
    host = classifier().bfloat16()
    for name, labels in (("a", 2), ("b", 3), ("c", 2)):
        inlay.add(host, name, inlay.Pfeiffer(size=4), head=inlay.Head(labels=labels))
    inlay.train(host, inlay.Rows("a", "b", "a"), host_too=True)
    moved, learning = one_step(host, rate=1e-5)
    assert moved == learning > 0
    assert {p.dtype for p in host.inlays["c"].parameters()} == {torch.bfloat16}
    inlay.activate(host, inlay.Rows("a", "c", None))
    assert logits(host).dtype == torch.float32


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "gpt2"])
def test_setups_of_inlays_in_several_dtypes(family: str) -> None:
    host = classifier(family).bfloat16()
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2), norms=True)
    inlay.add(host, "b", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2, pooling="mean"), norms=True)
    inlay.add(host, "c", inlay.Prefix(length=2))
    inlay.add_fusion(host, "f", ["a", "b"], norms=True)
    for seed, name in enumerate("abcf"):
        shake(host, name, seed, std=0.2)
    setups = ["f", inlay.Fuse("f", off=["a"]), inlay.Stack("c", "a"), inlay.Rows("a", "b", None),
              inlay.Average("a", "b"), inlay.Rows(inlay.Stack("c", "b"), "a", "f")]  # fmt: skip
    before = []
    for setup in setups:
        inlay.activate(host, setup)
        before.append(logits(host))
    for name in ("a", "c", "f"):
        inlay.train(host, name)
    host.eval()
    for setup, old in zip(setups, before, strict=True):
        inlay.activate(host, setup)
        assert logits(host).dtype == torch.bfloat16
        torch.testing.assert_close(logits(host), old, atol=0.1, rtol=0.1)
    inlay.average(host, ["a", "a"], name="mean")
    inlay.collapse(host, "f", [batch()], name="one")
    for name in ("mean", "one"):
        inlay.activate(host, name)
        assert logits(host).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_a_lora_that_was_trained_folds_into_a_bf16_host(family: str) -> None:
    host = classifier(family).bfloat16()
    inlay.add(host, "a", inlay.LoRA(rank=2))
    shake(host, "a", std=0.2)
    inlay.train(host, "a")
    host.eval()
    wanted, kept = logits(host), copy.deepcopy(host.state_dict())
    change = host.inlays["a"].parts["encoder:0:q" if family == "bert" else "decoder:0:q"].weight().detach()
    place = next(p for p in host.inlays.anatomy.of_kind("q"))
    module = host.get_submodule(place.module)
    inlay.fold(host, "a")
    if family != "gpt2":  # whose q is a part of a transposed weight
        exact = kept[f"{place.module}.weight"].float() + change
        assert torch.equal(module.weight, exact.bfloat16())  # rounded once
    assert module.weight.dtype == torch.bfloat16
    torch.testing.assert_close(logits(host), wanted, atol=0.1, rtol=0.05)
    inlay.unfold(host)
    assert all(torch.equal(v, kept[k]) for k, v in host.state_dict().items())


def test_a_gradient_of_another_dtype_is_let_go() -> None:
    host = classifier().bfloat16()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.train(host, "a", keep_dtype=True)
    loss_of(host).backward()
    inlay.train(host, "a")
    moved, learning = one_step(host, rate=1e-5)
    assert moved == learning > 0
