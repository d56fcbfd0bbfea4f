"""PALs: against a slow form of the paper's formula, the published count, and what always holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from inlay.host.joined import Joiner
from inlay.host.verbs import inlays_of
from tests.hosts import ENCODER_DECODER, FAMILIES, batch, classifier, logits, row, shake, spy_on
from tests.methods import ways
from tests.methods.ways import CAUSAL, writer

SMALL = inlay.PAL(size=8, heads=2)
OTHER = inlay.PAL(size=6, heads=3, bias=True, activation="gelu", dropout=0.0)
each_family = pytest.mark.parametrize("family", FAMILIES)


def slow(inlay_of, place: str, x: torch.Tensor, real: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    """One text, (T, D) -> (T, D): token by token, head by head, with exp and sums."""
    named = inlay_of.tensors()
    down, up = named["shared.projections.down.weight"], named["shared.projections.up.weight"]
    q, k, v = (named[f"{place}.{name}.weight"] for name in ("query", "key", "value"))
    z = [down @ token for token in x]
    size = down.shape[0] // heads
    found = []
    for i in range(len(z)):
        parts = []
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            seen = [j for j in range(len(z)) if real[j] and (j <= i or not causal)]
            said = [math.exp(float((q @ z[i])[mine] @ (k @ z[j])[mine]) / math.sqrt(size)) for j in seen]
            parts.append(sum((v @ z[j])[mine] * (w / sum(said)) for j, w in zip(seen, said, strict=True)))
        found.append(up @ torch.cat(parts))
    return torch.stack(found)


@each_family
def test_the_formula_by_hand(family: str) -> None:
    """δ = what the step at a layer's end adds, of what transformers hands to that layer."""
    host = classifier(family)
    inlay.add(host, "a", SMALL)
    shake(host, "a")
    inlay.activate(host, "a")
    anatomy = host.inlays.anatomy
    for stack, depth in anatomy.depth.items():
        place = f"{stack}.{depth - 1}.ffn"
        given: list[torch.Tensor] = []
        layer = host.get_submodule([name for name in anatomy.layers if stack in name or len(anatomy.depth) == 1][-1])
        handle = layer.register_forward_pre_hook(
            lambda m, args, kwargs, to=given: to.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        caught, inputs = spy_on(host, place), batch()
        logits(host, inputs)
        handle.remove()
        x, real = given[-1], inputs["attention_mask"].bool()
        delta = (caught["out"] - caught["h"]).view_as(x)
        for at in range(len(x)):
            there = real[at]
            wanted = slow(host.inlays["a"], place, x[at], there, 2, stack == "decoder")
            torch.testing.assert_close(delta[at][there], wanted[there], atol=1e-5, rtol=1e-4)


def test_a_whole_bert_by_hand() -> None:
    """LN(ffn(h') + h' + TS(h)), h' = LN(attention(h) + h), with BERT's own modules."""
    host = classifier("bert")
    inlay.add(host, "a", SMALL)
    shake(host, "a")
    inlay.activate(host, "a")
    ours = logits(host, row(batch(), 0))
    inlay.activate(host, None)
    ids = row(batch(), 0)["input_ids"]
    with torch.no_grad():
        h = host.bert.embeddings(ids)
        for number, layer in enumerate(host.bert.encoder.layer):
            inner = layer.attention(h)[0]
            added = slow(host.inlays["a"], f"encoder.{number}.ffn", h[0], torch.ones(7), 2, False)
            ffn = layer.output.dense(layer.intermediate(inner))
            h = layer.output.LayerNorm(ffn + inner + added[None])
        wanted = host.classifier(host.bert.pooler(h))
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@each_family
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, SMALL)
    ways.trains_without_touching_the_host(family, SMALL)
    ways.saves_and_loads(family, OTHER, tmp_path)
    ways.deepcopy_is_independent(family, SMALL)
    ways.padded_row_is_the_row_alone(family, OTHER)
    if classifier(family).supports_gradient_checkpointing:
        ways.checkpointing_gives_the_same_gradients(family, SMALL)
    ways.rows_are_each_row_alone(family, SMALL, OTHER)


@each_family
def test_a_fresh_one_may_change_nothing(family: str) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", inlay.PAL(size=8, heads=2, init="identity"))
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)


