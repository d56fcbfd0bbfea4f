"""Prefixes: against transformers' own attention, by hand, and what always holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from inlay.host.keys import OURS
from tests.hosts import ENCODER_DECODER, batch, classifier, logits, row, shake
from tests.methods import ways
from tests.methods.ways import ABLE, CAUSAL, REFUSED, writer

each_family = pytest.mark.parametrize("family", ABLE)


@each_family
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, inlay.Prefix(length=3))
    ways.trains_without_touching_the_host(family, inlay.Prefix(length=3))
    ways.trains_without_touching_the_host(family, inlay.Prefix(length=3, reparametrised=True, hidden=5))
    ways.saves_and_loads(family, inlay.Prefix(length=3, reparametrised=True, hidden=5), tmp_path)
    ways.deepcopy_is_independent(family, inlay.Prefix(length=3))
    ways.padded_row_is_the_row_alone(family, inlay.Prefix(length=3))
    ways.checkpointing_gives_the_same_gradients(family, inlay.Prefix(length=3))


@each_family
def test_rows_with_and_without(family: str) -> None:
    ways.rows_are_each_row_alone(family, inlay.Prefix(length=3), inlay.Prefix(length=5, reparametrised=True, hidden=4))


@each_family
def test_ways_to_attend_agree(family: str) -> None:
    found = []
    for way in ("sdpa", "eager"):
        if family == "gemma2" and way == "sdpa":
            continue  # transformers' own sdpa has no soft cap
        host = classifier(family)
        host.set_attn_implementation(way)
        inlay.add(host, "a", inlay.Prefix(length=3))
        inlay.add(host, "b", inlay.Prefix(length=1))
        shake(host, "a")
        shake(host, "b", 2)
        inlay.activate(host, inlay.Rows("a", None, inlay.Stack("b", "a")))
        found.append(logits(host))
        inlay.activate(host, "a")
        found.append(logits(host))
        found.append(logits(host, {"input_ids": batch()["input_ids"]}))
    for one, other in zip(found, found[3:], strict=False):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_decoders_prefix_is_a_cache_that_was_there_before(family: str) -> None:
    """transformers' own attention, with the prefix as what its cache holds already."""
    host = writer(family)
    inlay.add(host, "a", inlay.Prefix(length=4))
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    ours = logits(host, inputs)
    inlay.activate(host, None)
    config = host.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache = hf.DynamicCache()
    for layer, part in enumerate(host.inlays["a"].parts.values()):
        keys, values = part(torch.zeros(3, 1)).chunk(2, -1)
        split = lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2)
        cache.update(split(keys), split(values), layer)
    mask = torch.cat([torch.ones(3, 4, dtype=torch.long), inputs["attention_mask"]], 1)
    positions = torch.arange(7)[None].expand(3, -1)
    if family.startswith("opt"):
        positions = inputs["attention_mask"].cumsum(1) * inputs["attention_mask"] - 1
    with torch.no_grad():
        theirs = host(inputs["input_ids"], attention_mask=mask, past_key_values=cache, position_ids=positions).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=1e-4)


