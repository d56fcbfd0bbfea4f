"""What always holds, on every family."""

from __future__ import annotations

import copy

import pytest
import torch

import inlay
from tests.hosts import FAMILIES, batch, checkpointing_on, classifier, logits, row, shake, snapshot, without_gradient

METHODS = [inlay.Houlsby, inlay.Pfeiffer, inlay.Parallel, inlay.Bapna]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.kind)


@each_family
@each_method
def test_fresh_identity_inlay_leaves_logits_bit_equal(family: str, method: type) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", method(init="identity", size=4))
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)


@each_family
@each_method
def test_an_inlay_acts_in_every_layer_it_has(family: str, method: type) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", method(size=4))
    inlay.activate(host, "a")
    shake(host, "a")
    whole = logits(host)
    assert not torch.allclose(whole, bare, atol=1e-3)
    for part in host.inlays["a"].parts.values():  # without any one of its modules the result is another
        kept = copy.deepcopy(part.state_dict())
        part.up.weight.data.zero_()
        part.up.bias.data.zero_()
        assert not torch.allclose(logits(host), whole, atol=1e-5)
        part.load_state_dict(kept)
    assert torch.equal(logits(host), whole)


@each_family
def test_strip_restores_everything(family: str) -> None:
    host = classifier(family)
    host.get_input_embeddings().requires_grad_(False)
    before, bare = snapshot(host), logits(host)
    inlay.add(host, "a", inlay.Houlsby(size=4), head=inlay.Head(labels=5), norms=True)
    inlay.add(host, "b", inlay.Parallel(size=4), head=inlay.Head(labels=1, pooling="mean"))
    inlay.train(host, "a")
    inlay.strip(host)
    host.eval()
    assert snapshot(host) == before
    assert torch.equal(logits(host), bare)


@each_family
@pytest.mark.parametrize("method", [inlay.Houlsby(size=4), inlay.Pfeiffer(size=4), inlay.LoRA(rank=2), inlay.BitFit()],
                         ids=lambda m: m.kind)  # fmt: skip
def test_every_parameter_beside_own_norms_learns(family: str, method: inlay.Method) -> None:
    """Also where a branch ends in a norm, whether or not the method acts there too."""
    host = classifier(family)
    inlay.add(host, "a", method, norms=True)
    shake(host, "a", std=0.2)
    inlay.train(host, "a")
    loss = host(**batch(), labels=torch.tensor([0, 1, 1])).loss
    assert without_gradient(host, loss) == []


@each_family
def test_training_leaves_every_host_tensor_bit_equal(family: str) -> None:
    host = classifier(family)
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.add(host, "a", inlay.Houlsby(size=4), head=inlay.Head(labels=3), norms=True)
    inlay.train(host, "a")
    own = {name for name, p in host.named_parameters() if p.requires_grad}
    assert own
    assert all(name.startswith("inlays.all.a.") for name in own)
    start = {k: v.clone() for k, v in host.state_dict().items() if k.startswith("inlays.")}
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        host(**batch(seed=step), labels=torch.tensor([0, 1, 2])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = host.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    still = {k for k, v in start.items() if torch.equal(after[k], v)}
    # what does not reach the logits cannot learn: norms of unused paths, and BERT's second pooling
    assert len(still) < len(start) / 4, still


@each_family
def test_evaluating_twice_is_bit_equal_and_leaves_inputs_alone(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    kept = {k: v.clone() for k, v in inputs.items()}
    assert torch.equal(logits(host, inputs), logits(host, inputs))
    assert all(torch.equal(inputs[k], v) for k, v in kept.items())


@each_family
def test_deepcopy_is_independent(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Pfeiffer(size=4), norms=True)
    inlay.activate(host, "a")
    shake(host, "a")
    twin = copy.deepcopy(host)
    wanted = logits(host)
    assert torch.equal(logits(twin), wanted)
    shake(twin, "a", seed=7)
    assert torch.equal(logits(host), wanted)
    assert not torch.allclose(logits(twin), wanted, atol=1e-3)
    inlay.strip(twin)
    assert torch.equal(logits(host), wanted)


@each_family
def test_rows_equal_each_row_alone(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Houlsby(size=4), norms=True)
    inlay.add(host, "b", inlay.Parallel(size=4))
    inlay.add(host, "c", inlay.Pfeiffer(size=2), head=inlay.Head(labels=2))
    for seed, name in enumerate("abc"):
        shake(host, name, seed)
    inputs = batch(rows=6)
    order = ["b", "a", None, "c", "a", inlay.Stack("a", "b")]
    inlay.activate(host, inlay.Rows(*order))
    mixed = logits(host, inputs)
    for at, part in enumerate(order):
        inlay.activate(host, part)
        # the fill of rows with fewer labels is not compared: every head here has two
        torch.testing.assert_close(logits(host, row(inputs, at)), mixed[at : at + 1], atol=1e-5, rtol=1e-4)


@each_family
def test_average_and_stack_by_hand(family: str) -> None:
    host = classifier(family)
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.Houlsby(size=4, sites=("ffn",), leave_out=(0,)))
        shake(host, name, seed)
    adapters = {n: next(iter(host.inlays[n].parts.values())) for n in "ab"}
    place = next(p for p in host.inlays.anatomy.of_kind("ffn") if p.layer == 1)
    seen: list[torch.Tensor] = []
    host.get_submodule(place.module).register_forward_hook(lambda m, a, out: seen.append(out))
    for setup in (None, inlay.Average("a", "b", weights=[3, 1]), inlay.Stack("a", "b")):
        inlay.activate(host, setup)
        logits(host)
    h, mean, stacked = (seen[i * (len(seen) // 3)] for i in range(3))
    with torch.no_grad():
        torch.testing.assert_close(mean, h + 0.75 * adapters["a"](h) + 0.25 * adapters["b"](h))
        inner = h + adapters["a"](h)
        torch.testing.assert_close(stacked, inner + adapters["b"](inner))


@each_family
def test_bfloat16(family: str) -> None:
    host = classifier(family).to(torch.bfloat16)
    inlay.add(host, "a", inlay.Pfeiffer(size=4), norms=True, head=inlay.Head(labels=3))
    shake(host, "a", std=0.05)
    inlay.activate(host, "a")
    assert {p.dtype for p in host.inlays.parameters()} == {torch.bfloat16}
    low = logits(host).float()
    host.float()
    torch.testing.assert_close(low, logits(host), atol=0.15, rtol=0.1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mpnet"])  # transformers has none for it
def test_gradient_checkpointing_gives_the_same_gradients(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Parallel(size=4, sites=("attention", "ffn")))
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()  # no dropout, so that both passes are the same
    found = []
    for kind in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if kind is not None:
            checkpointing_on(host, kind)
            host.train()
            for module in host.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
                    if isinstance(getattr(module, name, None), float):
                        setattr(module, name, 0.0)
        host.zero_grad()
        host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
        found.append([p.grad.clone() for p in host.inlays["a"].parameters()])
    plain, *recomputed = found
    for other in recomputed:
        torch.testing.assert_close(other, plain, atol=1e-6, rtol=1e-4)
