"""Bottlenecks of several inlays in one product give what each gives alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import pytest
import torch

import inlay
from inlay.host.joined import Joiner
from inlay.host.plan import Plan
from inlay.host.steps import leaves
from inlay.host.verbs import inlays_of
from inlay.methods.together import Together
from tests.hosts import classifier, shake

ROWS = {"equal": "aabbcc", "unequal": "aaabccdd", "others among them": "aaLLbb"}


@pytest.mark.parametrize("method", [inlay.Pfeiffer, inlay.Houlsby, inlay.Parallel])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_it_is_what_each_would_have_given(rows, method):
    host = classifier().eval()
    for seed, name in enumerate("abcd"):
        inlay.add(host, name, method(size=4, activation="gelu", scale=0.5 * (seed + 1)))
        shake(host, name, seed)
    inlay.add(host, "L", inlay.LoRA(rank=2))
    shake(host, "L", 9)
    inlays = inlays_of(host)
    plans = {name: inlays.resolve(host, name) for name in set(rows)}
    joiner = Joiner(inlays.anatomy)
    alike = {id(plan): joiner.likeness(plan) for plan in plans.values()}
    ordered = sorted(rows, key=lambda name: (alike[id(plans[name])], name))
    joined = joiner.joined([plans[name] for name in ordered], likeness=alike)
    met = [step for step in joined.steps.values() if any(isinstance(part, Together) for part in step.steps)]
    assert met, "something acts together"
    ids = torch.randint(5, host.config.vocab_size, (len(rows), 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        inlays.switch(host, joined)
        found = host(ids).logits
        for row, name in enumerate(ordered):
            inlays.switch(host, plans[name])
            torch.testing.assert_close(found[row], host(ids[row : row + 1]).logits[0], atol=1e-5, rtol=1e-5)


METHODS = {
    "a": inlay.Houlsby(size=4), "b": inlay.LoRA(rank=2, targets=("q", "ffn_out")), "c": inlay.IA3(),
    "d": inlay.Prefix(length=3), "e": inlay.Prompt(length=2), "f": inlay.PAL(size=8, heads=2), "g": inlay.BitFit(),
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_joined_plans_are_the_plan_of_rows(family):
    """In every field, so that a new one cannot be forgotten: of the steps the modules at which something acts."""
    host = classifier(family).eval()
    for name, method in METHODS.items():
        inlay.add(host, name, method, head=inlay.Head(labels=2, pooling="mean") if name in "ab" else None)
    inlays = inlays_of(host)
    plans = {name: inlays.resolve(host, name) for name in METHODS}

    def outline(name, plan):
        value = getattr(plan, name)
        return set(value) if isinstance(value, Mapping) or name == "draws" else value

    for rows in ("aab", "bcd", "efg", "gfa", "dbe"):
        joined = Joiner(inlays.anatomy).joined([plans[name] for name in rows])
        whole = inlays.resolve(host, inlay.Rows(*rows))
        for field in fields(Plan):
            assert outline(field.name, joined) == outline(field.name, whole), (rows, field.name)


def test_what_is_not_alike_stays_apart():
    host = classifier().eval()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.add(host, "b", inlay.Pfeiffer(size=3))
    inlay.add(host, "c", inlay.Pfeiffer(size=4, activation="gelu"))
    inlay.add(host, "d", inlay.Bapna(size=4))
    inlay.add(host, "e", inlay.Compacter(reduction=2, n=2))
    inlays = inlays_of(host)
    joiner = Joiner(inlays.anatomy)
    plans = [inlays.resolve(host, name) for name in "abcde"]
    assert len({joiner.likeness(plan) for plan in plans}) == 5
    joined = joiner.joined(plans, likeness={id(plan): joiner.likeness(plan) for plan in plans})
    assert not [leaf for step in joined.steps.values() for leaf in leaves(step) if isinstance(leaf, Together)]
