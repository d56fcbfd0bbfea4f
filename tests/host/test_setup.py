from __future__ import annotations

import pytest
import torch

import inlay
from tests.hosts import batch, classifier, logits, row, shake, step_at


@pytest.fixture
def host() -> torch.nn.Module:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.add(host, "b", inlay.Houlsby(size=4), norms=True)
    inlay.add(host, "c", inlay.Parallel(size=4))
    inlay.add(host, "d", inlay.Pfeiffer(size=2), norms=True, head=inlay.Head(labels=2))
    for seed, name in enumerate("abcd"):
        shake(host, name, seed)
    return host


def with_setup(host: torch.nn.Module, setup: inlay.Setup, inputs: dict | None = None) -> torch.Tensor:
    with inlay.activated(host, setup):
        return logits(host, inputs)


def test_average_weights_sum_to_one(host) -> None:
    assert inlay.Average("a", "b", weights=[3, 1]).weights == (0.75, 0.25)
    torch.testing.assert_close(with_setup(host, inlay.Average("a", "a", "a")), with_setup(host, "a"))
    torch.testing.assert_close(with_setup(host, inlay.Average("a", "c", weights=[0, 1])), with_setup(host, "c"))


def test_average_with_own_norms_in_one_part_only(host) -> None:
    torch.testing.assert_close(with_setup(host, inlay.Average("a", "b", weights=[0, 2])), with_setup(host, "b"))
    torch.testing.assert_close(with_setup(host, inlay.Average("a", "b", weights=[1, 0])), with_setup(host, "a"))


def test_norms_around_a_branch_reach_into_it(host) -> None:
    """ "b" owns norms, "a" reads them: alone, in an Average of itself, and in Rows of itself."""
    wanted = with_setup(host, inlay.Stack("b", "a"))
    for inner in (inlay.Average("a", "a"), inlay.Rows("a", "a", "a")):
        torch.testing.assert_close(with_setup(host, inlay.Stack("b", inner)), wanted, atol=1e-5, rtol=1e-4)


def test_stack_of_one_and_order(host) -> None:
    assert torch.equal(with_setup(host, inlay.Stack("a")), with_setup(host, "a"))
    assert not torch.allclose(
        with_setup(host, inlay.Stack("a", "b")), with_setup(host, inlay.Stack("b", "a")), atol=1e-4
    )


@pytest.mark.parametrize("nested", [
    inlay.Stack("a", inlay.Rows("b", "c", None)),
    inlay.Average("a", inlay.Rows("b", "c", "b")),
    inlay.Rows(inlay.Average("a", "b"), inlay.Stack("b", "c"), None),
    inlay.Stack(inlay.Average("a", inlay.Stack("b", "c")), "c"),
    inlay.Stack("b", inlay.Rows("a", None, "c")),
    inlay.Stack("b", inlay.Rows("d", None, "a")),
    inlay.Stack(inlay.Rows("a", "d", "c"), "b"),
    inlay.Stack("b", inlay.Average("a", "c"), inlay.Rows("d", "a", None)),
])  # fmt: skip
def test_nesting_equals_each_row_alone(host, nested) -> None:
    def at(setup, i):
        """The setup that row i sees."""
        if isinstance(setup, inlay.Rows):
            return setup.parts[i]
        if isinstance(setup, inlay.Stack):
            return inlay.Stack(*(p for part in setup.parts if (p := at(part, i)) is not None))
        if isinstance(setup, inlay.Average):
            return inlay.Average(*(at(part, i) for part in setup.parts), weights=setup.weights)
        return setup

    mixed = with_setup(host, nested, batch())
    for i in range(3):
        torch.testing.assert_close(
            with_setup(host, at(nested, i), row(batch(), i)), mixed[i : i + 1], atol=1e-5, rtol=1e-4
        )


def test_rows_group_their_inlays(host) -> None:
    """Six rows of two inlays are two calls of each module, not six."""
    calls = []
    host.inlays["a"].parts["encoder:0:ffn"].register_forward_hook(lambda m, args, out: calls.append(args[0].shape[0]))
    with_setup(host, inlay.Rows("a", "c", "a", "a", "c", "a"), batch(6))
    assert calls == [4]


def test_rows_with_heads_of_different_width() -> None:
    host = classifier()
    inlay.add(host, "two", inlay.Pfeiffer(size=2), head=inlay.Head(labels=2))
    inlay.add(host, "five", inlay.Pfeiffer(size=2), head=inlay.Head(labels=5, pooling="mean"))
    mixed = with_setup(host, inlay.Rows("two", "five", "two"))
    assert mixed.shape == (3, 5)
    for i, (name, width) in enumerate([("two", 2), ("five", 5), ("two", 2)]):
        torch.testing.assert_close(with_setup(host, name, row(batch(), i))[0], mixed[i, :width], atol=1e-5, rtol=1e-4)
    assert mixed.softmax(-1)[0, 2:].sum() == 0


