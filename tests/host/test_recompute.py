"""Gradient checkpointing: whatever happens between a pass and its backward, a layer is recomputed as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from torch import Tensor

import inlay
from inlay.host.recompute import Remembering
from tests.hosts import (
    CONFIGS,
    batch,
    checkpointing_off,
    checkpointing_on,
    classifier,
    logits,
    shake,
    shaken,
    snapshot,
    without_dropout,
)

LABELS = torch.tensor([0, 1, 1])
BOTH = pytest.mark.parametrize("reentrant", [False, True])


def host_with(family: str, *methods: inlay.Method) -> hf.PreTrainedModel:
    """A host in training, without dropout, whose inlays a, b, … all learn; a is active."""
    if family == "bert":
        host = classifier()
    else:
        kind = hf.AutoModelForSeq2SeqLM if family in ("t5", "bart") else hf.AutoModelForCausalLM
        host = shaken(kind.from_config(CONFIGS[family]()))
    for seed, (name, method) in enumerate(zip("abcd", methods, strict=False)):
        inlay.add(host, name, method)
        shake(host, name, seed, std=0.2)
    without_dropout(host)
    for module in host.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    inlay.train(host, "a")
    host.inlays.all.requires_grad_(True)
    return host


def loss(host: hf.PreTrainedModel, seed: int = 0) -> Tensor:
    inputs = batch(seed=seed)
    if seed:
        inputs["attention_mask"] = inputs["attention_mask"].flip(0)
    words = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels = LABELS if isinstance(host, hf.BertForSequenceClassification) else words
    return host(**inputs, labels=labels).loss


def gradients(host: hf.PreTrainedModel, run: Callable[[], None], reentrant: bool | None) -> dict[str, Tensor]:
    """Of all inlays, after passes and backwards; None: without checkpointing."""
    if reentrant is None:
        checkpointing_off(host)
    else:
        checkpointing_on(host, {"use_reentrant": reentrant})
    host.zero_grad()
    torch.manual_seed(3)
    run()
    return {name: p.grad.clone() for name, p in host.inlays.named_parameters() if p.grad is not None}


def check(host: hf.PreTrainedModel, run: Callable[[], None], reentrant: bool = False) -> None:
    """The gradients with checkpointing are those without."""
    plain = gradients(host, run, None)
    assert any(gradient.abs().max() > 1e-4 for gradient in plain.values())
    torch.testing.assert_close(gradients(host, run, reentrant), plain, atol=1e-6, rtol=1e-4)


WAYS = {
    "bottleneck": inlay.Pfeiffer(size=4),
    "dropped": inlay.Pfeiffer(size=4, drop_first=2),
    "lora": inlay.LoRA(),
    "ia3": inlay.IA3(),
    "prefix": inlay.Prefix(length=3),
    "prompt": inlay.Prompt(length=3),
    "said": inlay.SAID(d=20),
    "unipelt": inlay.UniPELT(prefix=inlay.Prefix(length=2)),
    "pal": inlay.PAL(heads=2, size=4, dropout=0.0),
    "mixture": inlay.Mixture(inlay.Houlsby(size=4)),
    "prompts": inlay.Mixture(inlay.Prompt(length=3)),
    "routed": inlay.Mixture(inlay.Houlsby(size=4), routing="learned"),
}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "opt"])
@pytest.mark.parametrize("way", WAYS)
def test_backward_in_another_thread(family: str, way: str) -> None:
    """As autograd does on GPUs, where each device has a thread of its own."""
    if way == "unipelt" and family not in ("bert", "t5"):
        pytest.skip("it needs an encoder")
    host = host_with(family, WAYS[way])
    inputs = batch()
    labels = LABELS if family == "bert" else inputs["input_ids"]

    def run() -> None:
        if way in ("mixture", "prompts"):
            found = inlay.mixture_loss(host, inputs | {"labels": labels}).loss
        else:
            found = loss(host) + inlay.penalty(host)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(found.backward).result()

    check(host, run)


SETUPS = {
    "bottlenecks": (inlay.Pfeiffer(size=4), inlay.Houlsby(size=3)),
    "keys": (inlay.Prefix(length=3), inlay.LoRA()),
    "weights": (inlay.SAID(d=20), inlay.SAID(d=10)),
    "tokens": (inlay.Prompt(length=3), inlay.Prompt(length=2)),
    "attention": (inlay.PAL(heads=2, size=4, dropout=0.0), inlay.Parallel(size=4)),
}


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("kind", SETUPS)
@BOTH
def test_two_setups_before_one_backward(family: str, kind: str, reentrant: bool) -> None:
    if reentrant and (kind == "weights" or (kind == "tokens" and family == "gpt2")):
        pytest.skip("refused")
    host = host_with(family, *SETUPS[kind])

    def run() -> None:
        found = []
        for seed, setup in enumerate(("a", "b", inlay.Stack("a", "b"), inlay.Rows("a", "b", None), None)):
            if kind == "weights" and isinstance(setup, inlay.Rows):
                continue  # refused
            inlay.activate(host, setup)
            found.append(loss(host, seed))
        torch.stack(found).sum().backward()

    check(host, run, reentrant)


@pytest.mark.parametrize("way", ["bottleneck", "prefix", "prompt", "said", "pal"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_backward_after_the_block_that_activated(family: str, way: str) -> None:
    host = host_with(family, WAYS[way])
    inlay.activate(host, None)
    names = [module.config._attn_implementation for module in host.modules() if hasattr(module, "config")]

    def run() -> None:
        with inlay.activated(host, "a"):
            found = loss(host) + inlay.penalty(host)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(found.backward).result()
        assert inlay.active(host) is None

    check(host, run)
    assert [m.config._attn_implementation for m in host.modules() if hasattr(m, "config")] == names


@pytest.mark.parametrize("way", ["unipelt", "pal", "routed"])
@pytest.mark.parametrize("family", ["bert", "t5"])
@BOTH
def test_two_batches_before_one_backward(family: str, way: str, reentrant: bool) -> None:
    """Each has a mask of its own."""
    host = host_with(family, WAYS[way])

    def run() -> None:
        first = host(**batch(), **({} if family == "bert" else {"labels": batch()["input_ids"]})).logits.square().sum()
        (first + loss(host, seed=5)).backward()

    check(host, run, reentrant)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@BOTH
def test_each_pass_keeps_what_it_drew(family: str, reentrant: bool) -> None:
    """AdapterDrop's depth, a fusion's subset, and whether the batch of a mixture was doubled."""
    methods = (
        inlay.Houlsby(size=4, drop_first=2), inlay.Houlsby(size=4), inlay.Houlsby(size=3),
        inlay.Mixture(inlay.Houlsby(size=4)),
    )  # fmt: skip
    host = host_with(family, *methods)
    inlay.add_fusion(host, "f", ["b", "c"], subset=1)
    host.inlays.all.requires_grad_(True)
    inputs = batch() | {"labels": LABELS if family == "bert" else batch()["input_ids"]}

    def run() -> None:
        found = []
        for setup in ("a", "f"):
            inlay.activate(host, setup)
            found += [loss(host, seed) for seed in range(6)]
        inlay.activate(host, "d")
        found += [inlay.mixture_loss(host, inputs).loss, loss(host)]
        torch.stack(found).sum().backward()

    check(host, run, reentrant)


def test_one_tensor_given_to_two_passes() -> None:
    """The first layer of Llama is given the embeddings as they are."""
    host = host_with("llama", inlay.Pfeiffer(size=4), inlay.Pfeiffer(size=4))
    embedded = host.get_input_embeddings()(batch()["input_ids"]).detach()

    def run() -> None:
        given = embedded.clone().requires_grad_(True)
        inlay.activate(host, "a")
        first = host(inputs_embeds=given).logits.square().mean()
        inlay.activate(host, "b")
        (first + host(inputs_embeds=given).logits.square().mean()).backward()

    check(host, run)


def test_several_backwards_of_one_pass_and_a_pass_in_between() -> None:
    host = host_with("bert", inlay.UniPELT(), inlay.Pfeiffer(size=4))

    def run() -> None:
        inlay.activate(host, "a")
        found = loss(host)
        found.backward(retain_graph=True)
        inlay.activate(host, "b")
        with torch.no_grad():
            loss(host, seed=4)
        found.backward()
        loss(host, seed=2).backward()
        assert inlay.active(host) == "b"

    check(host, run)


def test_checkpointing_of_some_layers_only() -> None:
    host = host_with("bert", inlay.Pfeiffer(size=4), inlay.Pfeiffer(size=4))

    def run() -> None:
        if any(layer.gradient_checkpointing for layer in host.bert.encoder.layer):
            checkpointing_on(host, every_n_layers=2)
        inlay.activate(host, "a")
        first = loss(host)
        inlay.activate(host, "b")
        (first + loss(host, seed=1)).backward()

    check(host, run)


def test_strip_leaves_the_layers_as_they_were() -> None:
    host = classifier()
    checkpointing_on(host)
    layer = host.bert.encoder.layer[0]
    before, function = snapshot(host), layer._gradient_checkpointing_func
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.train(host, "a")
    host(**batch()).logits.sum().backward()
    assert isinstance(layer._gradient_checkpointing_func, Remembering)
    inlay.strip(host)
    assert layer._gradient_checkpointing_func is function
    assert snapshot(host) == before


def test_what_is_not_checkpointed_is_left_alone() -> None:
    host = host_with("bert", inlay.Pfeiffer(size=4))
    loss(host).backward()
    assert not hasattr(host.bert.encoder.layer[0], "_gradient_checkpointing_func")
    checkpointing_on(host)
    logits(host)
    assert not isinstance(host.bert.encoder.layer[0]._gradient_checkpointing_func, Remembering)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda host: pickle.loads(pickle.dumps(host))], ids=["copy", "pickle"])
def test_a_copy_remembers_its_own_passes(make: Callable[[hf.PreTrainedModel], hf.PreTrainedModel]) -> None:
    host = host_with("bert", inlay.UniPELT(), inlay.Pfeiffer(size=4))
    checkpointing_on(host)
    host.disable_input_require_grads()  # transformers' own hook for it cannot be pickled
    loss(host).backward()  # its layers remember
    twin = make(host)
    assert twin.bert.encoder.layer[0]._gradient_checkpointing_func.active is twin.inlays.acting

    def run() -> None:
        inlay.activate(twin, "a")
        found = loss(twin)
        inlay.activate(twin, "b")
        found.backward()

    check(twin, run)
