"""Pairs of rows as a second loss: its value by another library, where it acts, and what a run makes of it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity

import inlay
from inlay.errors import ConfigError
from inlay.runs.ready import get_ready
from inlay.runs.settings import Settings
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import Portion, objective_for, plain_loss
from inlay.training.pairs import pair_loss
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench
from tests.training.small import rows, write_rows
from tests.training.test_kinds import TASKS, some


def test_value_as_pair_by_pair_with_scikit_learns_cosine():
    generator = np.random.default_rng(0)
    features, labels = generator.normal(size=(9, 5)), np.array([0, 1, 2, 0, 1, 0, 2, 2, 0])
    cosine = cosine_similarity(features)
    near = [(1 - cosine[i, j]) ** 2 for i, j in combinations(range(9), 2) if labels[i] == labels[j]]
    far = [cosine[i, j] ** 2 for i, j in combinations(range(9), 2) if labels[i] != labels[j]]
    found = pair_loss(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))
    assert float(found) == pytest.approx(np.mean(near) + np.mean(far), rel=1e-5)


@pytest.mark.parametrize("labels", [[0], [0, 0, 0], [0, 1, 2]])
def test_pairs_that_are_not_there_count_for_nothing(labels):
    features = torch.eye(3)[: len(labels)].requires_grad_()
    loss = pair_loss(features, torch.tensor(labels))
    loss.backward()
    assert loss.item() == (1.0 if labels == [0, 0, 0] else 0.0)
    assert features.grad is not None
    assert features.grad.isfinite().all()


@torch.no_grad()
def pooled(host: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the last hidden states, asked of the encoder."""
    hidden, mask = host.base_model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return torch.as_tensor((hidden * mask).sum(1) / mask.sum(1))


def of_first(small: Path, kind: str, method: Any, recipe: Recipe) -> tuple[float, float, Workbench, Portion]:
    """The plain loss of eight rows, and that of the recipe, from the same draws and without dropout."""
    torch.manual_seed(0)
    bench = Workbench.open(str(small / "bert"), TASKS[kind])
    bench.set_up("x", "inlay", method=method, head=bench.head())
    inlay.train(bench.host, "x")
    with torch.no_grad():
        for parameter in bench.host.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)  # a new inlay does nothing
    for module in bench.host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    codec = bench.codec(32)
    split = codec.encode(some(kind, 8))
    portion = Portion(split.features.collate(list(range(8))), 1 / 8, 0.5)
    losses = []
    for objective in (objective_for(bench.host, "x"), objective_for(bench.host, "x", recipe)):
        torch.manual_seed(1)
        losses.append(float(objective(bench.host, bench.host, codec, portion).detach()))
    return (*losses, bench, portion)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_portion_bears_its_share_of_the_weight(small, weight):
    plain, both, bench, portion = of_first(small, "classification", inlay.Pfeiffer(), Recipe(pairs=weight))
    batch = {name: tensor for name, tensor in portion.batch.items() if name != "labels"}
    wanted = float(pair_loss(pooled(bench.host, batch), portion.batch["labels"]))
    assert both - plain == pytest.approx(weight * 0.5 * wanted, rel=1e-4)


def test_both_draws_of_a_mixture_have_pairs(small):
    mixture = inlay.Mixture(inlay.Pfeiffer(reduction=4), modules=8)
    plain, both, bench, portion = of_first(small, "classification", mixture, Recipe(pairs=1.0))
    head = [module for module in bench.host.modules() if isinstance(module, torch.nn.Linear)][-1]
    assert head.out_features == len(TASKS["classification"].labels)
    caught: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, given: caught.append(given[0].detach()))
    torch.manual_seed(1)
    objective_for(bench.host, "x")(bench.host, bench.host, bench.codec(32), portion)
    assert [len(features) for features in caught] == [16]  # eight rows, drawn twice
    labels = portion.batch["labels"]
    assert not torch.equal(caught[0][:8], caught[0][8:])
    assert both - plain == pytest.approx(0.5 * float(pair_loss(caught[0], torch.cat([labels, labels]))), rel=1e-4)


@pytest.mark.parametrize("kind", ["regression", "choice", "multilabel", "tags", "spans"])
def test_other_kinds_are_as_they_were(small, kind):
    plain, both, *_ = of_first(small, kind, inlay.Pfeiffer(), Recipe(pairs=1.0))
    assert both == plain


def test_without_a_weight_nothing_is_wrapped(small):
    bench = Workbench.open(str(small / "bert"), TASKS["classification"])
    bench.set_up("x", "inlay", method=inlay.Pfeiffer(), head=bench.head())
    assert objective_for(bench.host, "x", Recipe()) is plain_loss


def test_a_run_brings_texts_of_one_label_together(small):
    def spread(weight: float) -> float:
        torch.manual_seed(0)
        bench = Workbench.open(str(small / "bert"), TASKS["classification"])
        codec = bench.codec(32)
        split = codec.encode(some("classification", 32))
        recipe = Recipe(lr=1e-2, epochs=20, batch_size=8, pairs=weight, patience=0, select="loss")
        name = bench.set_up("x", "full", head=bench.head())
        TrainingLoop(bench.host, codec, split, split, recipe, objective=objective_for(bench.host, name, recipe)).run()
        batch = split.features.collate(list(range(32)))
        labels = batch.pop("labels")
        return float(pair_loss(pooled(bench.host.eval(), batch), labels))

    assert spread(5.0) < 0.8 * spread(0.0)


def test_a_weight_that_nothing_would_use_is_refused(small, tmp_path):
    numbered = [{"text": row["text"], "label": str(i / 7)} for i, row in enumerate(rows(32))]
    file = write_rows(tmp_path / "train.jsonl", numbered)
    asked: dict[str, Any] = {"train_file": file, "kind": "regression", "out": tmp_path / "run"}
    with pytest.raises(ConfigError, match="`pairs` is 1.0, but nothing would use it"):
        get_ready(Settings(host=str(small / "bert"), pairs=1.0, **asked))
    assert get_ready(Settings(host=str(small / "bert"), recipe="few-labels", **asked)).settings.pairs == 1.0
    texts = write_rows(tmp_path / "texts.jsonl", rows(16))
    with pytest.raises(ConfigError, match="`pairs` is 1.0, but nothing would use it"):
        get_ready(Settings(host=str(small / "t5"), train_file=texts, pairs=1.0, out=tmp_path / "t5"))
