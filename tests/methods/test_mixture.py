"""AdaMix."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch.nn import functional as F

import inlay
from inlay.compose.consistency import distance
from inlay.methods.mixture import Alternatives, alternatives
from tests.hosts import (
    CAUSAL,
    FAMILIES,
    SMALL,
    T5,
    batch,
    checkpointing_on,
    classifier,
    logits,
    shake,
    shaken,
    without_dropout,
)

METHODS = [inlay.Houlsby(size=4), inlay.Pfeiffer(size=4), inlay.Parallel(size=4), inlay.Bapna(size=4), inlay.LoRA(rank=2), inlay.PHM(size=4),
           inlay.Compacter(size=4), inlay.LowRank(size=4)]  # fmt: skip
SHARES = ("up", "down", None)


def mixed_host(
    method: inlay.Method | None = None, family: str = "bert", head: inlay.Head | None = None, **settings
) -> torch.nn.Module:
    host = classifier(family)
    inlay.add(host, "mix", inlay.Mixture(method or inlay.Houlsby(size=4), **settings), head=head)
    shake(host, "mix")
    return host


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.kind)
@pytest.mark.parametrize("share", SHARES)
def test_merged_is_the_manual_mean_and_nothing_changes_by_merging(method: inlay.Method, share, tmp_path: Path) -> None:
    host = mixed_host(method, share=share, modules=3)
    inlay.activate(host, "mix")
    before = logits(host)
    means = {}
    for key, part in host.inlays["mix"].parts.items():
        for projection in ("down", "up"):
            choice = getattr(part, projection, None)
            if isinstance(choice, Alternatives):
                assert projection != share
                for name, _ in choice.maps[-1].named_parameters():
                    total = sum(m.get_parameter(name).detach().double() for m in choice.maps)
                    means[key, projection, name] = total / 3
    inlay.merge(host, "mix")
    assert torch.equal(logits(host), before)
    assert host.inlays["mix"].method == method
    for (key, projection, name), mean in means.items():
        found = getattr(host.inlays["mix"].parts[key], projection).get_parameter(name).detach().double()
        torch.testing.assert_close(found, mean, atol=1e-7, rtol=0)
    inlay.save(host, "mix", tmp_path / "plain")
    other = classifier()
    inlay.load(other, tmp_path / "plain")
    inlay.activate(other, "mix")
    assert torch.equal(logits(other), before)
    assert not alternatives(host.inlays["mix"])


@pytest.mark.parametrize("family", FAMILIES)
def test_on_every_family_and_unmerged_on_disk(family: str, tmp_path: Path) -> None:
    host = mixed_host(family=family)
    inlay.activate(host, "mix")
    inlay.save(host, "mix", tmp_path / "mix")
    other = classifier(family)
    inlay.load(other, tmp_path / "mix")
    inlay.activate(other, "mix")
    assert torch.equal(logits(other), logits(host))
    inlay.train(other, "mix")
    found = inlay.mixture_loss(other, batch() | {"labels": torch.tensor([0, 1, 1])})
    found.loss.backward()
    assert found.consistency > 0


@pytest.mark.parametrize(("config", "size", "trained", "merged"), [
    (hf.BertConfig(), 48, 2_223_360, 894_528),
    (hf.RobertaConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096), 16, 1_992_192, 811_392),
])  # fmt: skip
def test_counts(config, size: int, trained: int, merged: int) -> None:
    base = inlay.Houlsby(size=size, sites=("ffn",), activation="gelu")
    assert inlay.count(config, inlay.Mixture(base)).trainable == trained
    assert inlay.count(config, base).trainable == merged


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", [*METHODS, inlay.Pfeiffer(size=4, init="identity")], ids=lambda m: m.kind)
def test_modules_start_different_from_each_other(method: inlay.Method, share) -> None:
    host = classifier()
    inlay.add(host, "mix", inlay.Mixture(method, share=share), norms=False)
    for part in host.inlays["mix"].parts.values():
        choice = part.up if share == "down" else part.down
        first = [next(m.parameters()) for m in choice.maps]
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    if method.kind == "lora":  # B is zero, or its mean is
        bare = logits(host)
        inlay.activate(host, "mix")
        torch.testing.assert_close(logits(host), bare, atol=1e-6 if share == "down" else 0, rtol=0)


def test_one_module_is_the_base_method_without_the_kl() -> None:
    host = mixed_host(modules=1)
    inlay.train(host, "mix")
    without_dropout(host)
    given = batch() | {"labels": torch.tensor([0, 1, 1])}
    found = inlay.mixture_loss(host, given)
    assert found.consistency == 0
    plain = classifier()
    inlay.add(plain, "base", inlay.Houlsby(size=4))
    ours = host.inlays["mix"].tensors()
    for key, tensor in plain.inlays["base"].tensors().items():
        tensor.copy_(ours[key.replace("down.", "down.maps.0.")])
    inlay.activate(plain, "base")
    torch.testing.assert_close(found.loss, plain(**given).loss)


def test_draws_are_even_and_independent() -> None:
    """Between layers, between down and up of one module, and between the halves of a doubled batch."""
    host = mixed_host(modules=4, share=None)
    inlay.train(host, "mix")
    choices = alternatives(host.inlays["mix"])
    n, p = 10_000, 1 / 4
    for choice in choices:
        choice.passes = 2
    draws = torch.tensor([[index for choice in choices for index in choice.draw()] for _ in range(n)])
    assert draws.shape == (n, 2 * 8)  # attention and FFN of two layers, each with a down and an up
    sigma = (p * (1 - p) / n) ** 0.5
    for column in draws.T:
        frequency = torch.bincount(column, minlength=4) / n
        assert ((frequency - p).abs() < 5 * sigma).all()
    pair_sigma = (1 / 16 * 15 / 16 / n) ** 0.5
    for a, b in itertools.combinations(draws.T, 2):
        joint = torch.bincount(a * 4 + b, minlength=16) / n
        assert ((joint - 1 / 16).abs() < 5 * pair_sigma).all()


Draws = dict[Alternatives, tuple[int, ...]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Draws]:
    """Every pass's draws as they happen; each choice draws once in a pass."""
    passes: list[Draws] = []
    draw = Alternatives.draw

    def noting(self: Alternatives) -> tuple[int, ...]:
        if not passes or self in passes[-1]:
            passes.append({})
        passes[-1][self] = draw(self)
        return passes[-1][self]

    monkeypatch.setattr(Alternatives, "draw", noting)
    return passes


