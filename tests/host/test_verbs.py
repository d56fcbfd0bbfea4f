from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers as hf
from torch import nn

import inlay
from tests.hosts import GROUPED, SMALL, batch, classifier, logits, shake


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "../up", "a b", "a" * 65, "é", "a\n", None, 3])
def test_names_that_cannot_be(name) -> None:
    host = classifier()
    with pytest.raises(inlay.NamingError, match="cannot be a name"):
        inlay.add(host, name, inlay.Pfeiffer(size=2))
    assert not hasattr(host, "inlays")


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "x" * 64, "train", "training", "keys", "forward", "half"])
def test_names_that_can_be(name: str) -> None:
    host = classifier()
    inlay.add(host, name, inlay.Pfeiffer(size=2))
    inlay.activate(host, name)
    assert [row.name for row in inlay.summary(host).rows] == [name]


def test_taken_and_unknown_names() -> None:
    host = classifier()
    with pytest.raises(inlay.NamingError, match="no inlays yet"):
        inlay.activate(host, "rte")
    inlay.add(host, "rte", inlay.Pfeiffer(size=2))
    with pytest.raises(inlay.NamingError, match="'rte' is taken"):
        inlay.add(host, "rte", inlay.Houlsby(size=2))
    for verb in (inlay.activate, inlay.train, inlay.remove, inlay.freeze):
        with pytest.raises(inlay.NamingError, match="no inlay named 'rtee'.* Did you mean 'rte'"):
            verb(host, "rtee")
    assert inlay.active(host) is None


def test_train_and_freeze() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    inlay.add(host, "b", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3))
    inlay.train(host, inlay.Stack("a", "b"), only=["b"])
    assert host.training
    assert inlay.active(host) == inlay.Stack("a", "b")
    learning = {name.split(".")[2] for name, p in host.named_parameters() if p.requires_grad}
    assert learning == {"b"}
    inlay.train(host, "a")
    assert {name.split(".")[2] for name, p in host.named_parameters() if p.requires_grad} == {"a"}
    inlay.freeze(host, "a")
    assert not any(p.requires_grad for p in host.parameters())
    with pytest.raises(inlay.SetupError, match="nothing to train"):
        inlay.train(host, None)
    with pytest.raises(inlay.SetupError, match="'b' cannot train"):
        inlay.train(host, "a", only=["b"])


def test_remove() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    inlay.add(host, "b", inlay.Houlsby(size=2))
    shake(host, "a")
    inlay.activate(host, "a")
    with pytest.raises(inlay.SetupError, match="'a' is active"):
        inlay.remove(host, "a")
    wanted = logits(host)
    inlay.remove(host, "b")
    assert torch.equal(logits(host), wanted)
    assert set(host.inlays.sites) == {f"at:bert:encoder:layer:{i}:output:dropout" for i in range(2)}
    inlay.add(host, "b", inlay.Houlsby(size=2))
    assert torch.equal(logits(host), wanted)


def test_summary() -> None:
    host = classifier()
    size = sum(p.numel() for p in host.parameters())
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    inlay.add(host, "b", inlay.Houlsby(size=2))
    inlay.train(host, "b")
    a, b = inlay.summary(host).rows
    assert (a.method, a.parameters, a.active) == ("pfeiffer", 2 * (2 * 16 * 2 + 16 + 2), False)
    assert (b.method, b.parameters, b.active, b.trainable) == ("houlsby", 2 * a.parameters, True, True)
    assert a.percent == pytest.approx(100 * a.parameters / size)
    text = str(inlay.summary(host))
    assert f"{size:,}" in text
    assert text.splitlines()[-1].split() == [
        "b",
        "houlsby",
        f"{b.parameters:,}",
        f"{b.percent:.3f}",
        "active",
        "trainable",
    ]


def test_what_is_not_a_host_or_a_method() -> None:
    with pytest.raises(inlay.SetupError, match="a host is a transformers model, got Linear"):
        inlay.add(torch.nn.Linear(2, 2), "a", inlay.Pfeiffer())
    with pytest.raises(inlay.SetupError, match="a method is an object such as"):
        inlay.add(classifier(), "a", "pfeiffer")


