"""What cells will cost, guessed from the file and the host alone."""

from __future__ import annotations

import pytest
from transformers import AutoModel

from inlay.studies.cells import StudyFolder
from inlay.studies.costs import Costs, host_size, looked_up
from inlay.studies.plan import Plan, View
from tests.studies.tiny import study_in


def guesses(here, out, monkeypatch, **way) -> float:
    """Seconds of a cell beside the second that everything takes, on a machine that does a million operations in one."""
    monkeypatch.setattr(Costs, "speed", staticmethod(lambda: 1e-3))
    study = study_in(here, ways={"one": {"seeds": [0], "tasks": ["a"], **way}}, against="one")
    view = View(Plan.of(study), StudyFolder(out))
    (made,) = view.plan.drafts.values()
    return Costs(view).guess(made[0]) - 1


def test_words_that_are_looked_up_are_not_multiplied_with(here):
    host = AutoModel.from_pretrained(here / "bert")
    words = host.get_input_embeddings().weight.numel()
    assert looked_up(str(here / "bert")) == words
    assert host_size(str(here / "bert")) / 4 > words
    assert looked_up(str(here / "nowhere")) == 0


def test_steps_that_are_limited_bound_the_guess(here, tmp_path, monkeypatch):
    many = {"rows": [10_000], "epochs": 3, "batch_size": 16, "eval_rows": 50}
    whole = guesses(here, tmp_path / "a", monkeypatch, **many)
    short = guesses(here, tmp_path / "b", monkeypatch, **many, max_steps=100)
    longer = guesses(here, tmp_path / "c", monkeypatch, **many, max_steps=200)
    ample = guesses(here, tmp_path / "d", monkeypatch, **many, max_steps=10**6)
    assert ample == whole
    weights = host_size(str(here / "bert")) / 4 - looked_up(str(here / "bert"))
    assert longer - short == pytest.approx(weights * 48 * 100 * 16 * 4 / 1e6)  # 100 steps of 16 rows and 48 tokens


def test_a_mixture_runs_twice_and_a_frozen_host_costs_less(here, tmp_path, monkeypatch):
    def training(name: str, **way) -> float:
        long, short = ({"rows": [1000], "epochs": epochs, "eval_rows": 50, **way} for epochs in (3, 2))
        judged = 2 * 50 * 48 * (host_size(str(here / "bert")) / 4 - looked_up(str(here / "bert"))) / 1e6
        return (
            guesses(here, tmp_path / f"{name}3", monkeypatch, **long)
            - guesses(here, tmp_path / f"{name}2", monkeypatch, **short)
            - judged
        )

    inlay, full = training("i"), training("f", kind="full")
    mixture = training("m", method="mixture", options={"modules": 2, "method": {"kind": "pfeiffer"}})
    assert full == pytest.approx(1.5 * inlay)
    assert mixture == pytest.approx(2 * inlay)
