"""How often tasks are drawn: p_n ∝ |D_n|^α, α as published, and what else may be said."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from inlay.data.mixing import Sampling, TaskDraws
from inlay.errors import ConfigError

ROWS = {"mnli": 392_702, "sst2": 67_349, "rte": 2_490}


@pytest.mark.parametrize(("epoch", "alpha"), [(1, 1.0), (13, 0.6), (25, 0.2)])
def test_alpha_is_the_published_one_at_the_first_middle_and_last_epoch(epoch, alpha):
    assert Sampling().alpha_at(epoch, 25) == pytest.approx(alpha)
    by_hand = [count**alpha for count in ROWS.values()]
    assert list(Sampling().shares(ROWS, epoch, 25).values()) == pytest.approx([x / sum(by_hand) for x in by_hand])


def test_one_epoch_is_by_size():
    assert Sampling().alpha_at(1, 1) == 1.0


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(alpha=0), {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}),
        (Sampling(alpha=0.5), {"a": 10 / 16, "b": 5 / 16, "c": 1 / 16}),
        (Sampling(alpha=1), {"a": 100 / 126, "b": 25 / 126, "c": 1 / 126}),
        (Sampling(temperature=2), {"a": 10 / 16, "b": 5 / 16, "c": 1 / 16}),
        (Sampling(alpha=1, cap=25), {"a": 25 / 51, "b": 25 / 51, "c": 1 / 51}),
        (Sampling(alpha=1, cap={"a": 50}), {"a": 50 / 76, "b": 25 / 76, "c": 1 / 76}),
        (Sampling(weights={"a": 1, "b": 2, "c": 5}), {"a": 0.125, "b": 0.25, "c": 0.625}),
    ],
)
def test_every_way_by_hand(sampling, wanted):
    assert sampling.shares({"a": 100, "b": 25, "c": 1}, 3, 7) == pytest.approx(wanted)


@pytest.mark.parametrize("epoch", [1, 5, 10])
def test_a_hundred_thousand_draws_are_as_often_as_they_should_be(epoch):
    draws = TaskDraws(ROWS, epochs=10, seed=7)
    counts = Counter(draws.draw(100_000, epoch))
    wanted = [100_000 * share for share in draws.sampling.shares(ROWS, epoch, 10).values()]
    assert chisquare([counts[name] for name in ROWS], wanted).pvalue > 0.01
    if epoch == 10:  # and the test can fail
        assert chisquare([counts[name] for name in ROWS], [100_000 / 3] * 3).pvalue < 1e-6


def test_draws_go_on_from_a_state_and_leave_torch_alone():
    before = torch.get_rng_state()
    draws = TaskDraws(ROWS, Sampling(alpha=0), epochs=4, seed=3)
    draws.draw(17, 1)
    state = draws.state.clone()
    coming = draws.draw(50, 2)
    other = TaskDraws(ROWS, Sampling(alpha=0), epochs=4, seed=99)
    other.state = state
    assert other.draw(50, 2) == coming
    assert TaskDraws(ROWS, Sampling(alpha=0), epochs=4, seed=4).draw(50, 1) != coming
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"alpha": 1.5}, "alpha.*between 0"),
        ({"alpha": -0.1}, "alpha.*between 0"),
        ({"cap": 0}, "cap.*one row"),
        ({"cap": {"a": 0}}, "cap.*one row"),
        ({"temperature": 0.5}, "temperature"),
        ({"weights": {"a": 0.0}}, "weights.*above 0"),
        ({"weights": {}}, "weights.*above 0"),
        ({"alpha": 0.5, "temperature": 2}, "one way only"),
        ({"weights": {"a": 1}, "cap": 3}, "leave one of them out"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        Sampling(**settings)


def test_tasks_that_are_not_there_or_left_out_are_named():
    with pytest.raises(ConfigError, match="weights names c; the tasks are a, b"):
        TaskDraws({"a": 1, "b": 1}, Sampling(weights={"a": 1, "b": 1, "c": 1}), epochs=1)
    with pytest.raises(ConfigError, match="nothing of b"):
        TaskDraws({"a": 1, "b": 1}, Sampling(weights={"a": 1}), epochs=1)
    with pytest.raises(ConfigError, match="no training rows: b"):
        TaskDraws({"a": 1, "b": 0}, epochs=1)