def test_rows_beside_the_hosts_own_head() -> None:
    """The logits are as wide as the widest head, the host's own included; so are the labels that it shows."""
    host = classifier("bert", num_labels=4)
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=("no", "yes")))
    inlay.add(host, "copy", inlay.Pfeiffer(size=2), head=inlay.Head())
    for beside in (None, "copy"):
        inlay.activate(host, inlay.Rows("a", beside, "a"))
        labels = torch.tensor([0, 3, 1])
        assert host.config.num_labels == 4
        expected = torch.nn.functional.cross_entropy(logits(host), labels)
        torch.testing.assert_close(host(**batch(), labels=labels).loss, expected)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_rows_above_a_head_that_acts_where_they_have_none(family: str, pooling: str) -> None:
    host = classifier(family)
    inlay.add(host, "below", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3, pooling=pooling))
    inlay.add(host, "own", inlay.Pfeiffer(size=2), head=inlay.Head(labels=2))
    inlay.add(host, "none", inlay.Pfeiffer(size=2))
    for name in ("below", "own", "none"):
        shake(host, name)
    inlay.activate(host, inlay.Stack("below", inlay.Rows("own", "none", None)))
    together = logits(host)
    assert host.config.num_labels == 3
    for number, setup in enumerate((inlay.Stack("below", "own"), inlay.Stack("below", "none"), "below")):
        inlay.activate(host, setup)
        alone = logits(host, row(batch(), number))[0]
        theirs = together[number, ..., : alone.shape[-1]]
        torch.testing.assert_close(theirs, alone.expand_as(theirs), atol=1e-5, rtol=0)


def test_rows_for_beams() -> None:
    """The rows of one part stand next to each other."""
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    shake(host, "a")
    doubled = {k: v.repeat_interleave(2, 0) for k, v in batch().items()}
    torch.testing.assert_close(
        with_setup(host, inlay.Rows("a", None, "a", each=2), doubled),
        with_setup(host, inlay.Rows("a", None, "a")).repeat_interleave(2, 0),
    )


def test_a_batch_of_another_size_is_refused(host) -> None:
    inlay.activate(host, inlay.Rows("a", "b", "c"))
    for rows in (2, 6):
        with pytest.raises(inlay.SetupError, match=f"batch of 3 rows, but this batch has {rows}"):
            logits(host, batch(rows))
    logits(host, batch(3))


def test_rows_keep_their_index(host) -> None:
    inlay.train(host, inlay.Rows("a", "b", "a"))
    kept = step_at(host, "encoder.0.ffn").kept
    with torch.inference_mode():
        host(**batch())
    first = dict(kept)
    host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()  # what inference made is good for training too
    assert len(kept) == 1
    assert all(kept[device] is index for device, index in first.items())


def test_rows_cannot_differ_in_what_they_share() -> None:
    host = classifier("deberta-v2")
    inlay.add(host, "biases", inlay.BitFit())
    inlay.add(host, "lora", inlay.LoRA(rank=2, targets=("linear",)))
    with pytest.raises(inlay.SetupError, match=r"bias\.encoder\.LayerNorm acts on what all rows share"):
        inlay.activate(host, inlay.Rows("biases", None, "biases"))
    assert inlay.active(host) is None
    inlay.activate(host, inlay.Rows("lora", None, "lora"))
    with pytest.raises(inlay.SetupError, match=r"Rows has 3 parts, but .* gave out \(1, 16, 16\)"):
        logits(host)


def classifier_with_a() -> torch.nn.Module:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    return host


def test_parts_may_come_as_one_list() -> None:
    assert inlay.Stack(["a", "b"]) == inlay.Stack("a", "b")
    assert inlay.Average(["a", "b"]) == inlay.Average("a", "b")
    assert inlay.Rows(["a", "b"]) == inlay.Rows("a", "b")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: inlay.Stack(), "empty"),
    (lambda: inlay.Average(), "empty"),
    (lambda: inlay.Rows(), "empty"),
    (lambda: inlay.Stack("a", None), "None inside Stack has no meaning"),
    (lambda: inlay.Average("a", "b", weights=[1]), "2 parts but 1 weights"),
    (lambda: inlay.Average("a", "b", weights=[0, 0]), "do not all vanish"),
    (lambda: inlay.Average("a", "b", weights=[1, -1]), "at least 0"),
    (lambda: inlay.Average("a", "b", weights=[1, float("nan")]), "at least 0"),
    (lambda: inlay.Rows("a", inlay.Stack("a", inlay.Rows("b"))), "Rows inside Rows has no meaning"),
    (lambda: inlay.Stack("a", 3), "takes names"),
    (lambda: inlay.activate(classifier_with_a(), 3), "takes names"),
    (lambda: inlay.activate(classifier_with_a(), inlay.Stack(inlay.Rows("a", "a"), inlay.Rows("a"))), "1 and 2 rows"),
    (lambda: inlay.Rows("a", each=0), "at least one row"),
])  # fmt: skip
def test_setups_without_meaning(make, message: str) -> None:
    with pytest.raises(inlay.SetupError, match=message):
        make()


def test_average_of_heads() -> None:
    host = classifier()
    inlay.add(host, "x", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3))
    inlay.add(host, "y", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3))
    inlay.add(host, "z", inlay.Pfeiffer(size=2), head=inlay.Head(labels=4))
    inlay.add(host, "plain", inlay.Pfeiffer(size=2))
    assert with_setup(host, inlay.Average("x", "y")).shape == (3, 3)
    torch.testing.assert_close(with_setup(host, inlay.Average("plain", "x", weights=[0, 1])), with_setup(host, "x"))
    with pytest.raises(inlay.SetupError, match="different labels"):
        inlay.activate(host, inlay.Average("x", "z"))
    with pytest.raises(inlay.SetupError, match="some have not"):
        inlay.activate(host, inlay.Average("x", "y", "plain"))
    assert inlay.active(host) is None


def test_activated_restores_after_an_exception(host) -> None:
    inlay.activate(host, "a")
    with pytest.raises(RuntimeError, match="boom"), inlay.activated(host, inlay.Stack("b", "c")):
        assert inlay.active(host) == inlay.Stack("b", "c")
        raise RuntimeError("boom")
    assert inlay.active(host) == "a"
    before = with_setup(host, "a")
    with pytest.raises(inlay.NamingError), inlay.activated(host, "nobody"):
        pass
    assert inlay.active(host) == "a"
    assert torch.equal(logits(host), before)