def test_the_published_count() -> None:
    """Eight tasks are 1.13 times BERT-base (Stickland & Murray 2019, table 1)."""
    count = inlay.count(hf.BertConfig(), inlay.PAL())
    assert count.trainable == 2 * 768 * 204 + 12 * 3 * 204**2 == 1_811_520
    assert "1,811,520" in str(count)
    assert round(1 + 8 * count.trainable / count.host, 2) == 1.13
    biased = inlay.count(hf.BertConfig(), inlay.PAL(bias=True)).trainable
    assert biased == count.trainable + 204 + 768 + 12 * 3 * 204


def test_two_layers_have_the_same_projections() -> None:
    host = classifier("t5")
    inlay.add(host, "a", SMALL)
    shared = [name for name in host.inlays["a"].tensors() if name.startswith("shared.")]
    assert shared == ["shared.projections.down.weight", "shared.projections.up.weight"]
    assert host.inlays["a"].place_ids() == [f"{stack}.{i}.ffn" for stack in ("encoder", "decoder") for i in (0, 1)]
    inlay.add(host, "b", inlay.PAL(size=8, heads=2, at=("encoder",), leave_out=(0,)))
    assert host.inlays["b"].place_ids() == ["encoder.1.ffn"]


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODER_DECODER])
def test_a_decoder_writes_without_a_cache(family: str) -> None:
    """Word by word as each prefix alone says it; a cache has not what the PAL attends to, and is refused."""
    host = writer(family)
    inlay.add(host, "a", SMALL)
    shake(host, "a")
    inlay.activate(host, "a")
    ids = row(batch(), 0)["input_ids"]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    text = host.generate(**given, min_new_tokens=4, use_cache=False)
    with torch.no_grad():
        begun = torch.full((1, 1), host.config.decoder_start_token_id) if family in ENCODER_DECODER else ids
        for _ in range(4):
            inputs = (
                {"input_ids": ids, "decoder_input_ids": begun} if family in ENCODER_DECODER else {"input_ids": begun}
            )
            said = host(**inputs).logits[:, -1]
            said[:, host.generation_config.eos_token_id or 1] = -torch.inf
            begun = torch.cat([begun, said.argmax(-1, keepdim=True)], 1)
    assert torch.equal(text, begun)
    with pytest.raises(inlay.SetupError, match="use_cache=False"):
        host.generate(**given, min_new_tokens=4, use_cache=True)
    if family in ENCODER_DECODER:  # in the encoder alone, it needs the whole text of nobody who writes
        inlay.add(host, "b", inlay.PAL(size=8, heads=2, at=("encoder",)))
        inlay.activate(host, "b")
        texts = [host.generate(**given, use_cache=cache) for cache in (True, False)]
        assert torch.equal(*texts)


def test_joined_plans_refuse_a_cache_too() -> None:
    """A server's batch, in which one row has a PAL: `Rows` over the same setups refuses it as well."""
    host = writer("gpt2")
    for seed, (name, method) in enumerate({"a": SMALL, "b": inlay.Pfeiffer(size=4)}.items()):
        inlay.add(host, name, method)
        shake(host, name, seed)
    inlays = inlays_of(host)
    joined = Joiner(inlays.anatomy).joined([inlays.resolve(host, name) for name in "ab"])
    assert joined.whole_texts == inlays.resolve(host, inlay.Rows("a", "b")).whole_texts
    inlays.switch(host, joined)
    given = {"input_ids": batch(rows=2)["input_ids"], "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with pytest.raises(inlay.SetupError, match="use_cache=False"):
        host.generate(**given, use_cache=True)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "opt"])
def test_left_padding_is_the_row_alone(family: str) -> None:
    host = writer(family) if family in ("gpt2", "opt") else classifier(family)
    inlay.add(host, "a", SMALL)
    shake(host, "a")
    inlay.activate(host, "a")
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    part = host.inlays["a"].parts[f"{next(iter(host.inlays.anatomy.depth))}:0:ffn"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    made = part(x, mask)
    assert torch.isfinite(made).all()
    torch.testing.assert_close(made[:1, 2:], part(x[:1, 2:]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made[1:], part(x[1:]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
@pytest.mark.parametrize("share", [None, "up"])
def test_a_mixture_merges_to_the_mean(family: str, share: str | None, tmp_path: Path) -> None:
    host = classifier(family)
    inlay.add(host, "m", inlay.Mixture(SMALL, modules=3, share=share))
    shake(host, "m")
    inlay.train(host, "m")
    inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])}).loss.backward()
    host.eval()
    mixed = logits(host)
    inlay.merge(host, "m")
    torch.testing.assert_close(logits(host), mixed, atol=1e-6, rtol=1e-5)
    assert host.inlays["m"].method == SMALL
    inlay.save(host, "m", tmp_path / "m")


