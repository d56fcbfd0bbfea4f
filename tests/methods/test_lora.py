from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from inlay.methods.lora import part_rows
from tests.hosts import FAMILIES, batch, classifier, fused_steps, logits, shake, spy_on, step_at
from tests.methods.slow import slow_fusion

ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out")


@pytest.mark.parametrize("family", FAMILIES)
def test_on_every_projection_of_every_family(family: str, tmp_path: Path) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "a", inlay.LoRA(rank=2, alpha=4, targets=ROLES))
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)  # B is zero
    shake(host, "a")
    wanted = logits(host)
    for key, part in host.inlays["a"].parts.items():
        kept = part.up.weight.clone()
        part.up.weight.data.zero_()
        assert not torch.allclose(logits(host), wanted, atol=1e-5), key
        part.up.weight.data.copy_(kept)
    inlay.save(host, "a", tmp_path / "a")
    other = classifier(family)
    inlay.load(other, tmp_path / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [("q", "v"), ROLES])
def test_fold_and_unfold(family: str, targets: tuple[str, ...]) -> None:
    host = classifier(family).double()
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.add(host, "a", inlay.LoRA(rank=2, alpha=4, targets=targets), head=inlay.Head(labels=3))
    shake(host, "a", std=0.1)
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.fold(host, "a")
    places = host.inlays.anatomy.places.values()
    assert all(
        step_at(host, place.id) is None for place in places if place.projection is not None and place.kind != "linear"
    )
    torch.testing.assert_close(logits(host), wanted, atol=1e-9, rtol=1e-7)
    inlay.unfold(host)
    after = host.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert torch.equal(logits(host), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_for_good_it_is_a_model_of_transformers_alone(family: str, tmp_path: Path) -> None:
    host = classifier(family)
    config = host.config
    inlay.add(host, "other", inlay.Pfeiffer(size=4))
    head = inlay.Head(labels=("x", "y", "z"))
    bias = "targets" if any(".bias" in path for path, _ in host.base_model.named_parameters()) else "none"
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=ROLES, bias=bias), head=head, norms=True)
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.fold(host, "a", for_good=True)
    assert not hasattr(host, "inlays")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
    torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)
    assert host.config.num_labels == 3
    assert host.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert config.num_labels == 2  # that of whoever made the host
    host.save_pretrained(tmp_path)
    alone = type(host).from_pretrained(tmp_path)
    assert torch.equal(logits(alone.eval()), logits(host))
    assert alone.config.label2id == {"x": 0, "y": 1, "z": 2}
    inlay.add(host, "next", inlay.Pfeiffer(size=4))
    inlay.strip(host)
    assert host.config.num_labels == 3


def test_folded_for_good_with_every_bias_and_norm() -> None:
    host = classifier()
    config, trains = host.config, [p.requires_grad for p in host.parameters()]
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="all"), norms=True)
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.fold(host, "a", for_good=True)
    torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)
    assert host.config is config
    assert [p.requires_grad for p in host.parameters()] == trains


def test_folded_for_good_keeps_the_dtypes_of_the_host() -> None:
    host = classifier().bfloat16()
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="targets"), norms=True, head=inlay.Head(labels=2))
    inlay.train(host, "a")  # in single precision
    shake(host, "a")
    inlay.fold(host.eval(), "a", for_good=True)
    assert {parameter.dtype for parameter in host.parameters()} == {torch.bfloat16}
    assert logits(host).dtype == torch.bfloat16


def test_folded_for_good_the_host_has_the_modules_that_it_had() -> None:
    """Such as those of accelerate, which move what a module is given to the module's device."""
    host = classifier()
    modules, seen = dict(host.named_modules()), []
    host.classifier.register_forward_hook(lambda module, given, out: seen.append(out))
    inlay.add(host, "a", inlay.LoRA(rank=2), norms=True, head=inlay.Head(labels=("x", "y", "z")))
    inlay.fold(host, "a", for_good=True)
    assert dict(host.named_modules()) == modules
    assert torch.equal(logits(host), seen[-1])
    assert host.classifier.out_features == 3


