"""What a run shows of itself: evaluation as well as training, and the time that is left of both."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from inlay.cli import main
from inlay.runs.ready import get_ready
from inlay.runs.settings import Settings
from inlay.training import evaluate, progress
from inlay.training.progress import Bar, Lines, clock
from tests.cli.terminal import plain

FILES = ("--train-file", "train.jsonl", "--validation-file", "validation.jsonl")
JOB = ("train", "--host", "bert", *FILES, "--batch-size", "16", "--epochs", "2", "--lr", "0.02", "--threads", "1")


class Told:
    """A watcher that writes down what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given))

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def told(monkeypatch):
    """Every watcher of the command line is this one."""
    watch = Told()
    monkeypatch.setattr(progress, "watcher", lambda quiet=False: watch)
    return watch


@pytest.fixture
def few(monkeypatch):
    """Small batches of evaluation, so that there is something to see."""
    monkeypatch.setattr(evaluate, "BATCH", 16)


@pytest.fixture
def asked(monkeypatch):
    """How many rows each evaluation asks."""
    counts, ask = [], evaluate.ask

    def counting(host, codec, split, **more):
        counts.append(len(split.examples))
        return ask(host, codec, split, **more)

    for module in ("inlay.training.loop", "inlay.runs.train", "inlay.runs.use"):
        monkeypatch.setattr(f"{module}.ask", counting)
    return counts


def test_evaluation_is_shown_as_it_goes_and_rows_are_asked_once(there, told, few, asked):
    main([*JOB, "--out", "run"])
    assert asked == [40, 40, 40], (
        "the fitted head's evaluation and one per epoch; the best one's answers are the final ones"
    )
    assert told.of("asked") == [(16, 40), (32, 40), (40, 40)] * 3
    assert told.of("start") == [("run", 0, 12)]
    assert len(told.of("step")) == 12


def test_other_rows_are_asked_at_the_end_and_shown_too(there, told, few, asked):
    main([*JOB, "--test-file", "train.jsonl", "--out", "run"])
    assert asked == [40, 40, 40, 96]
    assert told.of("start") == [("run", 0, 12), ("test rows", 0, 96)]
    assert told.of("asked")[-1] == (96, 96)


def test_eval_rows_limits_what_is_asked(there, told, few, asked, capsys):
    main([*JOB, "--eval-rows", "10", "--out", "run", "--json"])
    assert asked == [10, 10, 10]
    assert "10 of 40 validation rows are asked" in [text for (text,) in told.of("say")]
    main(["eval", "run", "--eval-rows", "7", "--threads", "1", "--file", "validation.jsonl"])
    assert asked[3:] == [7]
    assert "7 rows" in capsys.readouterr().out
    ten = get_ready(
        Settings(host="bert", out="x", train_file="train.jsonl", validation_file="validation.jsonl", eval_rows=10)
    )
    whole = get_ready(Settings(host="bert", out="x", train_file="train.jsonl", validation_file="validation.jsonl"))
    assert ten.prepared.validation == whole.prepared.validation[::4], "evenly from all of them"


def test_eval_and_predict_show_their_rows(there, told, few, capsys):
    main([*JOB, "--out", "run"])
    for verb in ("eval", "predict"):
        told.calls.clear()
        main([verb, "run", "--file", "validation.jsonl", "--threads", "1"])
        assert told.calls == [("start", "rows", 0, 40), *(("asked", n, 40) for n in (16, 32, 40)), ("stop",)]


def test_the_time_left_is_over_everything(monkeypatch):
    """Steps of 1 s and an evaluation of 8 s after every second one: what is left of both is told."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    lines = Lines(written, every=0)
    lines.start("own", 0, 8)
    for step in range(1, 5):
        now[0] += 1
        lines.step(step, 0.5, "")
        if step % 2 == 0:
            now[0] += 8
            lines.asked(20, 40)
    now[0] += 1
    lines.step(5, 0.5, "")
    told = written.getvalue().splitlines()
    assert "evaluating 20/40" in written.getvalue()
    assert told[-1].endswith(f"{clock(21 / 5 * 3)} left"), "21 s for 5 of 8 steps, evaluations included"


def test_a_resumed_run_counts_only_its_own_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    lines = Lines(written, every=0)
    lines.start("own", 90, 100)
    now[0] = 5.0
    lines.step(95, 0.5, "")
    assert "0:05 left" in written.getvalue()


def test_the_bar_shows_evaluation_beside_training_and_as_its_own():
    written = io.StringIO()
    bar = Bar(Console(file=written, force_terminal=True, width=120))
    bar.start("own", 0, 4)
    bar.step(2, 0.25, "accuracy 0.500")
    bar.bars.refresh()
    assert re.search(r"own\s+\S+\s+2/4\s+loss 0\.250\s+accuracy 0\.500", plain(written.getvalue()))
    bar.asked(16, 40)
    bar.bars.refresh()
    bar.stop()
    shown = plain(written.getvalue())
    assert re.search(r"own\s+\S+\s+2/4\s+evaluating 16/40", shown)
    written.seek(written.truncate(0))
    bar.start("rows", 0, 40)
    bar.asked(16, 40)
    bar.bars.refresh()
    bar.stop()
    assert re.search(r"rows\s+\S+\s+16/40", plain(written.getvalue()))
