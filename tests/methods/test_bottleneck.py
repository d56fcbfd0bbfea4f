from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

import inlay
from inlay.methods.bottleneck import Adapter
from tests.hosts import batch, classifier, logits, shake

METHODS = [inlay.Houlsby, inlay.Pfeiffer, inlay.Parallel, inlay.Bapna]


def bert_base() -> hf.PreTrainedModel:
    """BERT-base without weights."""
    with torch.device("meta"):
        return hf.BertModel(hf.BertConfig())


@pytest.mark.parametrize(("method", "published"), [
    (inlay.Pfeiffer(), 894_528),
    (inlay.Houlsby(), 1_789_056),
    (inlay.Parallel(), 7_091_712),
])  # fmt: skip
def test_counts_on_bert_base_equal_the_published_ones(method: inlay.Method, published: int) -> None:
    host = bert_base()
    inlay.add(host, "a", method)
    assert all(p.is_meta for p in host.inlays.parameters())
    inlay.train(host, "a")
    assert sum(p.numel() for p in host.parameters() if p.requires_grad) == published


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.kind)
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
def test_gradients_against_finite_differences(method: type, activation: str) -> None:
    host = classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    inlay.add(host, "a", method(size=2, activation=activation, leave_out=(0,)))
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    names, values = zip(*host.inlays["a"].named_parameters(), strict=True)

    def loss(*parameters: torch.Tensor) -> torch.Tensor:
        given = {f"inlays.all.a.{name}": value for name, value in zip(names, parameters, strict=True)}
        return torch.func.functional_call(host, given, kwargs=batch(2, 4)).logits

    assert torch.autograd.gradcheck(loss, values, eps=1e-6, atol=1e-7)


def test_adapter_by_hand() -> None:
    down, up = nn.Linear(6, 2), nn.Linear(2, 6)
    x = torch.randn(3, 5, 6)
    wanted = 4.0 * (torch.relu(x @ down.weight.T + down.bias) @ up.weight.T + up.bias)
    torch.testing.assert_close(Adapter(down, up, "relu", scale=4.0)(x), wanted)


@pytest.mark.parametrize(("given", "sizes"), [
    ({"reduction": 4}, [4, 4]),
    ({"reduction": 1000}, [1, 1]),
    ({"size": 3}, [3, 3]),
    ({"reduction": {"1": 2, "default": 4}}, [4, 8]),
    ({"reduction": {1: 2, "default": 4}}, [4, 8]),
    ({"size": {"encoder.0": 5, "default": 2}}, [5, 2]),
    ({"size": 3, "leave_out": ("encoder.0",)}, [3]),
])  # fmt: skip
def test_bottleneck_sizes(given: dict, sizes: list[int]) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(**given))
    assert [part.down.out_features for part in host.inlays["a"].parts.values()] == sizes


def test_leaving_out_a_layer_of_one_stack_only() -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.Pfeiffer(size=2, leave_out=("decoder.1",)))
    inlay.add(host, "b", inlay.Pfeiffer(size=2, leave_out=(1,)))
    assert host.inlays["a"].place_ids() == ["encoder.0.ffn", "encoder.1.ffn", "decoder.0.ffn"]
    assert host.inlays["b"].place_ids() == ["encoder.0.ffn", "decoder.0.ffn"]


def test_random_adapterdrop_draws_in_training_only() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4, drop_first=2))
    shake(host, "a")
    inlay.train(host, "a")
    for module in host.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    host.config.attention_probs_dropout_prob = 0.0
    drawn = {}
    for _ in range(60):
        result = logits(host)
        drawn.setdefault(host.inlays["a"].draw.left_out, []).append(result)
    assert set(drawn) == {0, 1, 2}
    assert all(torch.equal(results[0], r) for results in drawn.values() for r in results)
    assert not torch.allclose(drawn[0][0], drawn[1][0], atol=1e-4)
    host.eval()
    whole = logits(host)
    torch.testing.assert_close(whole, drawn[0][0])
    inlay.activate(host, None)
    torch.testing.assert_close(logits(host), drawn[2][0])