BY_HAND = {
    "bert": ("encoder.1.{}", "self_attention", 1 / math.sqrt(8)),
    "distilbert": ("encoder.1.{}", "self_attention", 1 / math.sqrt(8)),
    "bart": ("encoder.0.{}", "self_attention", 1 / math.sqrt(8)),
    "bart-cross": ("decoder.1.cross_{}", "cross_attention", 1 / math.sqrt(8)),
    "t5-cross": ("decoder.1.cross_{}", "cross_attention", 1.0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_the_formula_by_hand(case: str) -> None:
    name, kind, scale = BY_HAND[case]
    host = classifier(case.removesuffix("-cross"))
    inlay.add(host, "a", inlay.Prefix(length=4))
    shake(host, "a")
    inlay.activate(host, "a")
    places, caught = host.inlays.anatomy.places, {}
    for role in "qkv":
        host.get_submodule(places[name.format(role)].module).register_forward_hook(
            lambda m, a, out, role=role: caught.update({role: out})
        )
    host.get_submodule(places[name.format("o")].module).register_forward_pre_hook(lambda m, a: caught.update(o=a[0]))
    inputs = batch()
    logits(host, inputs)
    part = host.inlays["a"].part(places[f"{name.split('{')[0].removesuffix('cross_')}{kind}"])
    with torch.no_grad():
        keys, values = part(torch.zeros(3, 1)).chunk(2, -1)
    split = lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2)
    q, k, v = split(caught["q"]), split(torch.cat([keys, caught["k"]], 1)), split(torch.cat([values, caught["v"]], 1))
    seen = torch.cat([torch.ones(3, 4), inputs["attention_mask"]], 1).bool()[:, None, None]
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(caught["o"].view_as(context), context, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODER_DECODER])
def test_generation_with_and_without_a_cache(family: str) -> None:
    host = writer(family)
    inlay.add(host, "a", inlay.Prefix(length=3))
    inlay.add(host, "b", inlay.Prefix(length=2))
    shake(host, "a")
    shake(host, "b", 2)
    ids, mask = batch()["input_ids"], batch()["attention_mask"]
    if family not in ENCODER_DECODER:  # decoders are filled up on the left
        ids, mask = ids.flip(1), mask.flip(1)
    for setup in ("a", inlay.Rows("a", None, inlay.Stack("b", "a"))):
        inlay.activate(host, setup)
        texts = [
            host.generate(input_ids=ids, attention_mask=mask, use_cache=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False)
            for cache in (True, False)
        ]  # fmt: skip
        assert torch.equal(*texts)
        beams = [None, inlay.Rows("a", None, inlay.Stack("b", "a"), each=2)][setup != "a"]
        if beams is not None:
            inlay.activate(host, beams)
            found = [
                host.generate(input_ids=ids, attention_mask=mask, use_cache=cache, max_new_tokens=4, num_beams=2, do_sample=False)
                for cache in (True, False)
            ]  # fmt: skip
            assert torch.equal(*found)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.long
def test_under_compile(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Prefix(length=3))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    quick = torch.compile(host, backend="eager")
    torch.testing.assert_close(logits(quick), wanted, atol=1e-5, rtol=1e-4)
    inlay.activate(host, None)
    bare = logits(host)
    torch.testing.assert_close(logits(quick), bare, atol=1e-5, rtol=1e-4)


def test_merge_makes_a_reparametrised_one_flat(tmp_path: Path) -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.Prefix(length=3, reparametrised=True, hidden=5))
    shake(host, "a")
    inlay.activate(host, "a")
    whole = logits(host)
    inlay.merge(host, "a")
    assert torch.equal(logits(host), whole)
    inlay.save(host, "a", tmp_path / "a")
    assert host.inlays["a"].method == inlay.Prefix(length=3, hidden=5)
    assert all(key.endswith("table.weight") for key in host.inlays["a"].tensors())
    other = classifier("t5")
    inlay.load(other, tmp_path / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), whole)
    with pytest.raises(inlay.SetupError, match="nothing to merge"):
        inlay.merge(host, "a")


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("reparametrised", [False, True])
def test_a_mixture_of_prefixes_merges_to_the_mean(family: str, reparametrised: bool) -> None:
    host = classifier(family)
    method = inlay.Prefix(length=3, reparametrised=reparametrised, hidden=5)
    inlay.add(host, "m", inlay.Mixture(method, modules=3, share=None))
    shake(host, "m")
    inlay.train(host, "m")
    inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])}).loss.backward()
    host.eval()
    mixed = logits(host)
    inlay.merge(host, "m")
    torch.testing.assert_close(logits(host), mixed, atol=1e-6, rtol=1e-5)
    assert host.inlays["m"].method == method


