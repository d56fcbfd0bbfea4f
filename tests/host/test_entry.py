"""The host as a whole: where a forward begins, also in hosts that call the decoder inside their base model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers as hf

import inlay
from tests.hosts import CONFIGS, batch, classifier, logits, shake, shaken, without_dropout
from tests.methods.ways import CAUSAL

PAST_THE_BASE = ["opt", "opt-post-ln", "bart"]


def decoder(family: str) -> hf.PreTrainedModel:
    """A tiny decoder that writes; of BART its decoder alone."""
    return shaken(hf.AutoModelForCausalLM.from_config(CONFIGS[family]()))


def own_losses(host: hf.PreTrainedModel, passes: int) -> list[float]:
    inputs = batch()
    return [float(host(**inputs, labels=inputs["input_ids"]).loss.detach()) for _ in range(passes)]


def still(host: hf.PreTrainedModel) -> None:
    """Training without chance, but for what inlays draw."""
    without_dropout(host)
    for module in host.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_prompt_of_a_host_that_writes_is_the_same_embeddings_concatenated(family: str) -> None:
    host = decoder(family)
    inlay.add(host, "a", inlay.Prompt(length=4))
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    inputs = batch()
    ours = host(**inputs).logits
    ours.sum().backward()
    (part,) = host.inlays["a"].parts.values()
    assert part.table.weight.grad is not None
    inlay.activate(host, None)
    ahead, own = part.table.weight.detach().expand(3, -1, -1), host.get_input_embeddings()(inputs["input_ids"])
    mask = torch.cat([torch.ones(3, 4, dtype=torch.long), inputs["attention_mask"]], 1)
    theirs = logits(host, {"inputs_embeds": torch.cat([ahead, own], 1), "attention_mask": mask})
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real].detach(), theirs[:, 4:][real], atol=2e-6, rtol=1e-5)


def test_a_prefix_moves_the_positions_of_opt_that_writes() -> None:
    host = decoder("opt")
    for name, moves in (("stays", False), ("moves", True)):
        inlay.add(host, name, inlay.Prefix(length=3, shift=moves))
        shake(host, name)
    inputs = batch()
    inlay.activate(host, "moves")
    moved = logits(host, inputs)
    inlay.activate(host, "stays")
    positions = inputs["attention_mask"].cumsum(1) * inputs["attention_mask"] - 1 + 3
    torch.testing.assert_close(logits(host, inputs | {"position_ids": positions}), moved)
    assert not torch.allclose(logits(host, inputs), moved, atol=1e-3)


def test_a_host_that_is_told_no_positions_takes_nothing_that_moves_them() -> None:
    host = decoder("bart")
    with pytest.raises(inlay.AnatomyError, match="not told where they stand"):
        inlay.add(host, "a", inlay.Prompt(length=3))
    with pytest.raises(inlay.ConfigError, match="told its tokens' positions"):
        inlay.add(host, "a", inlay.Prefix(length=3, shift=True))
    inlay.add(host, "a", inlay.Prefix(length=3))


@pytest.mark.parametrize("family", [*PAST_THE_BASE, "gpt2"])
def test_chance_is_drawn_in_every_training_step(family: str) -> None:
    host = decoder(family)
    inlay.add(host, "mixed", inlay.Mixture(inlay.Houlsby(size=4), modules=4))
    inlay.add(host, "dropped", inlay.Houlsby(size=4, drop_first=2))
    for seed, name in enumerate("abc"):
        inlay.add(host, name, inlay.Houlsby(size=4))
        shake(host, name, seed)
    inlay.add_fusion(host, "some", ["a", "b", "c"], subset=1)
    for name in ("mixed", "dropped"):
        shake(host, name)
    still(host)
    inlay.train(host, "mixed")
    torch.manual_seed(0)
    inputs = batch()
    found = [inlay.mixture_loss(host, inputs | {"labels": inputs["input_ids"]}).consistency for _ in range(4)]
    assert any(consistency > 0 for consistency in found)
    for name in ("dropped", "some"):
        inlay.train(host, name)
        assert len(set(own_losses(host, 20))) == 3


@pytest.mark.parametrize("family", [*PAST_THE_BASE, "gpt2"])
def test_what_was_caught_goes_when_the_host_fails(family: str) -> None:
    host = decoder(family)
    inlay.add(host, "a", inlay.Parallel(size=4))
    inlay.activate(host, "a")

    def fail(*_: object) -> None:
        raise RuntimeError("on the way")

    end = host.get_submodule(host.inlays.anatomy.places["decoder.1.ffn"].module)
    with end.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="on the way"):
        logits(host)
    assert all(branch.residual.value is None for branch in host.inlays.branches.values())


def replica_of(host: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """What nn.DataParallel makes of a host for each device; torch's own way needs GPUs."""
    copies = {module: module._replicate_for_data_parallel() for module in host.modules()}
    for module, twin in copies.items():
        twin._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else parameter.detach().clone())
    return copies[host]


@pytest.mark.parametrize("family", ["bert", "t5", "opt"])
def test_replicas_of_data_parallel_are_refused(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Houlsby(size=4))
    bare = logits(host)
    inlay.activate(host, inlay.Rows("a", None, "a"))
    replica = replica_of(host)
    for model in (replica, replica.base_model):
        with pytest.raises(inlay.SetupError, match="torchrun"):
            model(**batch(rows=2))
    inlay.activate(host, None)
    assert torch.equal(logits(replica), bare)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize(
    "method", [inlay.Pfeiffer(size=2), inlay.Prefix(length=2), inlay.Prompt(length=2), inlay.SAID(d=4)]
)
def test_a_pass_of_another_setup_lets_go_of_what_the_last_one_left(family: str, method: inlay.Method) -> None:
    """SAID leaves weights for the whole host, and a prompt on a decoder its keys and values with their graph."""
    host = classifier(family)
    inlay.add(host, "a", method)
    inlay.train(host, "a")
    host(**batch())
    plan = weakref.ref(host.inlays.acting.plan)
    inlay.activate(host, None)
    host(**batch())
    gc.collect()
    assert plan() is None
