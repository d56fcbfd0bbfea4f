"""What a setup means does not depend on the order in which inlays came in, and is the branch's formula."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import inlay
from tests.host.slow import slowly
from tests.hosts import FAMILIES, classifier, logits, shake, spy_on

METHODS = {
    "pfeiffer": inlay.Pfeiffer(size=3),
    "houlsby": inlay.Houlsby(size=3),
    "parallel": inlay.Parallel(size=3),
    "bapna": inlay.Bapna(size=3),
    "compacter": inlay.Compacter(size=4),
    "raw": inlay.Pfeiffer(size=2, before_dropout=True),
    "lora": inlay.LoRA(rank=2, targets=("q", "v")),
    "lora-out": inlay.LoRA(rank=2, targets=("o", "ffn_out")),
    "bitfit": inlay.BitFit(),
}
NORMED = ("gemma2", "gemma3")
"""Hosts that norm a branch's output: what acts before that norm cannot come after what acts behind it."""


def host_with(family: str, names: list[str], seed: int = 0) -> torch.nn.Module:
    """A host with these inlays, added in this order; each has the same weights whenever it comes."""
    host = classifier(family).double()
    for name in names:
        inlay.add(host, name, METHODS[name], norms=False)
        shake(host, name, list(METHODS).index(name), std=0.15)
    return host


def random_setup(names: list[str], chance: random.Random, depth: int = 2) -> inlay.Setup:
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(names)
    parts = [random_setup(names, chance, depth - 1) for _ in range(chance.randint(2, 3))]
    if chance.random() < 0.5:
        return inlay.Stack(*parts)
    return inlay.Average(*parts, weights=[chance.randint(1, 4) for _ in parts])


def met(host: torch.nn.Module, setup: inlay.Setup, family: str) -> bool:
    """Whether a setup acts, and then as its formula says; it may be refused only where the host norms a branch."""
    try:
        inlay.activate(host, setup)
    except inlay.SetupError:
        if family not in NORMED:
            raise
        return False
    fast = logits(host)
    if family not in NORMED:
        with slowly(host, setup):
            torch.testing.assert_close(fast, logits(host), atol=1e-9, rtol=1e-7, msg=lambda m: f"{family} {setup}\n{m}")
    return True


SOME = ("bert", "t5", "bart", "gpt2", "llama", "gemma2")
"""One family of each kind, for what takes seconds; `make test-long` has all."""


@pytest.mark.parametrize(
    "family", [*SOME, *(pytest.param(f, marks=pytest.mark.long) for f in FAMILIES if f not in SOME)]
)
def test_every_pair_of_methods_acts_in_the_setups_order(family: str) -> None:
    names = list(METHODS)
    host = host_with(family, names)
    for a, b in itertools.permutations(names, 2):
        met(host, inlay.Stack(a, b), family)
    for a, b in itertools.combinations(names, 2):
        met(host, inlay.Average(a, b, weights=[3, 1]), family)


@pytest.mark.parametrize("family", ["bert", "distilbert", "t5", "bart", "gpt2", "llama", "opt", "gemma2", "gpt_neox"])
def test_the_order_of_adding_and_loading_does_not_matter(family: str, tmp_path: Path) -> None:
    chance = random.Random(family)
    first = host_with(family, list(METHODS))
    for name in METHODS:
        inlay.save(first, name, tmp_path / name)
    for _ in range(4):
        order = chance.sample(list(METHODS), len(METHODS))
        other, loaded = host_with(family, order), classifier(family).double()
        for name in chance.sample(order, len(order)):
            inlay.load(loaded, tmp_path / name)
        for _ in range(6):
            setup = random_setup(order, chance)
            if not met(first, setup, family):
                continue
            inlay.activate(first, setup)
            wanted = logits(first)
            for host in (other, loaded):
                inlay.activate(host, setup)
                assert torch.equal(logits(host), wanted), setup


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "opt"])
def test_rows_act_as_if_alone_whatever_they_stack(family: str) -> None:
    names = list(METHODS)
    host, chance = host_with(family, names), random.Random(family)
    from tests.hosts import batch, row

    for _ in range(4):
        parts = [random_setup(names, chance) for _ in range(3)]
        inlay.activate(host, inlay.Rows(*parts))
        mixed = logits(host)
        for at, part in enumerate(parts):
            inlay.activate(host, part)
            torch.testing.assert_close(logits(host, row(batch(), at)), mixed[at : at + 1], atol=1e-9, rtol=1e-7)


def test_a_merged_lora_and_then_a_pfeiffer() -> None:
    """The host with the LoRA's change in its own weights, and a Pfeiffer on it, whichever came first."""
    for order in (["lora-out", "pfeiffer"], ["pfeiffer", "lora-out"]):
        host = host_with("llama", order)
        inlay.activate(host, inlay.Stack("lora-out", "pfeiffer"))
        stacked = logits(host)
        inlay.activate(host, "lora-out")
        with torch.no_grad():
            for place in host.inlays.anatomy.of_kind("o", "ffn_out"):
                host.get_submodule(place.module).weight += host.inlays["lora-out"].part(place).weight()
        inlay.activate(host, "pfeiffer")
        torch.testing.assert_close(logits(host), stacked, atol=1e-9, rtol=1e-7)


