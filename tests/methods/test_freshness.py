"""A fusion evaluates with its members as they are now, whatever changed them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import inlay
from tests.hosts import batch, classifier, logits, shake
from tests.texts import Texts


def trainable_host() -> nn.Module:
    host = classifier()
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.Pfeiffer(size=4), head=inlay.Head(labels=3))
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"])
    return host


def fresh_logits(host: nn.Module, setup: inlay.Setup) -> torch.Tensor:
    """The same by steps that were never used before."""
    inlay.activate(host, None)
    inlay.activate(host, setup)
    return logits(host)


@pytest.mark.parametrize("fused", [True, False])
def test_a_member_that_trains_with_its_fusion(fused: bool) -> None:
    """Evaluations between training steps, with an optimizer that raises no version counter."""
    host = trainable_host()
    setup = inlay.Stack("a", "f")
    inlay.train(host, setup)
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=0.05, fused=fused)
    for _ in range(3):
        host.train()
        host(**batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
        host.eval()
        before = logits(host)  # an evaluation between backward and step
        optimizer.step()
        optimizer.zero_grad()
        seen = logits(host)
        assert not torch.allclose(seen, before)
        plan = host.inlays.acting.plan
        wanted = fresh_logits(host, setup)
        assert torch.equal(seen, wanted)
        host.inlays.acting.switch(plan)  # go on with the steps that have been used


def test_after_a_frozen_evaluation_comes_training() -> None:
    """What was kept while all was frozen is not taken up again after training, when all is frozen anew."""
    host = trainable_host()
    inlay.activate(host, "f")
    logits(host)
    plan = host.inlays.acting.plan
    for name in ("a", "f"):
        host.inlays[name].requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in host.inlays.parameters() if p.requires_grad], lr=0.5, fused=True)
    host(**batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    optimizer.step()
    inlay.freeze(host)
    seen = logits(host)
    assert host.inlays.acting.plan is plan
    assert torch.equal(seen, fresh_logits(host, "f"))


def by_state_dict(host: nn.Module) -> None:
    state = {key: tensor + 0.1 for key, tensor in host.inlays["a"].state_dict().items()}
    host.inlays["a"].load_state_dict(state)


def by_whole_state_dict(host: nn.Module) -> None:
    host.load_state_dict({k: t + 0.01 if t.is_floating_point() else t for k, t in host.state_dict().items()})


def in_place(host: nn.Module) -> None:
    with torch.no_grad():
        for parameter in host.inlays["b"].parameters():
            parameter.mul_(1.5)


def by_replacement(host: nn.Module) -> None:
    host.double()
    host.float()
    adapter = next(iter(host.inlays["a"].parts.values()))
    adapter.up.weight = nn.Parameter(adapter.up.weight.detach() * 2, requires_grad=False)


@pytest.mark.parametrize("write", [by_state_dict, by_whole_state_dict, in_place, by_replacement])
def test_writes_to_frozen_members_are_noticed(write: Callable[[nn.Module], None]) -> None:
    host = trainable_host()
    inlay.activate(host, "f")
    before = logits(host)
    assert torch.equal(logits(host), before)
    write(host)
    seen = logits(host)
    assert not torch.allclose(seen, before)
    assert torch.equal(seen, fresh_logits(host, "f"))


def test_memory_that_is_used_again_does_not_pass_for_the_same_numbers() -> None:
    """Weights that are replaced may come to be where others were. On GPUs they do as a rule."""
    host = classifier()
    for name in "ab":
        inlay.add(host, name, inlay.Pfeiffer(size=4))
        shake(host, name)
    inlay.add_fusion(host, "f", ["a", "b"])
    inlay.activate(host, "f")
    weight = next(host.inlays["a"].parameters())
    memory = bytearray(4 * weight.numel())
    for _ in range(3):
        memory[:] = torch.randn(weight.shape).numpy().tobytes()
        weight.data = torch.frombuffer(memory, dtype=torch.float32).view(weight.shape)
        seen = logits(host)
        assert torch.equal(seen, fresh_logits(host, "f"))


def test_what_is_frozen_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.methods.fusion import FusionLayer

    host, calls = trainable_host(), []
    made = FusionLayer.premultiply
    monkeypatch.setattr(FusionLayer, "premultiply", lambda self, *a: calls.append(1) or made(self, *a))
    inlay.activate(host, "f")
    for _ in range(5):
        logits(host)
    assert len(calls) == 2  # once per layer


def test_in_the_trainer(tmp_path) -> None:
    """Trainer's evaluation loss, with its default optimizer, is that of the same weights on a fresh setup."""
    from transformers import Trainer, TrainingArguments

    host = trainable_host()
    inlay.train(host, inlay.Stack("a", "f"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=3, per_device_train_batch_size=6, learning_rate=5e-2, report_to=[],
        eval_strategy="epoch", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    rows = Texts(12)
    trainer = Trainer(host, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    fresh_logits(host, inlay.Stack("a", "f"))
    host.eval()
    labels = torch.stack([rows[i]["labels"] for i in range(12)])
    with torch.no_grad():
        true = host(**rows.inputs, labels=labels).loss.item()
    assert told == pytest.approx(true, abs=1e-5)