def test_what_cannot_be_the_hosts_own_is_not_folded_for_good() -> None:
    host = classifier()
    inlay.add(host, "pools", inlay.LoRA(rank=2), head=inlay.Head(labels=2, pooling="mean"))
    before = {k: v.clone() for k, v in host.state_dict().items()}
    with pytest.raises(inlay.SetupError, match="BertForSequenceClassification cannot have this head for good"):
        inlay.fold(host, "pools", for_good=True)
    assert all(torch.equal(host.state_dict()[k], v) for k, v in before.items())
    llama = classifier("llama")
    inlay.add(llama, "biased", inlay.LoRA(rank=2, bias="targets"))
    with pytest.raises(inlay.SetupError, match="has no bias that it could be added to. Fold without for_good"):
        inlay.fold(llama, "biased", for_good=True)
    tied = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    )
    inlay.add(tied, "words", inlay.LoRA(rank=2), head=inlay.Head())
    with pytest.raises(inlay.SetupError, match="cannot be replaced: its weight is tied"):
        inlay.fold(tied, "words", for_good=True)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_unfold_is_exact_in_bfloat16(family: str) -> None:
    host = classifier(family).bfloat16()
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=ROLES))
    shake(host, "a")
    inlay.fold(host, "a")
    assert any(not torch.equal(host.state_dict()[k], v) for k, v in before.items())
    inlay.unfold(host)
    assert all(torch.equal(host.state_dict()[k], v) for k, v in before.items())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_compiled_before_its_first_call(family: str) -> None:
    torch._dynamo.reset()
    host = classifier(family)
    inlay.add(host, "a", inlay.LoRA(rank=2))
    shake(host, "a")
    compiled = torch.compile(host, backend="eager")
    inlay.activate(host, "a")
    wanted = logits(compiled)
    inlay.fold(compiled, "a")
    torch.testing.assert_close(logits(compiled), wanted, atol=1e-5, rtol=1e-4)
    inlay.unfold(compiled)
    assert torch.equal(logits(compiled), wanted)
    torch._dynamo.reset()


def test_while_folded(tmp_path: Path) -> None:
    host = classifier("gpt2")
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.LoRA(rank=2))
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"])
    inlay.activate(host, "a")
    wanted, before = logits(host), host.transformer.h[0].attn.c_attn.weight.clone()
    inlay.fold(host, "a")
    for act in (
        lambda: inlay.activate(host, None), lambda: inlay.activate(host, "f"), lambda: inlay.fold(host, "b"),
        lambda: inlay.fold(host, "a"), lambda: inlay.train(host, "a"), lambda: inlay.strip(host),
        lambda: inlay.leave_out(host, "a", [0]), lambda: inlay.fusion_activations(host, "f", [batch()]),
    ):  # fmt: skip
        with pytest.raises(inlay.SetupError, match=r"inlay\.unfold\(host\) first"):
            act()
    with pytest.raises(inlay.SetupError, match="'a' is active"):
        inlay.remove(host, "a")
    inlay.save(host, "a", tmp_path / "a")
    other = classifier("gpt2")
    inlay.load(other, tmp_path / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), wanted)
    twin = copy.deepcopy(host)
    inlay.unfold(twin)
    assert torch.equal(twin.transformer.h[0].attn.c_attn.weight, before)
    torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)
    inlay.unfold(host)
    assert torch.equal(logits(host), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_weight_is_not_folded(dtype: torch.dtype) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2))
    shake(host, "a")
    query = host.bert.encoder.layer[1].attention.self.query
    query.weight = torch.nn.Parameter(query.weight.to(dtype), requires_grad=False)
    before = {k: v.clone() for k, v in host.state_dict().items()}
    with pytest.raises(inlay.SetupError, match=r"encoder\.1\.q cannot be folded: its weight is quantised"):
        inlay.fold(host, "a")
    assert all(torch.equal(host.state_dict()[k].float(), v.float()) for k, v in before.items())