def test_one_set_of_inlays_per_host() -> None:
    """A model and the base model inside it share their modules, and cannot both be hosts."""
    host = classifier()
    for first, second in ((host.bert, host), (host, host.bert)):
        inlay.add(first, "a", inlay.Pfeiffer(size=2))
        with pytest.raises(inlay.SetupError, match=f"this {type(second).__name__} already has inlays"):
            inlay.add(second, "b", inlay.Pfeiffer(size=2))
        inlay.strip(first)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in host.modules())


def test_models_made_of_models_name_the_hosts_inside() -> None:
    parts = [hf.BertConfig(**SMALL), hf.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)]
    both = hf.EncoderDecoderModel(encoder=hf.BertModel(parts[0]), decoder=hf.BertLMHeadModel(parts[1]))
    with pytest.raises(inlay.AnatomyError, match=r"two models in one.*inlay\.add\(host\.encoder, …\)"):
        inlay.add(both, "a", inlay.Pfeiffer(size=2))
    inlay.add(both.encoder, "a", inlay.Pfeiffer(size=2))
    inlay.add(both.decoder, "a", inlay.Pfeiffer(size=2))
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.Gemma3Config(text_config=dict(GROUPED), vision_config=vision | {"image_size": 8, "patch_size": 4})
    seeing = hf.Gemma3ForConditionalGeneration(config)
    with pytest.raises(inlay.AnatomyError, match=r"may be hosts themselves: .*model\.language_model"):
        inlay.add(seeing, "a", inlay.Pfeiffer(size=2))
    inlay.add(seeing.model.language_model, "a", inlay.Pfeiffer(size=2))


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_a_forward_that_fails_keeps_nothing(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Parallel(size=2, sites=("attention", "ffn")), head=inlay.Head(labels=2, pooling="mean"))
    inlay.activate(host, "a")
    wanted = logits(host)
    entry, sites, branches = host.inlays.entry, host.inlays.sites.values(), host.inlays.branches.values()

    def fail(*call: object) -> None:
        raise RuntimeError("boom")

    for site in sites:
        hook = host.get_submodule(site.path).register_forward_hook(fail, prepend=True)
        with pytest.raises(RuntimeError, match="boom"):
            host(**batch())
        assert all(slot.value is None for slot in (entry.hidden, entry.mask, *(b.residual for b in branches)))
        hook.remove()
    assert torch.equal(logits(host), wanted)


@pytest.mark.parametrize("kind", ["pfeiffer", "lora", "prefix", "said", "fusion"])
def test_what_is_taken_off_is_let_go_at_once(kind: str) -> None:
    """Not only when Python next looks for cycles: until then the memory of a GPU would be taken."""
    host = classifier()
    for name in ("a", "b"):
        inlay.add(host, name, inlay.Pfeiffer(size=2))
    if kind == "fusion":
        inlay.add_fusion(host, "x", ["a", "b"])
    else:
        inlay.add(host, "x", inlay.SAID(d=4) if kind == "said" else inlay.METHODS[kind]())
    gc.collect()
    gc.disable()
    try:
        inlay.activate(host, "x")
        logits(host)
        inlay.activate(host, None)
        taken = weakref.ref(host.inlays["x"])
        inlay.remove(host, "x")
        assert taken() is None
        inlay.strip(host)
        stripped = weakref.ref(host)
        del host
        assert stripped() is None
    finally:
        gc.enable()


def test_what_comes_in_inference_mode_can_train(tmp_path) -> None:
    host = classifier()
    with torch.inference_mode():
        inlay.add(host, "a", inlay.Pfeiffer(size=2))
        inlay.save(host, "a", tmp_path / "a")
        inlay.load(host, tmp_path / "a", name="b")
        inlay.add_fusion(host, "f", ["a", "b"])
        inlay.activate(host, "f")
        logits(host)
    for name in "abf":
        inlay.train(host, name)
        host(**batch()).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in host.inlays[name].parameters())