def test_a_learned_mixture() -> None:
    ways.padded_row_is_the_row_alone("bert", inlay.Mixture(SMALL, modules=2, routing="learned", by="token"))
    ways.trains_without_touching_the_host("bert", inlay.Mixture(SMALL, modules=2, routing="learned", by="text"))


@pytest.mark.parametrize("family", ["bert", "roberta", "bart"])
def test_beside_what_lengthens_the_text(family: str) -> None:
    """Beside a prompt in an encoder, a PAL sees the prompt's tokens and no padding."""
    host = classifier(family)
    inlay.add(host, "p", inlay.Prompt(length=3))
    inlay.add(host, "a", inlay.PAL(size=8, heads=2, at=("encoder",)))
    shake(host, "p")
    shake(host, "a")
    inlay.activate(host, inlay.Stack("p", "a"))
    inputs = batch()
    together = logits(host, inputs)
    for at in range(3):
        real = int(inputs["attention_mask"][at].sum())
        alone = {k: v[:, :real] for k, v in row(inputs, at).items()}
        torch.testing.assert_close(logits(host, alone), together[at : at + 1], atol=1e-5, rtol=1e-4)


def test_setups_and_averages() -> None:
    host = classifier("bert")
    for seed, name in enumerate("ab"):
        inlay.add(host, name, SMALL)
        shake(host, name, seed)
    inlay.add(host, "c", inlay.Houlsby(size=4))
    shake(host, "c", 3)
    inlay.activate(host, inlay.Stack("c", "a"))
    caught = spy_on(host, "encoder.0.ffn")
    logits(host)
    assert caught["seen"].layer is not None
    inlay.activate(host, inlay.Average("a", "b"))
    caught = spy_on(host, "encoder.0.ffn")
    logits(host)
    both = [host.inlays[name].parts["encoder:0:ffn"](caught["seen"].layer, caught["seen"].mask) for name in "ab"]
    torch.testing.assert_close(caught["out"], caught["h"] + sum(both) / 2, atol=1e-5, rtol=1e-4)
    inlay.average(host, ["a", "b"], name="soup")
    inlay.activate(host, "soup")
    logits(host)
    held = [slot for hook in host.inlays.branches.values() if (slot := getattr(hook, "given", None)) is not None]
    assert len(held) == 2
    assert all(slot.value is None for slot in held), "nothing is kept after a forward"
    inlay.activate(host, None)
    inlay.remove(host, "soup")
    inlay.remove(host, "a")
    inlay.remove(host, "b")
    assert not any(hasattr(hook, "given") for hook in host.inlays.branches.values())


def test_under_compile() -> None:
    host = classifier("bert")
    inlay.add(host, "a", SMALL)
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    quick = torch.compile(host, backend="eager")
    torch.testing.assert_close(logits(quick), wanted, atol=1e-5, rtol=1e-4)


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(inlay.ConfigError, match="multiple of `heads`"):
        inlay.PAL(size=10, heads=4)
    with pytest.raises(inlay.ConfigError, match="at least one"):
        inlay.PAL(at=())
    with pytest.raises(inlay.ConfigError, match="activation"):
        inlay.PAL(activation="glue")
    with pytest.raises(inlay.ConfigError, match="wider than the host"):
        inlay.add(classifier("bert"), "a", inlay.PAL(size=24))
    with pytest.raises(inlay.ConfigError, match="has none of decoder"):
        inlay.add(classifier("bert"), "a", inlay.PAL(size=8, heads=2, at=("decoder",)))
    host = classifier("bert")
    for name in "ab":
        inlay.add(host, name, SMALL)
    with pytest.raises(inlay.SetupError, match="no bottleneck that a fusion could mix"):
        inlay.add_fusion(host, "f", ["a", "b"])
    for format in ("adapters", "peft"):
        with pytest.raises(inlay.InlayError):
            inlay.export(host, "a", tmp_path / format, format=format)
        assert not (tmp_path / format).exists()
    host = classifier("gpt2")
    inlay.add(host, "a", SMALL)
    inlay.add(host, "p", inlay.Prompt(length=2))
    with pytest.raises(inlay.SetupError, match="Use a Prefix"):
        inlay.activate(host, inlay.Stack("p", "a"))
    inlay.activate(host, inlay.Rows("p", "a", None))
    mixed = logits(host)
    for at, part in enumerate(("p", "a", None)):
        inlay.activate(host, part)
        torch.testing.assert_close(logits(host, row(batch(), at)), mixed[at : at + 1], atol=1e-5, rtol=1e-4)
