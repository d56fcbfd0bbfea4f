"""UniPELT: gates over LoRA, prefix and bottleneck."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from tests.hosts import FAMILIES, batch, classifier, logits, shake
from tests.methods import ways
from tests.methods.ways import CAUSAL, REFUSED, writer

ABLE = [family for family in FAMILIES if family not in (*CAUSAL, *REFUSED)]
SMALL = {
    "lora": inlay.LoRA(rank=2, alpha=2.0), "prefix": inlay.Prefix(length=3), "bottleneck": inlay.Pfeiffer(size=4),
}  # fmt: skip
METHOD = inlay.UniPELT(**SMALL)


@pytest.mark.parametrize("family", ABLE)
def test_what_always_holds(family: str, tmp_path: Path) -> None:
    ways.acts_and_comes_off(family, METHOD)
    ways.trains_without_touching_the_host(family, METHOD)
    ways.saves_and_loads(family, inlay.UniPELT(**SMALL, gates="two"), tmp_path)
    ways.deepcopy_is_independent(family, METHOD)
    ways.padded_row_is_the_row_alone(family, METHOD)
    ways.checkpointing_gives_the_same_gradients(family, METHOD)
    ways.rows_are_each_row_alone(family, METHOD, inlay.UniPELT(lora=None, prefix=inlay.Prefix(length=5), gates="two"))


@pytest.mark.parametrize("family", REFUSED)
def test_without_a_prefix_it_acts_where_prefixes_cannot(family: str) -> None:
    with pytest.raises(inlay.AnatomyError, match="attention interface"):
        inlay.add(classifier(family), "a", METHOD)
    method = inlay.UniPELT(**SMALL | {"prefix": None})
    ways.acts_and_comes_off(family, method)
    ways.padded_row_is_the_row_alone(family, method)


def test_open_gates_are_the_parts_in_a_stack() -> None:
    host = classifier()
    inlay.add(host, "u", METHOD)
    shake(host, "u")
    for name, part in (("l", SMALL["lora"]), ("p", SMALL["prefix"]), ("b", SMALL["bottleneck"])):
        inlay.add(host, name, part)
        for key, module in host.inlays[name].parts.items():
            module.load_state_dict(host.inlays["u"].parts[key].part.state_dict())
    for module in host.inlays["u"].parts.values():
        module.gate.linear.weight.data.zero_()
        module.gate.linear.bias.data.fill_(40.0)  # σ = 1
    inlay.activate(host, "u")
    gated = logits(host)
    inlay.activate(host, inlay.Stack("l", "p", "b"))
    torch.testing.assert_close(gated, logits(host), atol=1e-6, rtol=1e-5)
    for key, module in host.inlays["u"].parts.items():
        module.gate.linear.bias.data.fill_(0.0 if "ffn" in key else 40.0)  # σ = ½
    inlay.activate(host, "u")
    half = logits(host)
    for module in host.inlays["b"].parts.values():
        module.up.weight.data.div_(2)
        module.up.bias.data.div_(2)
    inlay.activate(host, inlay.Stack("l", "p", "b"))
    torch.testing.assert_close(half, logits(host), atol=1e-6, rtol=1e-5)


def test_a_gate_by_hand() -> None:
    host = classifier()
    inlay.add(host, "u", inlay.UniPELT(lora=None, prefix=None, bottleneck=inlay.Houlsby(size=4, sites=("ffn",))))
    shake(host, "u")
    inlay.activate(host, "u")
    place = host.inlays.anatomy.places["encoder.0.ffn"]
    caught = {}
    host.get_submodule(place.module).register_forward_hook(lambda m, a, out: caught.update(out=out, h=a[0]))
    inputs = batch()
    logits(host, inputs)
    module = host.inlays["u"].part(place)
    with torch.no_grad():
        each = torch.sigmoid(module.gate.linear(caught["h"]))
        for row in range(3):
            real = int(inputs["attention_mask"][row].sum())
            g = each[row, :real].mean()
            wanted = caught["h"][row] + g * module.part(caught["h"][row])
            torch.testing.assert_close(caught["out"][row], wanted, atol=1e-6, rtol=1e-5)


def test_an_encoder_decoder_is_gated_in_its_encoder_also_when_it_writes() -> None:
    host = writer("t5")
    inlay.add(host, "u", METHOD)
    shake(host, "u")
    assert {place.split(".")[0] for place in host.inlays["u"].place_ids()} == {"encoder"}
    inlay.activate(host, "u")
    inputs = batch()
    texts = [
        host.generate(**inputs, use_cache=c, max_new_tokens=5, min_new_tokens=5, do_sample=False) for c in (True, False)
    ]
    assert torch.equal(*texts)
    for at in range(3):
        real = int(inputs["attention_mask"][at].sum())
        alone = {k: v[at : at + 1, :real] for k, v in inputs.items()}
        alone = host.generate(**alone, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert torch.equal(alone[0], texts[0][at])


@pytest.mark.parametrize("gates", ["one", "two"])
def test_how_many_gates(gates: str) -> None:
    count = inlay.count(hf.BertConfig(), inlay.UniPELT(gates=gates)).trainable
    lora, prefix, bottleneck = 24 * 2 * 8 * 768, 12 * 2 * 10 * 768, 894_528
    per_layer = 3 + (1 if gates == "one" else 2)
    assert count == lora + prefix + bottleneck + 12 * per_layer * 769


def test_the_two_published_variants() -> None:
    """In the paper's figure LoRA changes q and k, behind one gate; in the authors' code q and v, each behind its own."""
    paper, code = inlay.UniPELT(variant="paper"), inlay.UniPELT()
    assert (paper.lora.targets, code.lora.targets) == (("q", "k"), ("q", "v"))
    assert inlay.UniPELT(variant="paper", lora=inlay.LoRA()).lora.targets == ("q", "v")
    counts = [inlay.count(hf.BertConfig(), method).trainable for method in (paper, code)]
    assert counts[1] - counts[0] == 12 * 769  # a gate less in every layer
    host = classifier()
    inlay.add(host, "p", inlay.UniPELT(variant="paper", lora=inlay.LoRA(rank=2), prefix=None, bottleneck=None))
    inlay.add(host, "c", inlay.UniPELT(lora=inlay.LoRA(rank=2), prefix=None, bottleneck=None))
    shake(host, "p")
    for place in ("q", "v"):
        for layer in range(2):
            module = host.inlays["c"].parts[f"encoder:{layer}:{place}"]
            module.part.load_state_dict(host.inlays["p"].parts[f"encoder:{layer}:{place}"].part.state_dict())
            module.gate.load_state_dict(getattr(host.inlays["p"].shared, f"encoder_{layer}").state_dict())
    inlay.activate(host, "p")
    shared = logits(host)
    inlay.activate(host, "c")
    torch.testing.assert_close(shared, logits(host))


def test_the_papers_variant_as_every_method(tmp_path: Path) -> None:
    method = inlay.UniPELT(**SMALL, variant="paper")
    ways.acts_and_comes_off("bert", method)
    ways.trains_without_touching_the_host("bert", method)
    ways.saves_and_loads("bert", method, tmp_path)
    ways.deepcopy_is_independent("bert", method)
    ways.padded_row_is_the_row_alone("bert", method)
    ways.rows_are_each_row_alone("bert", method, METHOD)


def test_padding_may_count() -> None:
    host, inputs = classifier(), batch()
    inlay.add(host, "u", inlay.UniPELT(**SMALL, count_padding=True))
    shake(host, "u")
    inlay.activate(host, "u")
    alone = {key: value[2:, : int(inputs["attention_mask"][2].sum())] for key, value in inputs.items()}
    assert (logits(host, inputs)[2:] - logits(host, alone)).abs().max() > 1e-5
    torch.testing.assert_close(logits(host, inputs)[:1], logits(host, {k: v[:1] for k, v in inputs.items()}))


def test_a_compact_bottleneck_keeps_its_rule_when_a_prefix_is_merged() -> None:
    host = classifier()
    made = {"prefix": inlay.Prefix(length=3, reparametrised=True, hidden=4), "bottleneck": inlay.Compacter(size=4)}
    inlay.add(host, "u", inlay.UniPELT(lora=inlay.LoRA(rank=2), variant="paper", **made), norms=False)
    shake(host, "u")
    inlay.activate(host, "u")
    whole = logits(host)
    inlay.merge(host, "u")
    torch.testing.assert_close(logits(host), whole)
    assert {key.split(".")[1] for key in host.inlays["u"].tensors() if key.startswith("shared.")} == {
        "rule", "encoder_0", "encoder_1",
    }  # fmt: skip


def test_merge_and_bad_settings() -> None:
    host = classifier()
    inlay.add(host, "u", inlay.UniPELT(**SMALL | {"prefix": inlay.Prefix(length=3, reparametrised=True, hidden=4)}))
    shake(host, "u")
    inlay.activate(host, "u")
    whole = logits(host)
    inlay.merge(host, "u")
    torch.testing.assert_close(logits(host), whole)
    with pytest.raises(inlay.ConfigError, match="gates"):
        inlay.UniPELT(gates="three")
    with pytest.raises(inlay.ConfigError, match="at least one"):
        inlay.UniPELT(lora=None, prefix=None, bottleneck=None)
    with pytest.raises(inlay.ConfigError, match="takes Prefix"):
        inlay.UniPELT(prefix=inlay.LoRA())
    with pytest.raises(inlay.AnatomyError, match="a whole text"):
        inlay.add(classifier("gpt2"), "u", METHOD)
