"""What every way to adapt has to hold, as functions over a host and a method."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers as hf

import inlay
from tests.hosts import (
    CONFIGS,
    ENCODER_DECODER,
    FAMILIES,
    batch,
    checkpointing_on,
    classifier,
    logits,
    row,
    shake,
    shaken,
    snapshot,
)

REFUSED = ("mpnet", "deberta-v2")
ABLE = [family for family in FAMILIES if family not in REFUSED]
CAUSAL = [f for f in ABLE if f.startswith(("gpt", "opt", "llama", "mistral", "qwen", "gemma", "phi"))]


def acts_and_comes_off(family: str, method: inlay.Method, **config: object) -> None:
    """It acts, twice alike, on inputs that stay as they are; `strip` leaves nothing of it."""
    host = classifier(family, **config)
    before, bare = snapshot(host), logits(host)
    implementations = {id(m): m.config._attn_implementation for m in host.modules() if hasattr(m, "config")}
    inlay.add(host, "a", method)
    assert torch.equal(logits(host), bare)  # not active yet
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    kept = {k: v.clone() for k, v in inputs.items()}
    changed = logits(host, inputs)
    assert changed.shape == bare.shape
    assert not torch.allclose(changed, bare, atol=1e-3)
    assert torch.equal(logits(host, inputs), changed)
    assert all(torch.equal(inputs[k], v) for k, v in kept.items())
    inlay.activate(host, None)
    assert torch.equal(logits(host), bare)
    inlay.activate(host, "a")
    inlay.strip(host)
    assert snapshot(host) == before
    assert torch.equal(logits(host), bare)
    assert {id(m): m.config._attn_implementation for m in host.modules() if hasattr(m, "config")} == implementations


def trains_without_touching_the_host(family: str, method: inlay.Method) -> None:
    host = classifier(family)
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.add(host, "a", method)
    inlay.train(host, "a")
    start = {k: v.clone() for k, v in host.state_dict().items() if k.startswith("inlays.")}
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        host(**batch(seed=step), labels=torch.tensor([0, 1, 1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = host.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    learnt = [k for k, v in start.items() if not torch.equal(after[k], v)]
    assert len(learnt) > len(start) / 2, set(start) - set(learnt)


def saves_and_loads(family: str, method: inlay.Method, folder: Path) -> None:
    host = classifier(family)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.save(host, "a", folder / "a")
    other = classifier(family)
    inlay.load(other, folder / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), wanted)


def padded_row_is_the_row_alone(family: str, method: inlay.Method) -> None:
    host = classifier(family)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    together = logits(host, inputs)
    for at in range(3):
        real = int(inputs["attention_mask"][at].sum())
        alone = {k: v[:, :real] for k, v in row(inputs, at).items()}
        torch.testing.assert_close(logits(host, alone), together[at : at + 1], atol=1e-5, rtol=1e-4)


def rows_are_each_row_alone(family: str, method: inlay.Method, other: inlay.Method) -> None:
    """Rows with this way, with another size of it, with an adapter, with both, and without anything."""
    host = classifier(family)
    inlay.add(host, "a", method)
    inlay.add(host, "b", other)
    inlay.add(host, "c", inlay.Houlsby(size=4))
    for seed, name in enumerate("abc"):
        shake(host, name, seed)
    order = ["a", None, "b", "c", inlay.Stack("a", "c"), inlay.Stack("b", "a")]
    inputs = batch(rows=len(order))
    inlay.activate(host, inlay.Rows(*order))
    mixed = logits(host, inputs)
    for at, part in enumerate(order):
        inlay.activate(host, part)
        torch.testing.assert_close(logits(host, row(inputs, at)), mixed[at : at + 1], atol=1e-5, rtol=1e-4)


def checkpointing_gives_the_same_gradients(
    family: str, method: inlay.Method, kinds: tuple[bool, ...] = (False, True)
) -> None:
    host = classifier(family)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.train(host, "a")
    for module in host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    found = []
    for kind in (None, *kinds):
        if kind is not None:
            checkpointing_on(host, {"use_reentrant": kind})
        host.zero_grad()
        host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
        found.append([p.grad.clone() for p in host.inlays["a"].parameters()])
    plain, *recomputed = found
    assert any(g.abs().max() > 1e-4 for g in plain)
    for again in recomputed:
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-4)


def deepcopy_is_independent(family: str, method: inlay.Method) -> None:
    host = classifier(family)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.activate(host, "a")
    twin = copy.deepcopy(host)
    wanted = logits(host)
    assert torch.equal(logits(twin), wanted)
    shake(twin, "a", seed=7)
    assert torch.equal(logits(host), wanted)
    inlay.strip(twin)
    assert torch.equal(logits(host), wanted)


def writer(family: str, **config: object) -> hf.PreTrainedModel:
    """A tiny host that writes text."""
    made = CONFIGS[family]()
    for name, value in config.items():
        setattr(made, name, value)
    kind = hf.AutoModelForSeq2SeqLM if family in ENCODER_DECODER else hf.AutoModelForCausalLM
    return shaken(kind.from_config(made))
