"""What LoRA gained so that peft's checkpoints can be expressed: whole fused modules, trained biases, output layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import inlay
from tests.checkpoints.foreign.golden import GOLDEN, host_of, logits_of
from tests.hosts import CONFIGS, batch, classifier, logits, shake, shaken


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


def test_biases_that_the_host_has_not(tmp_path: Path) -> None:
    host, other = classifier("t5"), classifier("t5")
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="all"))
    biases = {key: t for key, t in host.inlays["a"].tensors().items() if key.startswith("bias.")}
    has = {key for key in biases if getattr(host.get_submodule(_module(host, key)), "bias", None) is not None}
    assert 0 < len(has) < len(biases)
    for key in has:
        biases[key].fill_(0.5)
    inlay.activate(other, inlay.load(other, inlay.export(host, "a", tmp_path / "a", "peft")))
    inlay.activate(host, "a")
    torch.testing.assert_close(logits(other), logits(host), atol=1e-5, rtol=0)
    biases[min(biases.keys() - has)].fill_(0.5)
    with pytest.raises(inlay.ConfigError, match="a bias, which the host does not have"):
        inlay.export(host, "a", tmp_path / "b", "peft")


def _module(host: torch.nn.Module, key: str) -> str:
    return host.inlays.anatomy.places[key.removesuffix(".bias")].module


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_hosts_weights_beside_a_lora_of_the_output_layer(family: str, tmp_path: Path) -> None:
    """peft writes the output layer with its LoRA, and the embeddings; if they are the host's, nothing is lost."""
    host = shaken(AutoModelForCausalLM.from_config(CONFIGS[family]()))
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("o", "linear.lm_head")))
    shake(host, "a")
    folder = inlay.export(host, "a", tmp_path / "a", "peft")
    tensors = load_file(folder / "adapter_model.safetensors")
    output = host.lm_head.weight.detach().clone()
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": output}, folder / "adapter_model.safetensors")
    assert inlay.load(host, folder, name="b") == "b"
    save_file(
        tensors | {"base_model.model.lm_head.base_layer.weight": output + 1}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(inlay.CheckpointError, match=r"lm_head.base_layer.weight is not expected"):
        inlay.load(host, folder, name="c")


@pytest.mark.parametrize("case", ["peft_head_all_linear", "peft_head_bias_all"])
def test_a_head_read_from_peft_is_saved_and_written_again(case: str, tmp_path: Path) -> None:
    host = host_of("bert")
    name = inlay.load(host, GOLDEN / "bert" / case)
    inlay.activate(host, name)
    before = logits_of(host, "bert")
    for folder in (inlay.save(host, name, tmp_path / "ours"), inlay.export(host, name, tmp_path / "theirs", "peft")):
        other = host_of("bert")
        inlay.activate(other, inlay.load(other, folder, name="again"))
        torch.testing.assert_close(logits_of(other, "bert"), before, atol=1e-5, rtol=0)


def test_a_buffer_of_the_host_beside_trained_biases(tmp_path: Path) -> None:
    """With bias="all" peft writes all that is called a bias, even BART's buffer, which nobody trains."""
    host = host_of("bart")
    inlay.add(host, "a", inlay.LoRA(rank=2, bias="all"))
    shake(host, "a")
    folder = inlay.export(host, "a", tmp_path / "a", "peft")
    tensors, key = load_file(folder / "adapter_model.safetensors"), "base_model.model.final_logits_bias"
    save_file(tensors | {key: host.final_logits_bias.clone()}, folder / "adapter_model.safetensors")
    assert inlay.load(host, folder, name="b") == "b"
    save_file(tensors | {key: host.final_logits_bias + 1}, folder / "adapter_model.safetensors")
    with pytest.raises(inlay.CheckpointError, match=r"final_logits_bias is not expected"):
        inlay.load(host, folder, name="c")
