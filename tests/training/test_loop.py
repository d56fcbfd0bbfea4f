import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import log_loss

import inlay
from inlay.data import Data, Task, prepare
from inlay.training.evaluate import ask, loss_on
from inlay.training.loop import TrainingLoop, accelerator_for
from inlay.training.optimizer import rate_at
from inlay.training.recipe import Recipe, filled
from inlay.training.workbench import Workbench
from tests.training.ready import ready, state


@pytest.mark.parametrize(("mode", "lr"), [("inlay", 3e-2), ("head", 5e-2), ("full", 1e-2)])
def test_learning_is_real_and_only_what_should_train_does(small, mode, lr):
    model, codec, train, validation = ready(small, mode)
    before = state(model)
    outcome = TrainingLoop(model, codec, train, validation, Recipe(lr=lr, epochs=10, batch_size=16, patience=0)).run()
    assert outcome.scores["accuracy"] >= 0.8
    changed = {name for name, tensor in state(model).items() if not torch.equal(tensor, before[name])}
    assert any(name.startswith("inlays.") for name in changed)
    assert any(not name.startswith("inlays.") for name in changed) == (mode == "full")


def test_text_hosts_answer_with_the_label(small):
    model, codec, train, validation = ready(small, host="t5", method=inlay.Houlsby(reduction=1))
    model.requires_grad_(True)  # a host of random weights cannot say anything without
    outcome = TrainingLoop(model, codec, train, validation, Recipe(lr=2e-2, epochs=8, batch_size=16, patience=0)).run()
    assert outcome.scores["accuracy"] >= 0.8


def test_the_best_state_is_restored(small):
    model, codec, train, validation = ready(small)
    recipe = Recipe(lr=0.3, epochs=6, batch_size=16, patience=0, warmup=0.0)  # so fast that it gets worse again
    outcome = TrainingLoop(model, codec, train, validation, recipe).run()
    assert outcome.scores["accuracy"] == max(entry["validation_accuracy"] for entry in outcome.history)
    assert len(outcome.history) == 6


def test_early_stopping_stops(small):
    model, codec, train, validation = ready(small)
    outcome = TrainingLoop(model, codec, train, validation, Recipe(lr=1e-9, epochs=30, batch_size=16, patience=2)).run()
    assert len(outcome.history) == 3
    assert outcome.best_step == 6


def losses(outcome):
    return [entry["validation_loss"] for entry in outcome.history]


def test_the_loss_can_choose_the_best_state(small):
    """By scikit-learn's own formula, from the probabilities of the state that is left."""
    model, codec, train, validation = ready(small)
    recipe = Recipe(lr=0.3, epochs=6, batch_size=16, patience=0, warmup=0.0, select="loss")
    outcome = TrainingLoop(model, codec, train, validation, recipe).run()
    best = min(losses(outcome))
    assert outcome.best_step == outcome.history[losses(outcome).index(best)]["step"]
    shares = [answer.probabilities for answer in ask(model, codec, validation)]
    assert log_loss([example.target for example in validation.examples], shares) == pytest.approx(best, rel=1e-5)
    assert loss_on(model, codec, validation) == pytest.approx(best, rel=1e-6)


def test_the_loss_decides_where_the_metric_is_not_defined(small):
    """One row has no correlation; without the loss the first state would be the best one, and patience run out."""
    prepared = prepare(Data(train_file=small / "train.jsonl", validation_file=small / "validation.jsonl"))
    torch.manual_seed(0)
    bench = Workbench.open(str(small / "bert"), Task(kind="regression"))
    bench.set_up("own", "inlay", method=inlay.Pfeiffer(reduction=2))
    codec = bench.codec(64)
    train = codec.encode([replace(example, target=float(example.target)) for example in prepared.train])
    one = codec.encode(train.examples[:1])
    outcome = TrainingLoop(bench.host, codec, train, one, Recipe(lr=1e-2, epochs=6, batch_size=16, patience=2)).run()
    assert math.isnan(outcome.scores["pearson"])
    assert outcome.best_step == outcome.history[losses(outcome).index(min(losses(outcome)))]["step"] > 6
    (answer,) = ask(bench.host, codec, one)
    assert (answer.prediction - one.examples[0].target) ** 2 == pytest.approx(min(losses(outcome)), rel=1e-4)


