"""Probing finds what the table says, works on families without an entry, and refuses with an entry to fill in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

import inlay
from inlay.anatomy import families, survey
from inlay.anatomy.probe import probe
from tests.hosts import (
    BART,
    CAUSAL,
    CONFIGS,
    FAMILIES,
    GROUPED,
    SMALL,
    T5,
    batch,
    classifier,
    logits,
    shake,
    shaken,
    snapshot,
    without_gradient,
)

METHODS = [inlay.Houlsby, inlay.Pfeiffer, inlay.Parallel]
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "vocab_size": 50}
GPT = IDS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 64}
MOE = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE = {"block_size": 4, "num_random_blocks": 1, "sep_token_id": 1}
XLM = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "pad_token_id": 0}
QKV, FFN = {"q", "k", "v", "o"}, {"ffn_in", "ffn_out"}

# family → config, stacks, and the projections that are certain
UNKNOWN: dict[str, tuple[Callable[[], hf.PreTrainedConfig], str, set[str]]] = {
    "camembert": (lambda: hf.CamembertConfig(**CAUSAL), "encoder", QKV | FFN),
    "xlm-roberta-xl": (lambda: hf.XLMRobertaXLConfig(**CAUSAL), "encoder", QKV | FFN),
    "roberta-prelayernorm": (lambda: hf.RobertaPreLayerNormConfig(**CAUSAL), "encoder", QKV | FFN),
    "ernie": (lambda: hf.ErnieConfig(**SMALL), "encoder", QKV | FFN),
    "roformer": (lambda: hf.RoFormerConfig(**SMALL), "encoder", QKV | FFN),
    "convbert": (lambda: hf.ConvBertConfig(**SMALL, embedding_size=16, head_ratio=1), "encoder", {"o"} | FFN),
    "nystromformer": (lambda: hf.NystromformerConfig(**CAUSAL), "encoder", QKV | FFN),
    "big_bird": (lambda: hf.BigBirdConfig(**CAUSAL, **SPARSE, attention_type="original_full"), "encoder", QKV | FFN),
    "esm": (lambda: hf.EsmConfig(**SMALL, mask_token_id=3, position_embedding_type="rotary"), "encoder", QKV | FFN),
    "openai-gpt": (lambda: hf.OpenAIGPTConfig(n_embd=16, n_layer=2, n_head=2, vocab_size=50), "decoder", QKV | FFN),
    "gptj": (lambda: hf.GPTJConfig(**GPT, rotary_dim=4), "decoder", QKV | FFN),
    "codegen": (lambda: hf.CodeGenConfig(**GPT | {"n_head": 4}, rotary_dim=2), "decoder", {"o"} | FFN),
    "gpt_neo": (lambda: hf.GPTNeoConfig(
        **IDS, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    ), "decoder", QKV | FFN),
    "bloom": (lambda: hf.BloomConfig(**IDS, hidden_size=16, n_layer=2, n_head=2), "decoder", QKV | FFN),
    "bloom-post": (lambda: hf.BloomConfig(
        **IDS, hidden_size=16, n_layer=2, n_head=2, apply_residual_connection_post_layernorm=True
    ), "decoder", QKV | FFN),
    "falcon": (lambda: hf.FalconConfig(**CAUSAL), "decoder", {"o"} | FFN),
    "falcon-sequential": (lambda: hf.FalconConfig(
        **CAUSAL, parallel_attn=False, multi_query=False
    ), "decoder", QKV | FFN),
    "falcon-new": (lambda: hf.FalconConfig(
        **CAUSAL, new_decoder_architecture=True, num_kv_heads=1
    ), "decoder", {"o"} | FFN),
    "mpt": (lambda: hf.MptConfig(
        d_model=16, n_layers=2, n_heads=2, vocab_size=50, max_seq_len=64
    ), "decoder", QKV | FFN),
    "starcoder2": (lambda: hf.Starcoder2Config(**GROUPED), "decoder", QKV | FFN),
    "stablelm": (lambda: hf.StableLmConfig(**CAUSAL, num_key_value_heads=2), "decoder", QKV | FFN),
    "phi3": (lambda: hf.Phi3Config(**CAUSAL, num_key_value_heads=2), "decoder", QKV | FFN),
    "olmo2": (lambda: hf.Olmo2Config(**CAUSAL), "decoder", QKV | FFN),
    "glm4": (lambda: hf.Glm4Config(**GROUPED), "decoder", QKV | FFN),
    "granite": (lambda: hf.GraniteConfig(**CAUSAL), "decoder", QKV | FFN),
    "cohere": (lambda: hf.CohereConfig(**CAUSAL, num_key_value_heads=2), "decoder", QKV | FFN),
    "gemma": (lambda: hf.GemmaConfig(**GROUPED), "decoder", QKV | FFN),
    "nemotron": (lambda: hf.NemotronConfig(**GROUPED), "decoder", QKV | FFN),
    "qwen2_moe": (lambda: hf.Qwen2MoeConfig(
        **MOE, num_experts=4, shared_expert_intermediate_size=24, decoder_sparse_step=2
    ), "decoder", QKV | FFN),
    "mixtral": (lambda: hf.MixtralConfig(**MOE, num_local_experts=4), "decoder", QKV),
    "pegasus": (lambda: hf.PegasusConfig(**BART), "encoder decoder", QKV | FFN),
    "mbart": (lambda: hf.MBartConfig(**BART), "encoder decoder", QKV | FFN),
    "marian": (lambda: hf.MarianConfig(**BART), "encoder decoder", QKV | FFN),
    "longt5": (lambda: hf.LongT5Config(**T5, local_radius=3), "encoder decoder", QKV | FFN),
    "switch_transformers": (lambda: hf.SwitchTransformersConfig(
        **T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    ), "encoder decoder", QKV | FFN),
}  # fmt: skip

# family → config and the reason
REFUSED: dict[str, tuple[Callable[[], hf.PreTrainedConfig], str]] = {
    "mobilebert": (lambda: hf.MobileBertConfig(
        **SMALL, embedding_size=16, true_hidden_size=8, intra_bottleneck_size=8
    ), r"encoder\.layer\.0 should have one attention and one ffn branch, but has output\.bottleneck"),
    "squeezebert": (lambda: hf.SqueezeBertConfig(**SMALL, embedding_size=16), "no list of modules of one class was"),
    "xlm": (lambda: hf.XLMConfig(**XLM), "several lists of modules may be its layers: attentions, layer_norm1"),
    "flaubert": (lambda: hf.FlaubertConfig(**XLM), "several lists of modules may be its layers: attentions"),
    "xlnet": (lambda: hf.XLNetConfig(
        d_model=16, n_layer=2, n_head=2, d_inner=24, vocab_size=50
    ), r"do not take and give hidden states \(rows, tokens, 16\)"),
    "nystromformer": (lambda: hf.NystromformerConfig(
        **CAUSAL, num_landmarks=4
    ), r"could not be run on 2x5 dummy tokens \(RuntimeError: shape"),
    "fnet": (lambda: hf.FNetConfig(**CAUSAL), "no way to add up outputs of modules to what encoder.layer.0 gives"),
    "prophetnet": (lambda: hf.ProphetNetConfig(
        hidden_size=16, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=2, encoder_ffn_dim=24,
        num_decoder_attention_heads=2, decoder_ffn_dim=24, vocab_size=50,
    ), "no way to add up outputs of modules to what decoder.layers.0 gives"),
    "granite-scaled": (lambda: hf.GraniteConfig(**CAUSAL, residual_multiplier=0.5), "no way to add up outputs"),
}  # fmt: skip


def bare(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    return shaken(hf.AutoModel.from_config(config))


def hidden(host: hf.PreTrainedModel) -> torch.Tensor:
    inputs: dict[str, Any] = batch()
    if host.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        return host(**inputs)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_probing_finds_what_the_table_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = classifier(family)
    kind = host.config.get_text_config().model_type
    table, probed = survey.family_of(host), probe(host)
    places = survey.Anatomy(host).places
    wanted = {}
    for method in METHODS:
        for early in (False, True):
            wanted[method, early] = acting(host, method, early)
    monkeypatch.delitem(families.BY_CONFIG, kind, raising=False)
    monkeypatch.setitem(families.FAMILIES, kind, probed)
    assert survey.family_of(host) is probed
    assert {name: layers.path for name, layers in probed.stacks.items()} == {n: s.path for n, s in table.stacks.items()}
    found = survey.Anatomy(host).places
    assert set(found) == set(places)
    for id, place in found.items():
        assert place.norm == places[id].norm
        assert place.projection == places[id].projection
    for (method, early), expected in wanted.items():
        assert torch.equal(acting(host, method, early), expected)


def acting(host: hf.PreTrainedModel, method: type, early: bool) -> torch.Tensor:
    """The logits under an inlay with weights of real size."""
    inlay.add(host, "a", method(size=4, sites=("attention", "ffn"), before_dropout=early))
    shake(host, "a")
    inlay.activate(host, "a")
    found = logits(host)
    inlay.strip(host)
    return found


@pytest.mark.parametrize("family", UNKNOWN)
def test_families_without_an_entry(family: str) -> None:
    config, stacks, projections = UNKNOWN[family]
    host = bare(config())
    assert host.config.model_type not in families.FAMILIES
    family_found = probe(host)
    assert " ".join(family_found.stacks) == stacks
    for name, layers in family_found.stacks.items():
        cross = {f"cross_{role}" for role in QKV} if " " in stacks and name == "decoder" else set()
        assert set(layers.projections) == projections | cross
    before, plain = snapshot(host), hidden(host)
    for method in METHODS:
        inlay.add(host, "same", method(size=4, init="identity", sites=("attention", "ffn")))
        inlay.activate(host, "same")
        assert torch.equal(hidden(host), plain)
        inlay.strip(host)
    inlay.add(host, "a", inlay.Pfeiffer(size=4, sites=("attention", "ffn")))
    shake(host, "a", std=0.2)
    inlay.activate(host, "a")
    whole = hidden(host)
    for part in host.inlays["a"].parts.values():  # without any one of its modules the result is another
        kept = copy.deepcopy(part.state_dict())
        part.up.weight.data.zero_()
        part.up.bias.data.zero_()
        assert not torch.allclose(hidden(host), whole, atol=1e-5)
        part.load_state_dict(kept)
    inlay.strip(host)
    assert snapshot(host) == before
    assert torch.equal(hidden(host), plain)


@pytest.mark.parametrize("family", UNKNOWN)
def test_every_parameter_beside_own_norms_learns(family: str) -> None:
    host = bare(UNKNOWN[family][0]())
    inlay.add(host, "a", inlay.Houlsby(size=4), norms=True)
    shake(host, "a", std=0.2)
    inlay.train(host, "a")
    inputs: dict[str, Any] = batch()
    if host.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    assert without_gradient(host, host(**inputs)[0].square().sum()) == []


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_certain_is_refused_with_the_entry_to_fill_in(family: str) -> None:
    config, reason = REFUSED[family]
    host = bare(config())
    before, random = snapshot(host), torch.get_rng_state()
    with pytest.raises(inlay.AnatomyError, match=reason) as error:
        inlay.add(host, "a", inlay.Pfeiffer(size=4))
    assert snapshot(host) == before
    assert torch.equal(torch.get_rng_state(), random)
    message = str(error.value)
    assert f"inlay.register_family({host.config.model_type!r}, inlay.Family({{" in message
    entry: dict[str, Any] = {}
    code = message[message.index("inlay.register_family") :].replace("inlay.register_family", "found", 1)
    eval(code, {"inlay": inlay, "found": lambda kind, found: entry.update({kind: found})})  # noqa: S307 - it is Python
    layers = list(entry[host.config.model_type].stacks.values())
    assert any("?" in (x.path, x.attention.output, x.ffn.output) for x in layers)
    for x in layers:
        if x.path != "?":
            for name, module in host.get_submodule(f"{x.path}.0").named_children():
                assert f"    {name:<40} {type(module).__name__}" in message


def test_the_entry_keeps_what_is_known() -> None:
    config, _ = REFUSED["prophetnet"]
    with pytest.raises(inlay.AnatomyError) as error:
        inlay.add(bare(config()), "a", inlay.Houlsby(size=4))
    known = "attention=inlay.Branch('self_attn.out_proj', ('self_attn.query_proj', 0), norm='self_attn_layer_norm'"
    assert known in str(error.value)


def test_an_entry_that_is_passed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    host = bare(REFUSED["granite-scaled"][0]())
    inlay.register_family("granite", families.FAMILIES["llama"])
    inlay.add(host, "a", inlay.Houlsby(size=4))


def test_shared_layers_are_refused_with_the_reason() -> None:
    with pytest.raises(inlay.AnatomyError, match=r"runs one layer's weights several times \(encoder\.albert_layer"):
        probe(bare(hf.AlbertConfig(**SMALL, embedding_size=8)))


def test_weights_are_needed() -> None:
    with torch.device("meta"):
        host = hf.CamembertModel(UNKNOWN["camembert"][0]())
    with pytest.raises(inlay.AnatomyError, match=r"(?s)on the meta device.*inlay\.register_family\('camembert'"):
        probe(host)
    with pytest.raises(inlay.AnatomyError, match=r"give inlay\.count the loaded host instead of a config"):
        inlay.count(host.config, inlay.Pfeiffer(size=4))
    assert inlay.count(bare(host.config), inlay.Pfeiffer(size=4)).trainable == 2 * (2 * 16 * 4 + 4 + 16)


def test_a_branch_of_zeros_is_not_certain() -> None:
    host = bare(UNKNOWN["starcoder2"][0]())
    for name, parameter in host.named_parameters():
        if ".o_proj." in name:
            parameter.data.zero_()
    with pytest.raises(inlay.AnatomyError, match="not certain"):
        inlay.add(host, "a", inlay.Houlsby(size=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["camembert", "gptj", "olmo2", "marian"])
def test_any_dtype_gives_the_same(family: str, dtype: torch.dtype) -> None:
    host = bare(UNKNOWN[family][0]())
    assert probe(host) == probe(host.to(dtype))


@pytest.mark.parametrize("family", ["bert", "gpt_neox", "t5", "phi"])
def test_weights_as_transformers_starts_them(family: str) -> None:
    """Norms of ones and biases of zeros make more tensors equal."""
    config = CONFIGS[family]()
    assert probe(hf.AutoModel.from_config(config)) == probe(bare(config))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", [
    UNKNOWN["camembert"][0], UNKNOWN["pegasus"][0],
    lambda: hf.BigBirdConfig(**CAUSAL, **SPARSE),  # exchanges its own attention modules when a text is short
], ids=["camembert", "pegasus", "big_bird"])  # fmt: skip
def test_the_host_is_not_touched(config: Callable[[], hf.PreTrainedConfig], training: bool) -> None:
    host = bare(config()).train(training)
    seen: list[Any] = []
    host.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call))
    before, weights, random = snapshot(host), copy.deepcopy(host.state_dict()), torch.get_rng_state()
    modules = dict(host.named_modules())
    probe(host)
    assert not seen
    assert snapshot(host) == before
    assert all(module.training == training for module in host.modules())
    assert dict(host.named_modules()) == modules
    assert all(torch.equal(tensor, weights[name]) for name, tensor in host.state_dict().items())
    assert all(parameter.grad is None for parameter in host.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_same_below_any_head() -> None:
    config = UNKNOWN["bloom"][0]()
    heads = (hf.AutoModel, hf.AutoModelForCausalLM, hf.AutoModelForSequenceClassification)
    found = [probe(shaken(head.from_config(config))) for head in heads]
    assert found[0] == found[1] == found[2]


def test_heads_of_a_fused_module_are_those_of_the_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of pictures and texts has the number of heads in its text model's config alone."""
    vision = hf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = hf.GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64
    )
    host = hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text))
    layers = families.FAMILIES["gpt_neox"].stacks["decoder"]
    nested = inlay.Family({"decoder": replace(layers, path="language_model.layers")})
    monkeypatch.setitem(families.FAMILIES, "gpt_neox", nested)
    inlay.add(host, "a", inlay.LoRA(rank=2))
    assert {place.heads for place in host.inlays.anatomy.of_kind("q", "v")} == {4}