@pytest.mark.parametrize("method", [inlay.Pfeiffer(size=2), inlay.Prefix(length=2)])
def test_activating_costs_the_same_however_many_inlays_there_are(method, monkeypatch: pytest.MonkeyPatch) -> None:
    host = classifier()
    for name in ("a", "b"):
        inlay.add(host, name, method)
    others = set(host.inlays["b"].modules())
    walked: list[nn.Module] = []
    original = nn.Module.named_modules

    def named_modules(module: nn.Module, *args: object, **kwargs: object):
        walked.append(module)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    for setup in ("a", None):
        inlay.activate(host, setup)
    assert not others.intersection(walked)


def test_own_norms_act_only_while_active() -> None:
    host = classifier()
    bare = logits(host)
    inlay.add(host, "a", inlay.Pfeiffer(size=2, init="identity"), norms=True)
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)
    norms = [key for key in host.inlays["a"].parts if key.startswith("norm")]
    assert len(norms) == 5  # embeddings, and two in each of two layers
    for key in norms:
        host.inlays["a"].parts[key].weight.data.mul_(1.5)
    assert not torch.allclose(logits(host), bare, atol=1e-4)
    inlay.activate(host, None)
    assert torch.equal(logits(host), bare)


def test_albert_is_refused_with_the_reason() -> None:
    config = hf.AlbertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=50,
        embedding_size=8,
    )
    with pytest.raises(inlay.AnatomyError, match="one layer's weights several times"):
        inlay.add(hf.AlbertModel(config), "a", inlay.Pfeiffer(size=2))


def test_the_public_names_are_there() -> None:
    for name in inlay.__all__:
        assert getattr(inlay, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'adapters'"):
        _ = inlay.adapters


def test_leaving_out_layers_of_a_trained_inlay(tmp_path) -> None:
    host = classifier()
    inlay.add(host, "whole", inlay.Pfeiffer(size=4))
    inlay.add(host, "upper", inlay.Pfeiffer(size=4, leave_out=(0,)))
    shake(host, "whole")
    host.inlays["upper"].parts["encoder:1:ffn"].load_state_dict(
        host.inlays["whole"].parts["encoder:1:ffn"].state_dict()
    )
    inlay.activate(host, "upper")
    wanted = logits(host)
    inlay.activate(host, "whole")
    assert not torch.equal(logits(host), wanted)
    inlay.leave_out(host, "whole", [0])
    assert torch.equal(logits(host), wanted)
    assert host.inlays["whole"].method == host.inlays["upper"].method
    inlay.save(host, "whole", tmp_path / "small")
    other = classifier()
    inlay.load(other, tmp_path / "small")
    inlay.activate(other, "whole")
    assert torch.equal(logits(other), wanted)
    with pytest.raises(inlay.SetupError, match="would have no module left"):
        inlay.leave_out(host, "whole", [1])
    with pytest.raises(inlay.AnatomyError, match="no such layer: 7"):
        inlay.leave_out(host, "whole", [7])
    inlay.add(host, "biases", inlay.BitFit())
    with pytest.raises(inlay.SetupError, match="no layers that could be left out"):
        inlay.leave_out(host, "biases", [0])


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_leaving_out_layers_takes_what_hangs_on_them(family: str, tmp_path) -> None:
    """The biases of LoRA's targets have no layer in their names, but go with them: the folder can be loaded."""
    host = classifier(family)
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="targets"), head=inlay.Head(labels=3), norms=True)
    shake(host, "a")
    before = set(host.inlays["a"].place_ids())
    inlay.leave_out(host, "a", [0])
    gone = before - set(host.inlays["a"].place_ids())
    assert any(place.startswith("bias.") for place in gone)
    assert not any(place.startswith(("norm.", "head.")) for place in gone)
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.save(host, "a", tmp_path / "a")
    other = classifier(family)
    inlay.load(other, tmp_path / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), wanted)
    with pytest.raises(inlay.SetupError, match="would have no module left"):
        inlay.leave_out(host, "a", [1])  # biases alone are no change of LoRA's
    assert torch.equal(logits(host), wanted)