@pytest.mark.parametrize(("family", "module", "parts"), [
    ("gpt2", "transformer.h.1.attn.c_attn", "concatenated"),
    ("modernbert", "model.layers.1.attn.Wqkv", "concatenated"),
    ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value", "by head"),
])  # fmt: skip
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_only_the_named_part_of_a_fused_projection_changes(family: str, module: str, parts: str, role: str) -> None:
    host = classifier(family)
    outputs = []
    host.get_submodule(module).register_forward_hook(lambda m, a, y: outputs.append(y))
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=(role,), leave_out=(0,)))
    shake(host, "a")
    logits(host)
    inlay.activate(host, "a")
    handle = host.get_submodule(module).register_forward_hook(lambda m, a, y: outputs.append(y))
    logits(host)
    handle.remove()
    changed = (outputs[-1] - outputs[0]).abs().amax((0, 1)) > 1e-6
    wanted = torch.zeros(48, dtype=torch.bool)
    at = "qkv".index(role)
    if parts == "concatenated":
        wanted[16 * at : 16 * (at + 1)] = True
    else:
        for head in range(2):
            wanted[24 * head + 8 * at : 24 * head + 8 * (at + 1)] = True
    assert torch.equal(changed, wanted)
    place = host.inlays.anatomy.places[f"{'encoder' if family == 'modernbert' else 'decoder'}.1.{role}"]
    assert part_rows(place, 48).tolist() == wanted.nonzero().flatten().tolist()
    before = host.get_submodule(module).weight.clone()
    inlay.fold(host, "a")
    rows = host.get_submodule(module).weight != before
    assert torch.equal(rows.any(0 if family == "gpt2" else 1), wanted)


def test_counts_and_scaling() -> None:
    assert inlay.count(hf.BertConfig(), inlay.LoRA()).trainable == 294_912
    host = classifier()
    inlay.add(host, "plain", inlay.LoRA(rank=4, alpha=8))
    inlay.add(host, "stable", inlay.LoRA(rank=4, alpha=8, rank_stabilised=True))
    inlay.add(host, "odd", inlay.LoRA(rank=4, alpha=8, ranks={"encoder.1.q": 2}, alphas={"encoder.1.v": 2}))
    scale = {n: {k: p.scale for k, p in host.inlays[n].parts.items()} for n in ("plain", "stable", "odd")}
    assert set(scale["plain"].values()) == {2.0}
    assert set(scale["stable"].values()) == {4.0}
    assert scale["odd"] == {"encoder:0:q": 2.0, "encoder:0:v": 2.0, "encoder:1:q": 4.0, "encoder:1:v": 0.5}


def test_cross_attention_and_single_places() -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("cross_q", "encoder.0.v")))
    assert host.inlays["a"].place_ids() == ["encoder.0.v", "decoder.0.cross_q", "decoder.1.cross_q"]
    inlay.add(host, "b", inlay.LoRA(rank=2, targets=("linear",)))
    assert "linear.classification_head.dense" in host.inlays["b"].place_ids()


def test_gradients_against_finite_differences() -> None:
    host = classifier("gpt2").double()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q", "ffn_in"), leave_out=(0,)))
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    names, values = zip(*host.inlays["a"].named_parameters(), strict=True)

    def loss(*parameters: torch.Tensor) -> torch.Tensor:
        given = {f"inlays.all.a.{name}": value for name, value in zip(names, parameters, strict=True)}
        return torch.func.functional_call(host, given, kwargs=batch(2, 4)).logits

    assert torch.autograd.gradcheck(loss, values, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "llama"])
def test_fusion_of_lora(family: str) -> None:
    host = classifier(family).double()
    for seed, rank in enumerate((2, 2, 1)):
        inlay.add(host, f"m{seed}", inlay.LoRA(rank=rank, alpha=3, targets=("q", "v")))
        shake(host, f"m{seed}", seed)
    inlay.add_fusion(host, "f", ["m0", "m1", "m2"])
    for part in host.inlays["f"].parts.values():
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    inlay.activate(host, "f")
    place = next(p for p in host.inlays.anatomy.of_kind("v") if p.layer == 1)
    step, caught = fused_steps(host)[place.id], spy_on(host, place.id)  # the module may have the step of q as well
    logits(host)
    h, x = caught["h"], caught["seen"].args[0]
    with torch.no_grad():
        zs = [host.inlays[f"m{n}"].part(place)(x) for n in range(3)]
        wanted, _ = slow_fusion(host.inlays["f"].part(place), x, zs)
        full = torch.zeros_like(h)
        full[..., part_rows(place, h.shape[-1])] = wanted
        torch.testing.assert_close(step(h, caught["seen"]), h + full, atol=1e-10, rtol=1e-8)
    inlay.train(host, "f")
    host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    assert all(p.grad is not None for p in host.inlays["f"].parameters())


