"""Hosts whose branches are not certain still take what needs no branch: LoRA, trained biases, norms, heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

import inlay
from tests.hosts import CAUSAL, SMALL, logits, shake, shaken


def granite() -> torch.nn.Module:
    return shaken(hf.GraniteForCausalLM(hf.GraniteConfig(**CAUSAL, residual_multiplier=0.5)))


def xlnet() -> torch.nn.Module:
    config = hf.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=24, vocab_size=50, pad_token_id=0)
    return shaken(hf.XLNetForSequenceClassification(config))


def deberta() -> torch.nn.Module:
    config = hf.DebertaConfig(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return shaken(hf.DebertaForSequenceClassification(config))


CASES = [
    (granite, inlay.LoRA(rank=2)),
    (granite, inlay.LoRA(rank=2, targets=("q", "k", "v", "o"))),
    (granite, inlay.BitFit()),
    (xlnet, inlay.LoRA(rank=2, targets=("linear",))),
    (xlnet, inlay.BitFit()),
    (deberta, inlay.LoRA(rank=2)),
    (deberta, inlay.LoRA(rank=2, targets=("q", "k", "v"))),
    (deberta, inlay.Pfeiffer(size=2)),
]


@pytest.mark.parametrize(("make", "method"), CASES, ids=lambda x: getattr(x, "__name__", None) or x.kind)
def test_what_needs_no_branch_works(make, method: inlay.Method, tmp_path: Path) -> None:
    host = make()
    bare = logits(host)
    inlay.add(host, "a", method)
    inlay.activate(host, "a")
    if method.kind != "pfeiffer":
        assert torch.equal(logits(host), bare)  # fresh LoRA and biases change nothing
    shake(host, "a")
    changed = logits(host)
    assert not torch.allclose(changed, bare)
    inlay.save(host, "a", tmp_path / "a")
    again = make()
    inlay.load(again, tmp_path / "a")
    inlay.activate(again, "a")
    assert torch.equal(logits(again), changed)
    inlay.strip(host)
    assert torch.equal(logits(host), bare)


def test_lora_in_the_weights_of_granite_is_the_same() -> None:
    host = granite().double()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q", "v")))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.activate(host, None)
    with torch.no_grad():
        for index in range(2):
            attention = host.model.layers[index].self_attn
            for role, linear in (("q", attention.q_proj), ("v", attention.v_proj)):
                place = host.inlays.anatomy.places[
                    f"decoder.{index}.{role}"
                    if f"decoder.{index}.{role}" in host.inlays.anatomy.places
                    else f"encoder.{index}.{role}"
                ]
                linear.weight += host.inlays["a"].part(place).weight()
    torch.testing.assert_close(logits(host), wanted, atol=1e-10, rtol=1e-8)


def test_debertas_q_is_the_query_head_by_head() -> None:
    """The LoRA's change of q, written into the rows of in_proj that make the queries as transformers cuts them."""
    host = deberta().double()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q",)))
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    inlay.activate(host, None)
    with torch.no_grad():
        for index in range(2):
            weight = host.deberta.encoder.layer[index].attention.self.in_proj.weight  # (heads · 3 · size, D)
            change = host.inlays["a"].part(host.inlays.anatomy.places[f"encoder.{index}.q"]).weight()
            weight.view(2, 3, 8, 16)[:, 0] += change.view(2, 8, 16)
    torch.testing.assert_close(logits(host), wanted, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("make", [granite, xlnet])
def test_bottlenecks_are_refused_with_the_reason(make) -> None:
    host = make()
    before = list(host.state_dict())
    with pytest.raises(inlay.AnatomyError, match="probing it was not certain"):
        inlay.add(host, "a", inlay.Pfeiffer(size=2))
    assert list(host.state_dict()) == before
    with pytest.raises(inlay.ConfigError, match="no projection"):
        inlay.add(xlnet(), "a", inlay.LoRA(rank=2, targets=("q",)))
