"""SAID: against explicit matrices and finite differences, and what always holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from inlay.methods.said import Direction, Intrinsic, transform
from tests.hosts import FAMILIES, batch, checkpointing_on, classifier, logits, shake
from tests.methods import ways
from tests.methods.ways import writer

each_family = pytest.mark.parametrize("family", FAMILIES)


def sylvester(size: int) -> torch.Tensor:
    """The sign of entry (i, j) is the parity of the bits that i and j share."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)], dtype=torch.double)


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 1024])
def test_the_transform_is_the_hadamard_matrix(size: int) -> None:
    x = torch.randn(size, dtype=torch.double)
    torch.testing.assert_close(transform(x), sylvester(size) @ x)
    for rows in {1, size // 2, size} - {0}:
        torch.testing.assert_close(transform(x, rows), (sylvester(size) @ x)[:rows])


def dense(direction: Direction, d: int) -> torch.Tensor:
    """H G Π H B with explicit matrices, (D, d)."""
    size, h = direction.size, sylvester(direction.size)
    signs = torch.zeros(size, dtype=torch.double)
    signs[: direction.short] = direction.signs.double()
    padding = torch.eye(size, dtype=torch.double)[:, : min(d, size)]
    inner = h @ torch.diag(signs) @ padding  # (L, d)
    return (h @ torch.diag(direction.gauss.double()) @ inner[direction.order.long()])[: direction.count]


@pytest.mark.parametrize(("count", "d"), [(64, 10), (100, 7), (33, 20), (16, 16), (5, 12), (1, 3)])
def test_it_equals_an_explicit_matrix(count: int, d: int) -> None:
    direction = Direction("w", count, d, 3, torch.device("cpu"))
    explicit = dense(direction, d)
    z = torch.randn(d)
    torch.testing.assert_close(
        direction.along(z).double(), explicit @ z[: explicit.shape[1]].double(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("count", [64, 256])
def test_its_columns_have_unit_norm(count: int) -> None:
    """Exactly where the tensor's size is a power of two; in the mean elsewhere."""
    direction = Direction("w", count, 20, 0, torch.device("cpu"))
    norms = torch.stack([direction.along(e) for e in torch.eye(20)]).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(20), atol=1e-5, rtol=1e-5)
    other = Direction("w", count * 3 // 4, 20, 0, torch.device("cpu"))
    norms = torch.stack([other.along(e) for e in torch.eye(20)]).norm(dim=1)
    assert abs(norms.square().mean().item() - 1) < 0.2


def test_a_permutation_takes_every_entry_equally_often() -> None:
    direction = Direction("w", 4096, 100, 0, torch.device("cpu"))
    assert direction.short == 128
    assert torch.bincount(direction.order, minlength=128).eq(32).all()


def test_its_gradient_is_that_of_finite_differences() -> None:
    host = classifier().double()
    inlay.add(host, "a", inlay.SAID(d=6, seed=1))
    part = host.inlays["a"].parts["weights"].double()
    part.z.data.copy_(torch.randn(6) * 0.1)
    part.scale.data.copy_(1 + torch.rand(part.scale.shape) * 0.1)
    inlay.train(host, "a")
    host.eval()
    loss = lambda: host(**batch(), labels=torch.tensor([0, 1, 1])).loss
    loss().backward()
    for parameter, entries in ((part.z, range(6)), (part.scale, (0, 5, 20))):
        for at in entries:
            kept = parameter.data[at].item()
            found = []
            for step in (1e-3, -1e-3):
                parameter.data[at] = kept + step
                with torch.no_grad():
                    found.append(loss().item())
            parameter.data[at] = kept
            assert (found[0] - found[1]) / 2e-3 == pytest.approx(parameter.grad[at].item(), rel=2e-3, abs=2e-5)


@each_family
def test_it_moves_every_weight(family: str) -> None:
    """The same as a host whose weights were changed by hand."""
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", inlay.SAID(d=30))
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)  # z is zero
    shake(host, "a", std=0.5)
    acting = logits(host)
    inlay.activate(host, None)
    assert torch.equal(logits(host), bare)
    part: Intrinsic = host.inlays["a"].parts["weights"]
    with torch.no_grad():
        for name, change in part().items():
            host.base_model.get_parameter(name).data.add_(change)
    torch.testing.assert_close(acting, logits(host), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(acting, bare, atol=1e-3)


@each_family
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, inlay.SAID(d=30))
    ways.trains_without_touching_the_host(family, inlay.SAID(d=30))
    ways.trains_without_touching_the_host(family, inlay.SAID(d=30, by_tensor=False))
    ways.saves_and_loads(family, inlay.SAID(d=30, seed=4), tmp_path)
    ways.deepcopy_is_independent(family, inlay.SAID(d=30))
    if family != "mpnet":
        ways.checkpointing_gives_the_same_gradients(family, inlay.SAID(d=30), (False,))


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama"])
def test_tied_weights_move_together_and_texts_agree(family: str) -> None:
    host = writer(family)
    inlay.add(host, "a", inlay.SAID(d=30))
    shake(host, "a", std=0.5)
    inlay.activate(host, "a")
    ids, mask = batch()["input_ids"], batch()["attention_mask"]
    texts = [
        host.generate(input_ids=ids, attention_mask=mask, use_cache=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        for cache in (True, False)
    ]  # fmt: skip
    assert torch.equal(*texts)
    more = {"decoder_input_ids": ids} if family in ("t5", "bart") else {}
    acting = logits(host, {"input_ids": ids, "attention_mask": mask} | more)
    inlay.activate(host, None)
    with torch.no_grad():
        for name, change in host.inlays["a"].parts["weights"]().items():
            host.base_model.get_parameter(name).data.add_(change)
    torch.testing.assert_close(
        acting, logits(host, {"input_ids": ids, "attention_mask": mask} | more), atol=1e-5, rtol=1e-4
    )


def test_setups() -> None:
    host = classifier()
    for seed, name in enumerate("abc"):
        inlay.add(host, name, inlay.SAID(d=30))
        shake(host, name, seed, std=0.5)
    parts = {name: host.inlays[name].parts["weights"] for name in "abc"}
    for name in "abc":
        parts[name].scale.data.fill_(1.0)
    for setup, mixed in (
        (inlay.Stack("a", "b"), parts["a"].z + parts["b"].z),
        (inlay.Average("a", "b", weights=[3, 1]), 0.75 * parts["a"].z + 0.25 * parts["b"].z),
    ):
        inlay.activate(host, setup)
        acting = logits(host)
        parts["c"].z.data.copy_(mixed)
        inlay.activate(host, "c")
        torch.testing.assert_close(acting, logits(host), atol=1e-5, rtol=1e-4)
    with pytest.raises(inlay.SetupError, match="cannot act in Rows"):
        inlay.activate(host, inlay.Rows("a", "b", None))
    assert inlay.active(host) == "c"
    inlay.add(host, "p", inlay.Pfeiffer(size=4))
    shake(host, "p")
    inlay.activate(host, inlay.Stack("a", "p"))
    logits(host)
    with pytest.raises(inlay.SetupError, match="own kind"):
        inlay.activate(host, inlay.Average("a", "p"))


def test_a_failing_forward_gives_the_weights_back() -> None:
    host = classifier()
    before = dict(host.named_parameters())
    inlay.add(host, "a", inlay.SAID(d=30))
    shake(host, "a")
    inlay.activate(host, "a")
    with pytest.raises(IndexError):
        host(input_ids=torch.tensor([[1000]]))
    assert all(host.get_parameter(name) is p for name, p in before.items())
    logits(host)


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_are_replaced_later_stay_and_count(family: str, training: bool) -> None:
    """As `load_state_dict(…, assign=True)` replaces them, whether it acts just then or not."""
    host = classifier(family)
    inlay.add(host, "a", inlay.SAID(d=30))
    shake(host, "a", std=0.5)
    new = classifier(family, seed=7)
    wanted = logits(new)
    inlay.add(new, "a", inlay.SAID(d=30))
    shake(new, "a", std=0.5)
    inlay.activate(new, "a")
    changed = logits(new)
    inlay.activate(host, "a")
    host.inlays["a"].requires_grad_(training)
    host(**batch())
    own = {name: p.detach().clone() for name, p in new.named_parameters() if not name.startswith("inlays.")}
    host.load_state_dict(own, assign=True, strict=False)
    host.tie_weights()
    there = dict(host.named_parameters())
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(host(**batch()).logits.detach(), changed)
    inlay.activate(host, None)
    assert torch.equal(logits(host), wanted)
    assert all(host.get_parameter(name) is p for name, p in there.items())


def test_the_seed_decides_and_nothing_large_is_saved(tmp_path: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        host = classifier()
        inlay.add(host, "a", inlay.SAID(d=30, seed=seed))
        shake(host, "a")
        inlay.activate(host, "a")
        found.append(logits(host))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    assert sorted(host.inlays["a"].tensors()) == ["weights.scale", "weights.z"]


def test_the_published_number() -> None:
    t5 = hf.T5Config(vocab_size=32100, d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    count = inlay.count(t5, inlay.SAID())
    tensors = (
        1 + 12 * 8 + 2 + 12 * 13 + 2
    )  # embeddings; layers, the first one's positions and the last norm of each stack
    assert count.trainable == 20_000 + tensors
    assert f"{count.percent:.3f}" == "0.009"
    assert inlay.count(t5, inlay.SAID(by_tensor=False)).trainable == 20_001


def test_under_compile() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.SAID(d=30))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    quick = torch.compile(host, backend="eager")
    torch.testing.assert_close(logits(quick), wanted, atol=1e-5, rtol=1e-4)


def test_a_resized_vocabulary_is_named() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.SAID(d=5))
    inlay.activate(host, "a")
    host.resize_token_embeddings(host.config.vocab_size + 4, mean_resizing=False)
    with pytest.raises(inlay.SetupError, match=r"word_embeddings.weight is .* and was .*resize_token_embeddings"):
        logits(host)


def test_bad_settings() -> None:
    host = classifier()
    with pytest.raises(inlay.ConfigError, match="the host has only"):
        inlay.add(host, "a", inlay.SAID(d=10**9))
    assert not hasattr(host, "inlays")
    with pytest.raises(inlay.ConfigError, match="d"):
        inlay.SAID(d=0)
    inlay.add(host, "a", inlay.SAID(d=5))
    inlay.train(host, "a")
    for reentrant in ({"use_reentrant": True}, {}):  # torch's own default is reentrant
        checkpointing_on(host, reentrant)
        with pytest.raises(inlay.SetupError, match="not reentrant"):
            host(**batch(), labels=torch.tensor([0, 1, 1]))