def plain_logits(host: torch.nn.Module, draws: Draws, half: int = 0) -> torch.Tensor:
    """What a plain inlay gives that is made of the drawn modules alone."""
    family = host.config.model_type
    plain = classifier(family)
    inlay.add(plain, "plain", host.inlays["mix"].method.method)
    for key, part in host.inlays["mix"].parts.items():
        for projection in ("down", "up"):
            mine = getattr(part, projection)
            chosen = mine.maps[draws[mine][half]] if isinstance(mine, Alternatives) else mine
            getattr(plain.inlays["plain"].parts[key], projection).load_state_dict(chosen.state_dict())
    inlay.activate(plain, "plain")
    return logits(plain)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", [inlay.Houlsby(size=4), inlay.LoRA(rank=2)], ids=lambda m: m.kind)
def test_a_pass_is_the_plain_inlay_of_the_drawn_modules(method: inlay.Method, share, drawn: list[Draws]) -> None:
    host = mixed_host(method, share=share)
    inlay.train(host, "mix")
    without_dropout(host)
    found = logits(host)
    (draws,) = drawn
    assert list(draws) == alternatives(host.inlays["mix"])
    torch.testing.assert_close(found, plain_logits(host, draws))
    doubled = inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])})
    draws = drawn[1]
    assert any(a != b for a, b in draws.values())
    a, b = (plain_logits(host, draws, half) for half in (0, 1))
    torch.testing.assert_close(doubled.logits, a)
    kl = lambda p, q: F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(doubled.consistency, (kl(a, b) + kl(b, a)) / 2, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("share", SHARES)
def test_an_ensemble_is_the_mean_of_the_logits_of_its_draws(share, drawn: list[Draws]) -> None:
    host = mixed_host(share=share).train()
    found = inlay.ensemble(host, "mix", batch(), passes=4)
    assert host.training
    assert len(drawn) == 4
    assert len({tuple(draws.values()) for draws in drawn}) > 1
    torch.testing.assert_close(found, sum(plain_logits(host, draws) for draws in drawn) / 4)


def test_the_same_seed_gives_the_same_run_and_a_resumed_one_goes_on() -> None:
    def run(steps: int, host: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(steps):
            found = inlay.mixture_loss(host, batch(seed=step) | {"labels": torch.tensor([0, 1, 1])})
            found.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(found.loss.item())
        return losses

    def fresh():
        torch.manual_seed(3)
        host = mixed_host()
        inlay.train(host, "mix")
        return host, torch.optim.SGD(host.inlays.parameters(), lr=0.05)

    whole = run(6, *fresh())
    assert whole == run(6, *fresh())
    host, optimizer = fresh()
    run(6, host, optimizer)
    state, noise = {k: v.clone() for k, v in host.state_dict().items()}, torch.get_rng_state()
    on = run(3, host, optimizer)
    torch.randn(50)
    host.load_state_dict(state)
    torch.set_rng_state(noise)
    assert run(3, host, torch.optim.SGD(host.inlays.parameters(), lr=0.05)) == on


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "opt"])
@pytest.mark.parametrize("share", SHARES)
def test_the_doubled_batch_equals_two_passes(
    family: str, share, drawn: list[Draws], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mixed_host(family=family, share=share).double()
    inlay.train(host, "mix")
    without_dropout(host)
    labels = torch.tensor([0, 1, 1])
    owner = host.inlays["mix"]
    both = inlay.mixture_loss(host, batch() | {"labels": labels}, detach=False)
    both.loss.backward()
    doubled = {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    (draws,) = drawn
    assert all(len(indices) == 2 for indices in draws.values())
    owner.zero_grad()
    results = []
    for half in range(2):
        monkeypatch.setattr(Alternatives, "draw", lambda choice, half=half: draws[choice][half : half + 1])
        results.append(host(**batch()).logits)
    a, b = (r.log_softmax(-1) for r in results)
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1).mean()
    loss = F.cross_entropy(results[0], labels) + (kl(a, b) + kl(b, a)) / 2
    loss.backward()
    torch.testing.assert_close(both.loss, loss, atol=1e-6, rtol=0)
    for name, parameter in owner.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(doubled[name], parameter.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("consistent", [True, False])
def test_gradient_checkpointing_recomputes_with_the_same_draws(family: str, reentrant: bool, consistent: bool) -> None:
    """Also when a second pass came before the first one's backward."""
    labels = torch.tensor([0, 1, 1])
    gradients = []
    for checkpointing in (False, True):
        host = mixed_host(family=family, share=None)
        inlay.train(host, "mix")
        without_dropout(host)
        if checkpointing:
            checkpointing_on(host, {"use_reentrant": reentrant})
            host.enable_input_require_grads()
        torch.manual_seed(4)
        losses = []
        for seed in range(2):
            given = batch(seed=seed) | {"labels": labels}
            losses.append(inlay.mixture_loss(host, given).loss if consistent else host(**given).loss)
        host.eval()
        logits(host)
        host.train()
        sum(losses).backward()
        gradients.append({n: p.grad for n, p in host.inlays["mix"].named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_kl_is_zero_for_identical_modules_and_positive_otherwise() -> None:
    host = mixed_host(share=None)
    inlay.train(host, "mix")
    without_dropout(host)
    given = batch() | {"labels": torch.tensor([0, 1, 1])}
    assert inlay.mixture_loss(host, given).consistency > 1e-4
    for choice in alternatives(host.inlays["mix"]):
        for other in list(choice.maps)[1:]:
            other.load_state_dict(choice.maps[0].state_dict())
    assert inlay.mixture_loss(host, given).consistency.abs() < 1e-6


def test_the_distance_by_hand_and_at_extremes() -> None:
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    p, q = a.softmax(-1), b.softmax(-1)
    wanted = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)).mean() / 2
    for detach in (True, False):
        torch.testing.assert_close(distance(a, b, torch.zeros(5), detach), wanted)
    plain = torch.autograd.grad(distance(a, b, torch.zeros(5), False), a)[0]
    constant = torch.autograd.grad(distance(a, b, torch.zeros(5), True), a)[0]
    torch.testing.assert_close(plain, torch.autograd.grad(wanted, a, retain_graph=True)[0])
    target = q.detach()
    published = ((target * (target / a.softmax(-1)).log()).sum(-1)).mean() / 2
    torch.testing.assert_close(constant, torch.autograd.grad(published, a)[0])
    huge = torch.tensor([[3e38, -3e38, 0.0]], dtype=torch.bfloat16)
    assert distance(huge, -huge, torch.zeros(1)) > 1e30
    big = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    found = distance(big, -big.detach(), torch.zeros(1))
    found.backward()
    assert found.isfinite()
    assert big.grad.isfinite().all()
    score = torch.randn(4, 1)
    torch.testing.assert_close(distance(score, score + 2, torch.zeros(4)), torch.tensor(4.0))


def test_regression_multiple_choice_and_language_models() -> None:
    host = mixed_host(head=inlay.Head(labels=1))
    inlay.train(host, "mix")
    found = inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0.1, 0.5, 0.9])})
    assert found.consistency > 0
    choices = shaken(hf.BertForMultipleChoice(hf.BertConfig(**SMALL)))
    causal = shaken(hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL)))
    pairs = shaken(hf.T5ForConditionalGeneration(hf.T5Config(**T5)))
    ids = batch()["input_ids"]
    padded = ids.masked_fill(batch()["attention_mask"] == 0, -100)
    for model, inputs in [
        (choices, {k: v.reshape(2, 3, 7) for k, v in batch(6).items()} | {"labels": torch.tensor([0, 2])}),
        (causal, batch() | {"labels": padded}),
        (pairs, batch() | {"labels": padded}),
    ]:
        inlay.add(model, "mix", inlay.Mixture(inlay.Houlsby(size=4)))
        shake(model, "mix")
        inlay.train(model, "mix")
        without_dropout(model)
        result = inlay.mixture_loss(model, inputs)
        result.loss.backward()
        assert result.consistency > 0
        for choice in alternatives(model.inlays["mix"]):
            for other in list(choice.maps)[1:]:
                other.load_state_dict(choice.maps[0].state_dict())
        same = inlay.mixture_loss(model, inputs)
        torch.testing.assert_close(same.task, model(**inputs).loss, atol=1e-5, rtol=1e-4)  # the host's own loss
        assert same.consistency.abs() < 1e-6