def test_a_biased_norm_is_the_norm_that_pfeiffer_reads() -> None:
    host = host_with("bert", ["pfeiffer", "bitfit"])
    inlay.activate(host, inlay.Stack("bitfit", "pfeiffer"))
    stacked = logits(host)
    with torch.no_grad():
        for place in host.inlays.anatomy.of_kind("bias"):
            host.get_submodule(place.module).bias += host.inlays["bitfit"].part(place).bias
    inlay.activate(host, "pfeiffer")
    torch.testing.assert_close(logits(host), stacked, atol=1e-9, rtol=1e-7)


def test_what_cannot_come_later_is_refused() -> None:
    host = host_with("gemma2", ["pfeiffer", "lora-out"])
    before = logits(host)
    with pytest.raises(inlay.SetupError, match="'lora-out' acts at decoder.0.ffn_out, before"):
        inlay.activate(host, inlay.Stack("pfeiffer", "lora-out"))
    assert torch.equal(logits(host), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_norms_are_the_hosts_with_other_weights(family: str) -> None:
    host, other = classifier(family), classifier(family)
    inlay.add(host, "a", inlay.Pfeiffer(size=3, init="identity"), norms=True)
    for place in host.inlays.anatomy.of_kind("norm"):
        own = host.inlays["a"].part(place)
        for parameter in own.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        other.get_submodule(place.module).load_state_dict(own.state_dict())
    inlay.activate(host, "a")
    torch.testing.assert_close(logits(host), logits(other), atol=1e-5, rtol=1e-4)


def in_rows(*whole: torch.Tensor) -> torch.Tensor:
    """Row i of the i-th."""
    return torch.stack([each[row] for row, each in enumerate(whole)])


@pytest.mark.parametrize(("setup", "wanted"), [
    (inlay.Stack("a", "b"), lambda one: one("a", "b")),
    (inlay.Stack("b", "c"), lambda one: one("b", "c")),
    (inlay.Average("a", "b", weights=[3, 1]), lambda one: 0.75 * one("a") + 0.25 * one("b")),
    (inlay.Rows("a", "b", "c"), lambda one: in_rows(one("a"), one("b"), one("c"))),
    (inlay.Rows(inlay.Average("a", "c"), "b", "a"), lambda one: in_rows((one("a") + one("c")) / 2, one("b"), one("a"))),
    (inlay.Stack("c", inlay.Rows("a", "c", None)), lambda one: in_rows(one("c", "a"), one("c", "c"), one("c"))),
])  # fmt: skip
@pytest.mark.parametrize("family", NORMED)
def test_own_norms_at_a_branchs_end(family: str, setup: inlay.Setup, wanted: Callable[..., torch.Tensor]) -> None:
    """A norm that ends a branch, and what acts on its output: by hand, from the same input."""
    host = classifier(family).double()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q",)), norms=True)  # the first there is a norm alone
    inlay.add(host, "b", inlay.Houlsby(size=3), norms=True)
    inlay.add(host, "c", inlay.Houlsby(size=3))
    for seed, name in enumerate("abc"):
        shake(host, name, seed, std=0.2)
    place = host.inlays.anatomy.places["decoder.1.ffn"]
    norm = next(p for p in host.inlays.anatomy.of_kind("norm") if p.module == place.module)
    inlay.activate(host, setup)
    caught = spy_on(host, place.id)
    logits(host)

    def one(*names: str) -> torch.Tensor:
        h = caught["h"]
        for name in names:  # the uppermost norm
            own = host.inlays[name].part(norm)
            h = h if own is None else own(caught["seen"].args[0])
        for name in names:  # then what changes its output
            change = host.inlays[name].part(place)
            h = h if change is None else h + change(h)
        return h

    torch.testing.assert_close(caught["out"], wanted(one))


@pytest.mark.parametrize("family", ["gemma2", "llama", "t5", "bart", "opt"])
@pytest.mark.parametrize("first", [inlay.BitFit(), inlay.LoRA(rank=2, targets=("ffn_out",))], ids=["bitfit", "lora"])
def test_a_site_is_the_same_whoever_came_first(family: str, first: inlay.Method) -> None:
    """A norm or a bias has no layer in its name, but its site is the end of one: a PAL reads the layer there."""
    found = []
    for methods in ([inlay.PAL(size=4, heads=2)], [first, inlay.PAL(size=4, heads=2)]):
        host = classifier(family)
        for method in methods:
            inlay.add(host, method.kind, method, norms=method is first)
            shake(host, method.kind, 1, std=0.2)
        inlay.activate(host, "pal")
        found.append(logits(host))
    assert torch.equal(*found)
