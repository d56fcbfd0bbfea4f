"""Prompts: against embeddings that are concatenated by hand, and what always holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as hf

import inlay
from tests.hosts import CONFIGS, ENCODER_DECODER, FAMILIES, batch, checkpointing_on, classifier, logits, shake, shaken
from tests.methods import ways
from tests.methods.ways import CAUSAL, writer

ENCODERS = [family for family in FAMILIES if family not in (*CAUSAL, *ENCODER_DECODER)]
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, inlay.Prompt(length=3))
    ways.trains_without_touching_the_host(family, inlay.Prompt(length=3))
    ways.saves_and_loads(family, inlay.Prompt(length=3), tmp_path)
    ways.deepcopy_is_independent(family, inlay.Prompt(length=3))
    ways.padded_row_is_the_row_alone(family, inlay.Prompt(length=3))
    if family != "mpnet":  # transformers has no checkpointing for it
        kinds = (False,) if family in CAUSAL else (False, True)
        ways.checkpointing_gives_the_same_gradients(family, inlay.Prompt(length=3), kinds)


@each_family
def test_rows_with_and_without(family: str) -> None:
    ways.rows_are_each_row_alone(family, inlay.Prompt(length=3), inlay.Prompt(length=5))


def longer(host: hf.PreTrainedModel, inputs: dict, name: str = "a") -> dict:
    """The same embeddings, concatenated by hand."""
    (part,) = host.inlays[name].parts.values()
    table = part.table.weight
    with torch.no_grad():
        own = host.get_input_embeddings()(inputs["input_ids"])
    ahead = table.expand(own.shape[0], -1, -1)
    mask = torch.cat([torch.ones(own.shape[0], table.shape[0], dtype=torch.long), inputs["attention_mask"]], 1)
    return {"inputs_embeds": torch.cat([ahead, own], 1).detach(), "attention_mask": mask}


@pytest.mark.parametrize("family", [*ENCODERS, *CAUSAL])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_a_prompt_is_the_same_embeddings_concatenated(family: str, way: str) -> None:
    if (family in ("mpnet", "deberta-v2") and way == "sdpa") or (family == "gemma2" and way == "sdpa"):
        pytest.skip("transformers has no such attention for it")
    host = shaken(hf.AutoModel.from_config(CONFIGS[family]()))
    host.set_attn_implementation(way)
    inlay.add(host, "a", inlay.Prompt(length=4))
    shake(host, "a")
    inputs = batch()
    inputs["input_ids"][inputs["input_ids"] == 1] = 2  # MPNet's padding, which embeddings do not show
    inlay.activate(host, "a")
    with torch.no_grad():
        ours = host(**inputs, output_hidden_states=True)
        inlay.activate(host, None)
        theirs = host(**longer(host, inputs), output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[0][real], theirs[0][:, 4:][real], atol=1e-6, rtol=1e-5)
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[:, 4:][real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_the_pooler_sees_the_first_real_token(family: str) -> None:
    host = shaken(hf.AutoModel.from_config(CONFIGS[family]()))
    inlay.add(host, "a", inlay.Prompt(length=4))
    inlay.activate(host, "a")
    with torch.no_grad():
        out = host(**batch())
        torch.testing.assert_close(out.pooler_output, host.pooler(out.last_hidden_state))


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_a_decoder_sees_the_encoders_prompt(family: str) -> None:
    host = writer(family)
    inlay.add(host, "a", inlay.Prompt(length=4))
    shake(host, "a")
    inputs, answer = batch(), batch(seed=5)["input_ids"]
    inlay.activate(host, "a")
    ours = logits(host, inputs | {"decoder_input_ids": answer})
    inlay.activate(host, None)
    theirs = logits(host, longer(host, inputs) | {"decoder_input_ids": answer})
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODER_DECODER])
def test_generation_with_and_without_a_cache(family: str) -> None:
    host = writer(family)
    inlay.add(host, "a", inlay.Prompt(length=3))
    inlay.add(host, "b", inlay.Prompt(length=2))
    shake(host, "a")
    shake(host, "b", 2)
    ids, mask = batch()["input_ids"], batch()["attention_mask"]
    if family not in ENCODER_DECODER:
        ids, mask = ids.flip(1), mask.flip(1)
    for setup in ("a", inlay.Rows("a", None, inlay.Stack("b", "a"))):
        inlay.activate(host, setup)
        texts = [
            host.generate(input_ids=ids, attention_mask=mask, use_cache=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False)
            for cache in (True, False)
        ]  # fmt: skip
        assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_with_other_inlays_on_a_decoder(family: str) -> None:
    """What acts on real tokens acts on the prompt, as if it stood in the text."""
    host = shaken(hf.AutoModel.from_config(CONFIGS[family]()))
    inlay.add(host, "a", inlay.Prompt(length=4))
    inlay.add(host, "l", inlay.LoRA(rank=2, targets=("q", "k", "v")))
    inlay.add(host, "p", inlay.Prefix(length=2))
    for seed, name in enumerate("alp"):
        shake(host, name, seed)
    inputs = batch()
    real = inputs["attention_mask"].bool()
    for other in ("l", "p"):
        inlay.activate(host, inlay.Stack(other, "a"))
        with torch.no_grad():
            ours = host(**inputs)[0]
            inlay.activate(host, other)
            theirs = host(**longer(host, inputs))[0][:, 4:]
        torch.testing.assert_close(ours[real], theirs[real], atol=2e-6, rtol=1e-5)


def test_where_it_begins() -> None:
    host = classifier()
    words = host.get_input_embeddings().weight
    inlay.add(host, "v", inlay.Prompt(length=5, init="vocabulary"))
    inlay.add(host, "t", inlay.Prompt(length=5, init="text", ids=(7, 8, 9)))
    inlay.add(host, "u", inlay.Prompt(length=5))
    start = lambda name: host.inlays[name].parts["tokens"].table.weight
    assert torch.equal(start("v"), words[:5])
    assert torch.equal(start("t"), words[torch.tensor([7, 8, 9, 7, 8])])
    assert start("u").abs().max() <= 0.5
    with pytest.raises(inlay.ConfigError, match="vocabulary has 50"):
        inlay.add(host, "w", inlay.Prompt(length=51, init="vocabulary"))


def test_a_text_to_begin_with(tmp_path: Path) -> None:
    host, words = classifier(), {"good": 11, "or": 12, "bad": 13, "?": 14, "[UNK]": 1}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]")), unk_token="[UNK]"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    method = inlay.Prompt(length=6, text="good or bad?")
    assert method.init == "text"
    inlay.add(host, "a", method, tokenizer=tokenizer)
    wanted = host.get_input_embeddings().weight[torch.tensor([11, 12, 13, 14, 11, 12])]
    assert torch.equal(host.inlays["a"].parts["tokens"].table.weight, wanted)
    inlay.add(host, "m", inlay.Mixture(method, modules=2, share=None), tokenizer=tokenizer)
    maps = host.inlays["m"].parts["tokens"].table.maps
    torch.testing.assert_close((maps[0].weight + maps[1].weight) / 2, wanted)
    inlay.save(host, "a", tmp_path / "a")
    other = classifier()
    inlay.load(other, tmp_path / "a", any_host=True)
    assert torch.equal(other.inlays["a"].parts["tokens"].table.weight, wanted)
    for wrong, match in ((inlay.Prompt(length=3, text="good or bad?"), "4 tokens, which is more than the prompt's 3"),
                         (inlay.Prompt(length=3, text=" "), "no tokens")):  # fmt: skip
        with pytest.raises(inlay.ConfigError, match=match):
            inlay.add(host, "w", wrong, tokenizer=tokenizer)
    with pytest.raises(inlay.ConfigError, match="tokenizer=tokenizer"):
        inlay.add(host, "w", method)
    assert host.inlays.names() == ["a", "m"]
    assert inlay.count(host, method).trainable == 6 * 16


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_mixture_of_prompts_merges_to_the_mean(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "m", inlay.Mixture(inlay.Prompt(length=3), modules=3, share=None))
    shake(host, "m")
    inlay.train(host, "m")
    inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])}).loss.backward()
    host.eval()
    (part,) = host.inlays["m"].parts.values()
    mean = torch.stack([m.weight for m in part.table.maps]).mean(0)
    mixed = logits(host)
    inlay.merge(host, "m")
    torch.testing.assert_close(logits(host), mixed, atol=1e-6, rtol=1e-5)
    assert torch.equal(part.table.weight, mean)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.long
def test_under_compile(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Prompt(length=3))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    quick = torch.compile(host, backend="eager")
    torch.testing.assert_close(logits(quick), wanted, atol=1e-5, rtol=1e-4)
    inlay.activate(host, None)
    torch.testing.assert_close(logits(quick), logits(host), atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_static_cache_is_gone_on_with_in_one_graph(family: str) -> None:
    """As generate does it on GPUs: each step after the first is one compiled graph, which cannot ask for a length."""
    host = writer(family)
    for name, length in (("p", 2), ("q", 3)):
        inlay.add(host, name, inlay.Prompt(length=length))
        shake(host, name, length)
    given = {name: tensor.flip(1) for name, tensor in batch(2).items()}
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    compiled = hf.CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    for setup in ("p", inlay.Rows("p", "q")):
        inlay.activate(host, setup)
        wanted = host.generate(**given, **how)
        static = {"cache_implementation": "static", "compile_config": compiled}
        assert torch.equal(host.generate(**given, **how, **static), wanted)


def test_what_a_training_step_has_put_in_front_is_made_anew() -> None:
    """Nothing of it may outlast the step, whose weights are others when it is over."""
    host = writer("llama")
    inlay.add(host, "p", inlay.Prompt(length=2))
    inlay.train(host, "p")
    host(**batch()).logits.sum().backward()
    assert host.inlays.entry.caught.value.learns
    logits(host.eval())
    assert not host.inlays.entry.caught.value.learns


def test_what_hooks_leave_outlasts_a_graph_that_breaks() -> None:
    host = classifier("bert")
    inlay.add(host, "a", inlay.Prompt(length=3))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    host.base_model.encoder.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    torch._dynamo.reset()
    quick = torch.compile(host, backend="eager")
    torch.testing.assert_close(logits(quick), wanted, atol=1e-5, rtol=1e-4)


def test_a_pooled_head_sees_real_tokens_only() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Prompt(length=3), head=inlay.Head(labels=3, pooling="mean"))
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    with torch.no_grad():
        hidden = host.base_model(**inputs)[0]
        mask = inputs["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        head = next(part for key, part in host.inlays["a"].parts.items() if key.startswith("head"))
        torch.testing.assert_close(logits(host, inputs), head(hidden, inputs["attention_mask"]))
    assert pooled.shape == (3, 16)


def test_the_published_number() -> None:
    t5 = hf.T5Config(vocab_size=32100, d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    count = inlay.count(t5, inlay.Prompt())
    assert count.trainable == 76_800
    assert f"{count.percent:.3f}" == "0.034"


def test_bad_settings() -> None:
    with pytest.raises(inlay.ConfigError, match="length"):
        inlay.Prompt(length=0)
    with pytest.raises(inlay.ConfigError, match="more than the prompt's 2"):
        inlay.Prompt(length=2, init="text", ids=(1, 2, 3))
    with pytest.raises(inlay.ConfigError, match="needs the text"):
        inlay.Prompt(init="text")
    host = classifier("bert")
    with pytest.raises(inlay.ConfigError, match="positions"):
        inlay.add(host, "a", inlay.Prompt(length=512))
    assert not hasattr(host, "inlays")
    inlay.add(host, "a", inlay.Prompt(length=509))
    inlay.activate(host, "a")
    with pytest.raises(inlay.SetupError, match="509 tokens in front of 7"):
        logits(host)
    with pytest.raises(inlay.SetupError, match="no mean in one pass"):
        inlay.activate(host, inlay.Average("a", "a"))
    decoder = classifier("gpt2")
    inlay.add(decoder, "a", inlay.Prompt(length=2))
    inlay.train(decoder, "a")
    for reentrant in ({"use_reentrant": True}, {}):  # torch's own default is reentrant
        checkpointing_on(decoder, reentrant)
        with pytest.raises(inlay.SetupError, match="not reentrant"):
            decoder(**batch(), labels=torch.tensor([0, 1, 1]))