def test_a_stack_that_is_left_out_takes_its_network_along(tmp_path: Path) -> None:
    host, other = writer("t5"), writer("t5")
    inlay.add(host, "a", inlay.Prefix(length=3, reparametrised=True, hidden=4))
    shake(host, "a")
    inlay.leave_out(host, "a", ["decoder.0", "decoder.1"])
    assert {key.split(".")[1] for key in host.inlays["a"].tensors() if key.startswith("shared.")} == {"encoder"}
    inlay.save(host, "a", tmp_path / "a")
    inlay.load(other, tmp_path / "a")
    mine, theirs = host.inlays["a"].tensors(), other.inlays["a"].tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_where_it_is(tmp_path: Path) -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.Prefix(length=2, at=("cross",)))
    assert host.inlays["a"].place_ids() == ["decoder.0.cross_attention", "decoder.1.cross_attention"]
    inlay.add(host, "b", inlay.Prefix(length=2, at=("encoder",), leave_out=(1,)))
    assert host.inlays["b"].place_ids() == ["encoder.0.self_attention"]


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "opt"])
def test_moved_positions_are_those_of_peft(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "stays", inlay.Prefix(length=3))
    inlay.add(host, "moves", inlay.Prefix(length=3, shift=True))
    shake(host, "stays", std=1.0)
    shake(host, "moves", std=1.0)
    inputs = batch()
    inlay.activate(host, "moves")
    moved = logits(host, inputs)
    inlay.activate(host, "stays")
    assert not torch.allclose(logits(host, inputs), moved, atol=1e-4) or family == "llama"
    mask = inputs["attention_mask"]
    positions = torch.arange(3, 10).expand(3, -1)
    if family == "roberta":
        positions = (mask.cumsum(1) + 3) * mask
    if family == "opt":
        positions = mask.cumsum(1) * mask - 1 + 3
    torch.testing.assert_close(logits(host, inputs | {"position_ids": positions}), moved, atol=1e-6, rtol=1e-5)
    inlay.activate(host, inlay.Rows("moves", "stays", None))
    mixed = logits(host, inputs)
    for at, part in enumerate(("moves", "stays", None)):
        inlay.activate(host, part)
        torch.testing.assert_close(logits(host, row(inputs, at)), mixed[at : at + 1], atol=1e-5, rtol=1e-4)


def test_the_config_names_our_function_only_while_it_acts(tmp_path: Path) -> None:
    host = classifier("t5")
    names = lambda: {m.config._attn_implementation for m in host.modules() if hasattr(m, "config")}
    inlay.add(host, "a", inlay.Prefix(length=3))
    assert names() == {"sdpa"}
    inlay.activate(host, "a")
    assert names() == {OURS["sdpa"]}
    assert "inlay" not in host.config.to_json_string()
    host.config.save_pretrained(tmp_path)
    assert "inlay" not in (tmp_path / "config.json").read_text()
    inlay.activate(host, None)
    assert names() == {"sdpa"}
    inlay.activate(host, "a")
    host.set_attn_implementation("eager")
    with pytest.raises(inlay.SetupError, match="Activate the setup again"):
        logits(host)
    inlay.activate(host, "a")
    logits(host)
    inlay.strip(host)
    assert names() == {"eager"}


@pytest.mark.parametrize("family", REFUSED)
def test_a_host_whose_attention_takes_none(family: str) -> None:
    host = classifier(family)
    with pytest.raises(inlay.AnatomyError, match="attention interface"):
        inlay.add(host, "a", inlay.Prefix())
    assert not hasattr(host, "inlays")


def test_bad_settings() -> None:
    with pytest.raises(inlay.ConfigError, match="length"):
        inlay.Prefix(length=0)
    with pytest.raises(inlay.ConfigError, match="at least one"):
        inlay.Prefix(at=())
    with pytest.raises(inlay.ConfigError, match="has none of"):
        inlay.add(classifier("bert"), "a", inlay.Prefix(at=("decoder",)))
    with pytest.raises(inlay.ConfigError, match="positions"):
        inlay.add(classifier("t5"), "a", inlay.Prefix(shift=True))
    with pytest.raises(inlay.ConfigError, match="positions"):
        inlay.add(classifier("bert"), "a", inlay.Prefix(shift=True, length=512))
    host = classifier("bert")
    inlay.add(host, "a", inlay.Prefix(length=2))
    inlay.add(host, "b", inlay.Prefix(length=2))
    with pytest.raises(inlay.SetupError, match="no mean in one pass"):
        inlay.activate(host, inlay.Average("a", "b"))
    inlay.average(host, ["a", "b"], name="soup")
    inlay.activate(host, "soup")
    host.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(inlay.SetupError, match="flex_attention"):
        inlay.activate(host, "a")
