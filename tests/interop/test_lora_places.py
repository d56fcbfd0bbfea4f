"""What LoRA gained so that peft's checkpoints can be expressed: whole fused modules, trained biases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import inlay
from tests.hosts import batch, classifier, logits, shake


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "modernbert"])
def test_a_whole_fused_module_is_its_parts_together(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "parts", inlay.LoRA(rank=2, targets=("q", "k", "v")))
    inlay.add(host, "whole", inlay.LoRA(rank=2, targets=("qkv",)))
    shake(host, "parts")
    places = host.inlays.anatomy.places
    shake(host, "whole", std=0.0)
    for key, part in host.inlays["whole"].parts.items():
        whole = places[key.replace(":", ".")]
        together = [p for p in places.values() if p.module == whole.module and p.kind in ("q", "k", "v")]
        rows = inlay.methods.lora.part_rows
        for place in together:
            mine = host.inlays["parts"].part(place)
            mine.down.weight.data.copy_(host.inlays["parts"].part(together[0]).down.weight)
            part.up.weight.data[rows(place, part.up.weight.shape[0])] = mine.up.weight.data
        part.down.weight.data.copy_(host.inlays["parts"].part(together[0]).down.weight)
    with inlay.activated(host, "parts"):
        expected = logits(host)
    inlay.activate(host, "whole")
    torch.testing.assert_close(logits(host), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("bias", "more"), [("none", 0), ("targets", 2 * 2 * 16), ("all", None)])
def test_trained_biases(bias: str, more: int | None, tmp_path: Path) -> None:
    host = classifier("bert")
    bare = logits(host)
    inlay.add(host, "a", inlay.LoRA(rank=2, bias=bias))
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare), "a fresh bias is no change"
    biases = sum(p.numel() for name, p in host.named_parameters() if name.endswith(".bias") and "inlays" not in name)
    held = sum(t.numel() for key, t in host.inlays["a"].tensors().items() if key.startswith("bias."))
    assert held == (biases if more is None else more)
    shake(host, "a")
    changed = logits(host)
    inlay.fold(host, "a")
    torch.testing.assert_close(logits(host), changed, atol=1e-5, rtol=0)
    inlay.unfold(host)
    inlay.save(host, "a", tmp_path / "a")
    other = classifier("bert")
    inlay.activate(other, inlay.load(other, tmp_path / "a"))
    assert torch.equal(logits(other), changed)


def test_a_mixture_shares_its_biases() -> None:
    host = classifier("bert")
    inlay.add(host, "a", inlay.Mixture(inlay.LoRA(rank=2, bias="targets")))
    inlay.train(host, "a")
    loss = inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 0])})
    loss.loss.backward()
    assert host.inlays["a"].parts["bias:encoder:layer:0:attention:self:query"].bias.grad is not None
    inlay.merge(host, "a")
    assert isinstance(host.inlays["a"].method, inlay.LoRA)