def test_the_same_seed_draws_the_same() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4, drop_first=2))
    inlay.train(host, "a")
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append([(logits(host), host.inlays["a"].draw.left_out)[1] for _ in range(12)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_dropout_and_scale() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Parallel(size=4, scale="learned"))
    inlay.add(host, "b", inlay.Parallel(size=4, scale=2.5, dropout=0.5))
    shake(host, "a")
    for key, part in host.inlays["a"].parts.items():
        part.scale.data.fill_(2.5)
        host.inlays["b"].parts[key].load_state_dict({k: v for k, v in part.state_dict().items() if k != "scale"})
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.activate(host, "b")
    torch.testing.assert_close(logits(host), wanted)
    host.inlays["b"].train()
    assert not torch.allclose(logits(host), wanted, atol=1e-3)


def test_acting_before_the_dropout() -> None:
    """T5, in training: h + dropout(A(y) + y), so that dropout of one removes the inlay too."""
    host = classifier("t5")
    inlay.add(host, "after", inlay.Houlsby(size=4))
    inlay.add(host, "before", inlay.Houlsby(size=4, before_dropout=True))
    for name in ("after", "before"):
        shake(host, name)
    results = {}
    for name in (None, "after", "before"):
        inlay.activate(host, name)
        results[name] = logits(host)
    torch.testing.assert_close(results["before"], results["after"], atol=1e-5, rtol=1e-4)  # no dropout in evaluation
    for block in host.transformer.encoder.block:
        for layer in block.layer:
            layer.dropout.p = 1.0
            layer.dropout.train()
    for block in host.transformer.decoder.block:
        for layer in (block.layer[0], block.layer[2]):
            layer.dropout.p = 1.0
            layer.dropout.train()
    for name in (None, "after", "before"):
        inlay.activate(host, name)
        results[name] = logits(host)
    assert torch.equal(results["before"], results[None])
    assert not torch.allclose(results["after"], results[None], atol=1e-3)


def test_each_site_uses_its_own_norm() -> None:
    """Pfeiffer on BERT by hand: y = LN(x + A(LN(x))) with the LayerNorm of that very layer."""
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    shake(host, "a")
    inlay.activate(host, "a")
    caught = {}
    for index, layer in enumerate(host.bert.encoder.layer):
        layer.output.LayerNorm.register_forward_hook(lambda m, a, y, i=index: caught.update({i: (a[0], y)}))
        layer.output.dense.register_forward_hook(lambda m, a, y, i=index: caught.update({f"h{i}": y}))
        layer.output.register_forward_pre_hook(lambda m, a, i=index: caught.update({f"r{i}": a[1]}))
    logits(host)
    for index, layer in enumerate(host.bert.encoder.layer):
        norm = layer.output.LayerNorm
        adapter = host.inlays["a"].parts[f"encoder:{index}:ffn"]
        with torch.no_grad():
            x = caught[f"h{index}"] + caught[f"r{index}"]
            normed = nn.functional.layer_norm(x, (16,), norm.weight, norm.bias, norm.eps)
            x = x + adapter(normed)
            wanted = nn.functional.layer_norm(x, (16,), norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(caught[index][1], wanted)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: inlay.Pfeiffer(activation="rellu"), r"unknown activation. Did you mean 'relu'\?, got 'rellu'"),
    (lambda: inlay.Pfeiffer(reducton=2), r"no setting 'reducton'. Did you mean 'reduction'\?"),
    (lambda: inlay.Pfeiffer(size=0), "size must be above 0"),
    (lambda: inlay.Pfeiffer(reduction=-1), "reduction must be above 0"),
    (lambda: inlay.Pfeiffer(sites=()), "at least one"),
    (lambda: inlay.Pfeiffer(reduction={1: 2}), "needs a 'default'"),
    (lambda: inlay.Pfeiffer(dropout=1.5), "dropout"),
])  # fmt: skip
def test_bad_settings_are_refused_in_words(make, message: str) -> None:
    with pytest.raises(inlay.ConfigError, match=message):
        make()


@pytest.mark.parametrize(("method", "message"), [
    (inlay.Pfeiffer(size=17), "17 is wider than the host's hidden size 16"),
    (inlay.Pfeiffer(reduction=0.5), "32 is wider than the host's hidden size 16"),
    (inlay.Pfeiffer(leave_out=(2,)), "no such layer: 2. This host has encoder 0 to 1"),
    (inlay.Pfeiffer(leave_out=("decoder.0",)), "no such layer: 'decoder.0'"),
    (inlay.Pfeiffer(size={7: 2, "default": 3}), "no such layer: 7"),
    (inlay.Pfeiffer(size=2, drop_first=3), "drop_first is 3, but the host has 2 layers"),
    (inlay.Pfeiffer(size=2, leave_out=(0, 1)), "has no place"),
])  # fmt: skip
def test_what_does_not_fit_the_host_changes_nothing(method: inlay.Method, message: str) -> None:
    host = classifier()
    with pytest.raises(inlay.InlayError, match=message):
        inlay.add(host, "a", method)
    assert not hasattr(host, "inlays")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in host.modules())
