"""The head before the rest: as scikit-learn fits it, where few rows ask for it, and once in a run's life."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import inlay
from inlay.data.task import Task
from inlay.errors import ConfigError
from inlay.runs.facts import facts_of
from inlay.runs.folder import Run
from inlay.runs.ready import get_ready
from inlay.runs.settings import FEW, Settings
from inlay.runs.train import train_run
from inlay.training.evaluate import ask, loss_on, scores
from inlay.training.head_first import CHOICES, C, fit_head, last_layer
from inlay.training.interrupt import Interrupted
from inlay.training.loop import TrainingLoop
from inlay.training.progress import Silent
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench
from tests.training.small import KINDS, rows, save_bert, write_rows
from tests.training.test_kinds import TASKS, some


def opened(small: Path, task: Task, **head: Any) -> Workbench:
    torch.manual_seed(0)
    bench = Workbench.open(str(small / "bert"), task)
    bench.set_up("x", "inlay", method=inlay.Pfeiffer(reduction=2), head=bench.head(**head))
    return bench


def features_of(bench: Workbench, split: Any) -> np.ndarray[Any, Any]:
    """The mean of the last hidden states, asked of the encoder."""
    host, batch = bench.host.eval(), split.features.collate(list(range(len(split.examples))))
    batch = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    with torch.no_grad():
        hidden, mask = host.base_model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return np.asarray(((hidden * mask).sum(1) / mask.sum(1)).double().numpy())


def test_three_labels_as_scikit_learn_fits_them(small):
    bench = opened(small, Task(name="three", labels=("a", "b", "c")))
    codec, examples = bench.codec(32), some("classification", 48)
    for i, example in enumerate(examples):
        object.__setattr__(example, "target", i % 3 if i % 4 else int(example.target))
    split = codec.encode(examples)
    assert fit_head(bench.host, codec, split)
    x, y = features_of(bench, split), [example.target for example in examples]
    strength = C / float((x**2).sum(1).mean())
    wanted = LogisticRegression(C=strength, tol=1e-8, max_iter=10_000).fit(x, y).predict_proba(x)
    found = [answer.probabilities for answer in ask(bench.host, codec, split)]
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_numbers_as_scikit_learn_fits_them(small):
    bench = opened(small, TASKS["regression"])
    codec = bench.codec(32)
    split = codec.encode(some("regression", 40))
    assert fit_head(bench.host, codec, split)
    x, y = features_of(bench, split), [example.target for example in split.examples]
    ridge = Ridge(alpha=float((x**2).sum(1).mean()) / (2 * C)).fit(x, y)  # theirs has no half before the norm
    found = [answer.prediction for answer in ask(bench.host, codec, split)]
    np.testing.assert_allclose(found, ridge.predict(x), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_less_loss_and_nothing_but_the_last_layer_moves(small, kind):
    bench = opened(small, TASKS[kind], layers=2)
    codec = bench.codec(32)
    split = codec.encode(some(kind, 40))
    before, lost = {n: p.clone() for n, p in bench.host.named_parameters()}, loss_on(bench.host, codec, split)
    drawn = torch.random.get_rng_state()
    assert fit_head(bench.host, codec, split)
    assert loss_on(bench.host, codec, split) < 0.9 * lost
    moved = {name for name, p in bench.host.named_parameters() if not torch.equal(p, before[name])}
    assert {name.rpartition(".")[2] for name in moved} == {"weight", "bias"}
    assert len(moved) == 2
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert bench.host.training


def test_uneven_labels_do_not_choose_a_head_that_says_one_of_them_for_all(small):
    """Of labels that texts say nothing about, the strongest held head says the usual one and scores best of all."""
    bench = opened(small, TASKS["classification"])
    codec, examples = bench.codec(32), some("classification", 80)
    for i, example in enumerate(examples):
        object.__setattr__(example, "target", int(i % 5 == 0))
    train, validation = codec.encode(examples[:40]), codec.encode(examples[40:])
    x, y = features_of(bench, train), [example.target for example in train.examples]
    held = LogisticRegression(C=2 * CHOICES[0] / float((x**2).sum(1).mean()), max_iter=10_000).fit(x, y)
    assert set(held.predict(features_of(bench, validation))) == {0}  # right in 4 of 5
    assert fit_head(bench.host, codec, train, validation)
    assert {answer.prediction for answer in ask(bench.host, codec, validation)} == {0, 1}


def test_where_no_head_tells_rows_apart_it_is_held_as_usual(small):
    bench = opened(small, TASKS["classification"])
    codec, examples = bench.codec(32), some("classification", 20)
    for example in examples[:10]:
        object.__setattr__(example, "target", 1)
    train = codec.encode(examples[:10])
    assert fit_head(bench.host, codec, train, codec.encode(examples[10:]))
    chosen = last_layer(bench.host).weight.clone()
    assert fit_head(bench.host, codec, train)
    assert torch.equal(chosen, last_layer(bench.host).weight)


def test_hosts_without_a_head_of_their_own_have_nothing_to_fit(small):
    bench = Workbench.open(str(small / "t5"), TASKS["classification"])
    bench.set_up("x", "inlay", method=inlay.Pfeiffer(reduction=2))
    codec = bench.codec(32)
    assert not fit_head(bench.host, codec, codec.encode(some("classification", 8)))


def test_a_frozen_head_stays(small):
    bench = opened(small, TASKS["classification"])
    bench.host.requires_grad_(False)
    codec = bench.codec(32)
    split = codec.encode(some("classification", 8))
    before = scores(bench.host.eval(), split.features.collate([0, 1]) | {}).clone()
    assert not fit_head(bench.host, codec, split)
    assert torch.equal(before, scores(bench.host, split.features.collate([0, 1]) | {}))


# runs


@pytest.fixture
def few(tmp_path: Path) -> dict[str, Any]:
    save_bert(tmp_path / "bert")
    write_rows(tmp_path / "train.jsonl", rows(64))
    write_rows(tmp_path / "validation.jsonl", rows(30, seed=1))
    return {
        "host": str(tmp_path / "bert"), "out": tmp_path / "run",
        "train_file": tmp_path / "train.jsonl", "validation_file": tmp_path / "validation.jsonl",
    }  # fmt: skip


def test_few_rows_are_learned_by_the_recipe_for_them(few):
    job = get_ready(Settings(**few))
    assert (job.settings.recipe, job.settings.head_first) == ("few-labels", True)
    assert (job.settings.batch_size, job.settings.epochs, job.settings.lr) == (16, 10, 1e-3)
    assert "64 training rows are few: recipe few-labels" in job.notes[-1]


def test_what_is_said_wins_over_it(few):
    job = get_ready(Settings(**few, lr=0.02, epochs=3, batch_size=8, head_first=False))
    assert (job.settings.lr, job.settings.epochs, job.settings.batch_size) == (0.02, 3, 8)
    assert not job.settings.head_first


def test_another_recipe_many_rows_and_hosts_that_answer_in_text_are_as_ever(few, small):
    assert not get_ready(Settings(**few, recipe="default")).settings.head_first
    assert not get_ready(Settings(**few | {"host": str(small / "t5")})).settings.head_first
    write_rows(few["train_file"], rows(FEW + 1))
    job = get_ready(Settings(**few))
    assert (job.settings.recipe, job.settings.head_first, job.settings.batch_size) == (None, False, 32)
    write_rows(few["train_file"], rows(FEW))
    assert get_ready(Settings(**few)).settings.head_first


@pytest.mark.parametrize("mode", ["inlay", "head", "full"])
def test_a_run_begins_with_its_head_and_says_what_that_reaches(few, mode):
    run = train_run(Settings(**few, mode=mode, epochs=2))
    history = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in history] == [0, 4, 8]
    assert history[0]["lr"] == 0.0
    assert history[0]["loss"] < 0.66  # as the fitted head alone has it; a new head's is ln 2
    assert history[0]["validation_accuracy"] > 0.6


class Stop(Silent):
    def step(self, step: int, loss: float, best: str) -> None:
        if step == 5:
            raise KeyboardInterrupt


def test_a_run_that_goes_on_keeps_its_head(few, tmp_path):
    whole = train_run(Settings(**few, epochs=2))
    broken = Settings(**few | {"out": tmp_path / "broken"}, epochs=2, save_every=1)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        train_run(broken, watch=Stop())
    went_on = train_run(broken, resume=True)
    read = [(run.folder / "metrics.jsonl").read_text() for run in (whole, went_on)]
    assert read[0] == read[1]
    weights = [(run.inlay / "weights.safetensors").read_bytes() for run in (whole, went_on)]
    assert weights[0] == weights[1]


def test_a_run_that_died_before_its_first_checkpoint_says_each_step_once(few):
    settings = Settings(**few, epochs=2)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        train_run(settings, watch=StopAtOnce())
    run = train_run(settings, resume=True)
    history = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in history] == [0, 4, 8]


class StopAtOnce(Silent):
    def step(self, step: int, loss: float, best: str) -> None:
        raise KeyboardInterrupt


def test_a_recipe_can_fit_the_head_before_any_training(small):
    bench = opened(small, TASKS["classification"])
    codec = bench.codec(32)
    train, validation = codec.encode(some("classification", 40)), codec.encode(some("classification", 20, seed=1))
    recipe = Recipe(lr=1e-9, epochs=1, batch_size=8, head_first=True)
    outcome = TrainingLoop(bench.host, codec, train, validation, recipe).run()
    assert outcome.best_step == 0
    assert outcome.scores["accuracy"] > 0.6


def test_validation_rows_choose_how_strongly_the_head_is_held(small):
    """As scikit-learn, asked for every C and judged by the same rows."""
    bench = opened(small, TASKS["classification"])
    codec = bench.codec(32)
    train, validation = codec.encode(some("classification", 40)), codec.encode(some("classification", 60, seed=5))
    x, y = features_of(bench, train), [example.target for example in train.examples]
    seen, right = features_of(bench, validation), [example.target for example in validation.examples]
    bench.host.train()
    assert fit_head(bench.host, codec, train, validation)
    scale = float((x**2).sum(1).mean())
    models = [LogisticRegression(C=2 * c / scale, tol=1e-8, max_iter=10_000).fit(x, y) for c in CHOICES]
    wanted = max(models, key=lambda model: model.score(seen, right))
    assert len({round(model.score(seen, right), 6) for model in models}) > 1
    found = [answer.probabilities for answer in ask(bench.host, codec, validation)]
    np.testing.assert_allclose(found, wanted.predict_proba(seen), atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_validation_rows_of_every_kind_may_choose(small, kind):
    bench = opened(small, TASKS[kind])
    codec = bench.codec(32)
    train, validation = codec.encode(some(kind, 24)), codec.encode(some(kind, 12, seed=3))
    lost = loss_on(bench.host, codec, train)
    assert fit_head(bench.host, codec, train, validation)
    assert loss_on(bench.host, codec, train) < lost


def test_fewer_rows_than_a_batch_are_one_batch(few):
    write_rows(few["train_file"], rows(9))
    assert get_ready(Settings(**few)).settings.batch_size == 9
    with pytest.raises(ConfigError, match="fewer than a batch of 12"):
        get_ready(Settings(**few, batch_size=12))


@pytest.mark.parametrize("host", ["bert", "t5"])
def test_a_run_of_one_batch_goes_on_by_what_was_said_when_it_began(few, small, host):
    """As a study does, which says what its file says and not what the run made of it."""
    write_rows(few["train_file"], rows(9))
    said = Settings(**few | {"host": str(small / host)})
    begun = get_ready(said)
    few["out"].mkdir()
    Run(few["out"]).note(status="running", processes=1, **facts_of(begun))
    assert get_ready(said, resume=True).settings == begun.settings
