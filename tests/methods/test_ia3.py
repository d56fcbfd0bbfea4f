"""IA3: rescaled keys, values and inner activations, on every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import inlay
from inlay.methods.lora import part_rows
from tests.hosts import FAMILIES, batch, classifier, logits, shake
from tests.methods import ways

each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_a_fresh_one_changes_nothing(family: str) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", inlay.IA3())
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)


def rescaled_by_hand(host: torch.nn.Module, name: str = "a") -> None:
    """The same as changed weights of the host: rows of W_k and W_v, columns of the FFN's W_out."""
    for key, part in host.inlays[name].parts.items():
        place = host.inlays.anatomy.places[key.replace(":", ".")]
        module = host.get_submodule(place.module)
        transposed = not isinstance(module, torch.nn.Linear)
        weight = module.weight.data.T if transposed else module.weight.data  # (D_out, D_in)
        factor = part.scale.weight.data
        if place.acts == "input":
            weight *= factor
        else:
            rows = part_rows(place, weight.shape[0])
            weight[rows] *= factor[:, None]
            if module.bias is not None:
                module.bias.data[rows] *= factor


@each_family
def test_it_is_a_rescaling_of_the_weights(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.IA3())
    shake(host, "a")
    inlay.activate(host, "a")
    acting = logits(host)
    inlay.activate(host, None)
    rescaled_by_hand(host)
    torch.testing.assert_close(acting, logits(host), atol=1e-5, rtol=1e-4)


@each_family
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, inlay.IA3())
    ways.trains_without_touching_the_host(family, inlay.IA3())
    ways.saves_and_loads(family, inlay.IA3(), tmp_path)
    ways.deepcopy_is_independent(family, inlay.IA3())
    ways.rows_are_each_row_alone(family, inlay.IA3(), inlay.IA3(outputs=("v",), inputs=("ffn_out", "o")))
    if family != "mpnet":
        ways.checkpointing_gives_the_same_gradients(family, inlay.IA3())


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_stacks_multiply_and_averages_are_means_of_the_vectors(family: str) -> None:
    host = classifier(family)
    for seed, name in enumerate("abc"):
        inlay.add(host, name, inlay.IA3())
        shake(host, name, seed)
    for x, y, z in zip(*(host.inlays[n].parameters() for n in "abc"), strict=True):
        z.data.copy_(x * y)
    inlay.activate(host, inlay.Stack("a", "b"))
    stacked = logits(host)
    inlay.activate(host, "c")
    torch.testing.assert_close(stacked, logits(host), atol=1e-5, rtol=1e-4)
    for x, y, z in zip(*(host.inlays[n].parameters() for n in "abc"), strict=True):
        z.data.copy_(0.75 * x + 0.25 * y)
    inlay.activate(host, inlay.Average("a", "b", weights=[3, 1]))
    mean = logits(host)
    inlay.activate(host, "c")
    torch.testing.assert_close(mean, logits(host), atol=1e-5, rtol=1e-4)
    inlay.average(host, ["a", "b"], name="soup", weights=[3, 1])
    inlay.activate(host, "soup")
    torch.testing.assert_close(mean, logits(host), atol=1e-5, rtol=1e-4)
    inlay.add(host, "l", inlay.LoRA())
    with pytest.raises(inlay.SetupError, match="its own kind"):
        inlay.activate(host, inlay.Average("a", "l"))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_mixture_merges_to_the_mean(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "m", inlay.Mixture(inlay.IA3(), modules=3, share=None))
    shake(host, "m")
    inlay.train(host, "m")
    inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])}).loss.backward()
    host.eval()
    assert not torch.equal(logits(host), logits(classifier(family)))
    means = {k: torch.stack([m.weight for m in p.scale.maps]).mean(0) for k, p in host.inlays["m"].parts.items()}
    mixed = logits(host)
    inlay.merge(host, "m")
    assert torch.equal(logits(host), mixed)
    assert all(torch.equal(p.scale.weight, means[k]) for k, p in host.inlays["m"].parts.items())


def test_the_published_number() -> None:
    """L (2 D + D_ff) in an encoder, and 2 D more in each layer with cross-attention."""
    import transformers

    count = inlay.count(transformers.BertConfig(), inlay.IA3()).trainable
    assert count == 12 * (2 * 768 + 3072)
    t5 = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    assert inlay.count(t5, inlay.IA3()).trainable == 24 * (2 * 768 + 3072) + 12 * 2 * 768


def test_bad_settings() -> None:
    host = classifier()
    with pytest.raises(inlay.ConfigError, match="no projection 'w'"):
        inlay.add(host, "a", inlay.IA3(outputs=("w",)))
    with pytest.raises(inlay.ConfigError, match="can be rescaled"):
        inlay.IA3(inputs=("q",))
    with pytest.raises(inlay.AnatomyError, match="no such layer"):
        inlay.add(host, "a", inlay.IA3(leave_out=(9,)))
    assert not hasattr(host, "inlays")