def test_the_distance_ignores_padding() -> None:
    a, b = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    labels = torch.tensor([[1, 2, -100, -100], [1, 1, 1, -100]])
    rows = labels != -100
    torch.testing.assert_close(distance(a, b, labels), distance(a[rows], b[rows], labels[rows]))


def test_the_hosts_own_loss_for_every_problem() -> None:
    for head, labels in [
        (inlay.Head(labels=3), torch.tensor([0, 2, 1])),
        (inlay.Head(labels=3, problem="regression"), torch.randn(3, 3)),
        (inlay.Head(labels=3, problem="multi_label_classification"), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])),
        (inlay.Head(labels=1), torch.randn(3)),
    ]:
        host = mixed_host(head=head)
        inlay.train(host, "mix")
        without_dropout(host)
        for choice in alternatives(host.inlays["mix"]):
            for other in list(choice.maps)[1:]:
                other.load_state_dict(choice.maps[0].state_dict())
        found = inlay.mixture_loss(host, batch() | {"labels": labels})
        torch.testing.assert_close(found.task, host(**batch(), labels=labels).loss, atol=1e-5, rtol=1e-4)
        assert found.consistency.abs() < 1e-6


@pytest.mark.parametrize("make", [
    lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL)), lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
], ids=["llama", "t5"])  # fmt: skip
def test_in_bfloat16_the_loss_is_computed_in_single_precision(make) -> None:
    host = shaken(make()).bfloat16()
    inlay.add(host, "mix", inlay.Mixture(inlay.Houlsby(size=4)))
    inlay.train(host, "mix")
    without_dropout(host)
    given = batch() | {"labels": batch()["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)}
    found = inlay.mixture_loss(host, given)
    real = (
        (given["labels"][:, 1:], found.logits[:, :-1])
        if not host.config.is_encoder_decoder
        else (given["labels"], found.logits)
    )
    wanted = F.cross_entropy(real[1].float().flatten(0, 1), real[0].flatten())
    assert found.loss.dtype == torch.float32
    assert torch.equal(found.task, wanted)


def test_around_the_host_and_with_an_own_loss() -> None:
    class Wrapper(torch.nn.Module):  # as DistributedDataParallel is
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            return self.module(**inputs)

    host = mixed_host()
    inlay.train(host, "mix")
    given = batch() | {"labels": torch.tensor([0, 1, 1]), "position_ids": torch.arange(7)[None]}
    smooth = lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1)
    found = inlay.mixture_loss(Wrapper(host), given, smooth, weight=3.0)
    torch.testing.assert_close(found.task, smooth(found.logits, given["labels"]))
    torch.testing.assert_close(found.loss, found.task + 3 * found.consistency)
    assert found.consistency > 0
    with torch.autocast("cpu", torch.bfloat16):
        found = inlay.mixture_loss(host, given)
    found.loss.backward()
    assert found.loss.isfinite()
    host.eval()
    merged = inlay.mixture_loss(host, given)
    assert merged.consistency == 0
    assert torch.equal(merged.logits, logits(host))


def test_what_rows_share_has_no_halves() -> None:
    host = classifier("deberta-v2", share_att_key=True)  # k also projects the relative positions
    given = batch() | {"labels": torch.tensor([0, 1, 1])}
    for targets in (("v",), ("k", "v")):
        inlay.add(host, targets[0], inlay.Mixture(inlay.LoRA(rank=2, targets=targets)))
        inlay.train(host, targets[0])
        inlay.mixture_loss(host, given, weight=0)
        if "k" not in targets:
            inlay.mixture_loss(host, given)
            continue
        with pytest.raises(inlay.SetupError, match="no 2 equal parts"):
            inlay.mixture_loss(host, given)


def test_rows_are_refused_for_the_doubled_batch() -> None:
    host = mixed_host()
    inlay.add(host, "plain", inlay.Pfeiffer(size=2))
    for rows in (inlay.Rows("mix", "plain", "mix"), inlay.Rows("mix", "plain", "mix", each=2)):
        inlay.train(host, rows)
        with pytest.raises(inlay.SetupError, match="which Rows cannot follow"):
            inlay.mixture_loss(host, batch() | {"labels": torch.tensor([0, 1, 1])})


def test_the_distance_of_several_labels_and_of_regression() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(distance(a, b, a, problem="regression"), (a - b).square().mean())
    p, q = a.sigmoid(), b.sigmoid()
    kl = lambda p, q: p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    wanted = ((kl(p, q) + kl(q, p)) / 2).sum(-1).mean()
    torch.testing.assert_close(distance(a, b, a, problem="multi_label_classification"), wanted)


def test_one_rule_for_all_alternatives() -> None:
    for shares in (True, False):
        host = mixed_host(inlay.PHM(size=4, share_rule=shares), share=None)
        choice = alternatives(host.inlays["mix"])[0]
        assert len({id(m.borrowed[0]) for m in choice.maps}) == 1
        rules = [key for key in host.inlays["mix"].tensors() if key.endswith("rule")]
        assert len(rules) == (1 if shares else 2 * 4)


def test_routing_for_the_ablations() -> None:
    host = mixed_host(share=None)
    inlay.activate(host, "mix")
    merged = logits(host)
    with inlay.routing(host, "mix", "first"):
        first = logits(host)
        assert torch.equal(first, logits(host))
    with inlay.routing(host, "mix", "random"):
        assert len({tuple(logits(host).flatten().tolist()) for _ in range(8)}) > 1
    assert torch.equal(logits(host), merged)
    assert not torch.allclose(first, merged, atol=1e-3)
    torch.testing.assert_close(first, plain_logits(host, dict.fromkeys(alternatives(host.inlays["mix"]), (0,))))
    with pytest.raises(inlay.ConfigError, match="got 'best'"), inlay.routing(host, "mix", "best"):
        pass
    with pytest.raises(inlay.ConfigError, match="at least one pass"):
        inlay.ensemble(host, "mix", batch(), passes=0)


def test_in_the_trainer(tmp_path: Path) -> None:
    from tests.texts import Texts

    class Learner(hf.Trainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False  # the Trainer divides by the accumulation steps itself

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            found = inlay.mixture_loss(model, inputs)
            return (found.loss, {"logits": found.logits}) if return_outputs else found.loss

    host = classifier()
    inlay.add(host, "mix", inlay.Mixture(inlay.Pfeiffer(size=8)), head=inlay.Head(labels=3, pooling="mean"))
    inlay.train(host, "mix")
    arguments = hf.TrainingArguments(tmp_path, max_steps=40, learning_rate=2e-2, per_device_train_batch_size=12, report_to=[], logging_steps=10,
                                     use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, save_strategy="no")  # fmt: skip
    trainer = Learner(host, arguments, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]


def test_average_of_plain_inlays() -> None:
    host = classifier()
    for seed, name in enumerate("abc"):
        inlay.add(host, name, inlay.Pfeiffer(size=4), norms=True)
        shake(host, name, seed)
    inlay.add(host, "other", inlay.Pfeiffer(size=3), norms=True)
    inlay.add(host, "mix", inlay.Mixture(inlay.Pfeiffer(size=4)))
    inlay.add(host, "lora", inlay.LoRA(), head=inlay.Head(labels=2))
    inlay.add(host, "biases", inlay.BitFit(), norms=True)
    inlay.add(host, "all-biases", inlay.BitFit(head=True), norms=True)
    inlay.average(host, ["a", "b", "c"], name="soup", weights=[2, 1, 1])
    for key, tensor in host.inlays["soup"].tensors().items():
        a, b, c = (host.inlays[n].tensors()[key] for n in "abc")
        torch.testing.assert_close(tensor, 0.5 * a + 0.25 * b + 0.25 * c)
    inlay.activate(host, "soup")
    logits(host)
    for names, message in [
        (["a", "other"], r"'a' and 'other' differ in size \(4 and 3\), so their weights have no mean"),
        (["a", "lora"], r"'a' and 'lora' differ in method \('pfeiffer' and 'lora'\), head, norms, so"),
        (["biases", "all-biases"], r"differ in head \(False and True\), so"),
        (["a", "mix"], "only plain inlays have a mean"),
        ([], "at least one"),
    ]:
        with pytest.raises(inlay.InlayError, match=message):
            inlay.average(host, names, name="bad")
    with pytest.raises(inlay.ConfigError, match="needs 2 weights"):
        inlay.average(host, ["a", "b"], name="bad", weights=[1])
    with pytest.raises(inlay.ConfigError, match="list of names"):
        inlay.average(host, "abc", name="bad")
    assert "bad" not in host.inlays


def test_an_average_in_half_precision_is_rounded_once() -> None:
    host = classifier().to(torch.bfloat16)
    names = [f"m{n}" for n in range(7)]
    for seed, name in enumerate(names):
        inlay.add(host, name, inlay.Pfeiffer(size=4))
        shake(host, name, seed)
    inlay.average(host, names, name="soup")
    for key, tensor in host.inlays["soup"].tensors().items():
        exact = torch.stack([host.inlays[name].tensors()[key].double() for name in names]).mean(0)
        off = (tensor.double() - exact).abs()
        assert (off <= exact.abs() * torch.finfo(torch.bfloat16).eps / 2 * 1.001).all()


def test_bad_input() -> None:
    host = mixed_host()
    inlay.add(host, "plain", inlay.Pfeiffer(size=2))
    with pytest.raises(inlay.SetupError, match="'plain' is a pfeiffer inlay, not a mixture"):
        inlay.merge(host, "plain")
    with pytest.raises(inlay.SetupError, match="'mix' is a mixture. Merge it first"):
        inlay.add_fusion(host, "f", ["mix"])
    for method in (inlay.BitFit(), inlay.METHODS["head"](), inlay.Mixture(inlay.Pfeiffer()), "pfeiffer"):
        with pytest.raises(inlay.ConfigError, match="two projections"):
            inlay.Mixture(method)
    inlay.activate(host, "mix")
    with pytest.raises(inlay.ConfigError, match="needs `labels`"):
        inlay.mixture_loss(host, batch())
    inlay.merge(host, "mix")
    inlay.add_fusion(host, "f", ["mix", "plain"])
    inlay.activate(host, "f")
    logits(host)


@pytest.mark.parametrize("share", ["up", "down", None])
def test_the_modules_of_a_lora_mixture_start_apart(share: str | None) -> None:
    """B starts at zero in a LoRA: M of them would learn the same from the same rows; their mean is still zero."""
    host = classifier()
    bare = logits(host)
    inlay.add(host, "mix", inlay.Mixture(inlay.LoRA(rank=2), modules=3, share=share))
    choices = alternatives(host.inlays["mix"])
    assert choices
    for choice in choices:
        first, second, third = (m.weight for m in choice.maps)
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)
    inlay.activate(host, "mix")
    torch.testing.assert_close(logits(host), bare, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("start", [{"init": "vocabulary"}, {"ids": (5, 6)}], ids=["vocabulary", "text"])
def test_prompts_that_begin_as_words_start_different_around_them(start: dict) -> None:
    host = classifier()
    inlay.add(host, "mix", inlay.Mixture(inlay.Prompt(length=4, **start), modules=3))
    (choice,) = alternatives(host.inlays["mix"])
    assert not any(torch.equal(a.weight, b.weight) for a, b in itertools.combinations(choice.maps, 2))
    words = host.get_input_embeddings().weight[[0, 1, 2, 3] if "init" in start else [5, 6, 5, 6]]
    torch.testing.assert_close(choice.mean()["weight"], words, atol=1e-6, rtol=0)