def test_the_loss_decides_while_no_answer_is_a_label(small):
    model, codec, train, validation = ready(small, host="t5", method=inlay.Houlsby(reduction=1))
    model.requires_grad_(True)
    recipe = Recipe(lr=5e-3, epochs=8, batch_size=16, patience=1, eval_every=2)  # it says no label at first
    outcome = TrainingLoop(model, codec, train, validation, recipe).run()
    silent = [entry for entry in outcome.history if "validation_loss" in entry]
    assert silent
    assert all(entry["validation_accuracy"] == 0 for entry in silent)
    spoken = [entry["validation_accuracy"] for entry in outcome.history if "validation_loss" not in entry]
    assert spoken, "patience waits for the loss, so that it comes to labels"
    assert outcome.scores["accuracy"] == max(spoken)


def test_the_same_seed_is_bit_equal_and_another_is_not(small):
    runs = []
    for seed in (0, 0, 1):
        model, codec, train, validation = ready(small, seed=seed)
        outcome = TrainingLoop(
            model, codec, train, validation, Recipe(lr=1e-2, epochs=2, batch_size=16, seed=seed)
        ).run()
        runs.append((outcome.history, state(model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())
    assert any(not torch.equal(runs[0][1][name], tensor) for name, tensor in runs[2][1].items())


def test_accumulation_gives_the_same_gradient(small):
    found = []
    for accumulate in (1, 4):
        model, codec, train, validation = ready(small)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        TrainingLoop(
            model, codec, train, validation, Recipe(lr=1e-2, epochs=1, batch_size=20, accumulate=accumulate)
        ).run()
        found.append(state(model))
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-5), name


def test_rows_fewer_than_a_batch_are_refused(small):
    model, codec, train, validation = ready(small)
    with pytest.raises(inlay.ConfigError, match="96 training rows are fewer than a batch of 100"):
        TrainingLoop(model, codec, train, validation, Recipe(lr=1e-3, epochs=1, batch_size=100)).run()


def test_the_rate_rises_and_falls():
    recipe = Recipe(lr=1.0, warmup=0.1)
    rates = [rate_at(step, 100, recipe) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.02


def test_the_papers_rates_are_the_defaults():
    assert filled(Recipe(), "fusion").model_dump(include={"lr", "epochs"}) == {"lr": 5e-5, "epochs": 10}
    assert filled(Recipe(), "pfeiffer").lr == 1e-4
    assert filled(Recipe(), "compacter", text=True).lr == 3e-3
    assert filled(Recipe(), "houlsby", text=True).lr == 3e-4
    assert filled(Recipe(lr=7.0), "houlsby").lr == 7.0
    plain = {"houlsby": 1e-4, "pfeiffer": 1e-4, "parallel": 1e-4, "bapna": 1e-4}
    small = {"phm": 3e-3, "compacter": 3e-3, "compacter++": 3e-3, "lowrank": 3e-3}
    others = {"bitfit": 3e-4, "lora": 2e-4, "fusion": 5e-5, "head": 1e-3, "full": 2e-5}
    for kind, lr in (plain | small | others).items():
        assert filled(Recipe(), kind).lr == lr, kind
    for kind, lr in (dict.fromkeys(plain, 3e-4) | small | others | {"full": 3e-4}).items():
        assert filled(Recipe(), kind, text=True).lr == lr, kind
    epochs = {kind: filled(Recipe(), kind).epochs for kind in {*plain, *small, *others, "mixture"}}
    assert epochs == dict.fromkeys(epochs, 30) | {"fusion": 10}
    with pytest.raises(inlay.ConfigError, match="unknown method 'pfeifer'. Did you mean 'pfeiffer'?"):
        filled(Recipe(), "pfeifer")


def test_half_precision_needs_a_device_that_has_it():
    if not torch.cuda.is_available():
        with pytest.raises(inlay.ConfigError, match="fp16"):
            accelerator_for(Recipe(precision="fp16"))


def test_bfloat16_trains(small):
    model, codec, train, validation = ready(small)
    outcome = TrainingLoop(
        model, codec, train, validation, Recipe(lr=1e-2, epochs=1, batch_size=16, precision="bf16")
    ).run()
    assert math.isfinite(outcome.history[0]["loss"])