def test_bad_input() -> None:
    host = classifier()
    for method, message in [
        (lambda: inlay.LoRA(targets=("query",)), "no projection 'query'"),
        (lambda: inlay.LoRA(targets=()), "at least one"),
        (lambda: inlay.LoRA(rank=17), "a rank of 17 is above"),
        (lambda: inlay.LoRA(rank=0), "rank"),
        (lambda: inlay.LoRA(leave_out=(9,)), "no such layer"),
        (lambda: inlay.LoRA(ranks={"q": 2}), "no place 'q'.*by place: encoder.0.q"),
        (lambda: inlay.LoRA(alphas={"encoder.7.q": 2}), "no place 'encoder.7.q'"),
        (lambda: inlay.LoRA(ranks={"encoder.0.k": 2}), "'encoder.0.k', which is none of the targets q, v"),
        (lambda: inlay.LoRA(alphas={"encoder.0.o": 2}), "'encoder.0.o', which is none of the targets q, v"),
        (lambda: inlay.LoRA(ranks={"encoder.0.q": 0}), "ranks.encoder.0.q"),
        (lambda: inlay.LoRA(alphas={"encoder.0.q": -1}), "alphas.encoder.0.q"),
    ]:
        with pytest.raises(inlay.InlayError, match=message):
            inlay.add(host, "a", method())
    inlay.add(host, "p", inlay.Pfeiffer(size=2))
    inlay.add(host, "l", inlay.LoRA(rank=2))
    with pytest.raises(inlay.SetupError, match="only LoRA can be folded"):
        inlay.fold(host, "p")
    inlay.add(host, "mix", inlay.Mixture(inlay.LoRA(rank=2)))
    with pytest.raises(inlay.SetupError, match="'mix' is a mixture. Merge it first"):
        inlay.fold(host, "mix")
    with pytest.raises(inlay.SetupError, match="nothing is folded"):
        inlay.unfold(host)
    inlay.fold(host, "l")
    for act in (lambda: inlay.activate(host, "p"), lambda: inlay.fold(host, "l"), lambda: inlay.strip(host)):
        with pytest.raises(inlay.SetupError, match="unfold"):
            act()
    inlay.unfold(host)
    inlay.strip(host)


def test_a_tied_weight_is_not_folded() -> None:
    from tests.hosts import shaken

    config = hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, pad_token_id=0, bos_token_id=2, eos_token_id=1
    )
    host = shaken(hf.GPT2LMHeadModel(config))
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q", "linear.lm_head")))
    before = {k: v.clone() for k, v in host.state_dict().items()}
    with pytest.raises(inlay.SetupError, match="tied, transformer.wte and lm_head share it"):
        inlay.fold(host, "a")
    assert all(torch.equal(host.state_dict()[k], v) for k, v in before.items())


def test_the_words_of_peft_are_answered_with_ours() -> None:
    with pytest.raises(inlay.ConfigError) as told:
        inlay.LoRA(r=8, lora_alpha=16, target_modules=["q_proj"], lora_dropout=0.1)
    assert [line.rpartition("Did you mean ")[2] for line in str(told.value).splitlines()] == [
        "'rank'?", "'alpha'?", "'targets'?", "'dropout'?",
    ]  # fmt: skip
    with pytest.raises(inlay.ConfigError, match=r"no projection 'v_proj'. Did you mean 'v'\?"):
        inlay.add(classifier(), "a", inlay.LoRA(targets=("v_proj",)))
