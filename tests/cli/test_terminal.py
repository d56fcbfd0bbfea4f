"""What `inlay train` shows on a terminal."""

from __future__ import annotations

import json
import os
import re

import pytest

from inlay.cli import main
from tests.cli.terminal import WIDTH, plain, run_in_terminal, screen, terminal
from tests.cli.words import DATA, ROWS, RUN, TRAIN
from tests.training.small import rows, write_rows

LOOK = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
EPOCHS, STEPS = 12, 72


@pytest.fixture(scope="module")
def shown(place):
    """All that one long run writes to its terminal."""
    flags = ("--epochs", str(EPOCHS), "--patience", "0", "--name", "my-own", "--out", "runs/terminal", "--threads", "1")
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "TTY_COMPATIBLE")} | LOOK
    code, written = run_in_terminal(
        [*RUN, "train", *DATA, *flags], cwd=place, env=env | {"INLAY_CACHE": str(place / "cache")}
    )
    assert code == 0, written
    return written


def test_the_bar_shows_name_and_steps_and_what_is_done(shown):
    """Which moments are seen depends on the machine; test_watching has loss and metric without a clock."""
    seen = re.findall(r"my-own\s+\S+\s+(\d+)/(\d+)", plain(shown))
    steps = [int(step) for step, _ in seen]
    assert {total for _, total in seen} == {str(STEPS)}
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] == STEPS
    told = re.findall(r"/\d+\s+(loss (\S+)\s+(?:accuracy \d\.\d{3})?|evaluating \d+/\d+)", plain(shown))
    assert told, plain(shown)
    assert all(0 <= float(loss) < 10 for _, loss in told if loss)


def test_the_metric_shown_is_the_best_so_far(shown, place):
    entries = [json.loads(line) for line in (place / "runs" / "terminal" / "metrics.jsonl").read_text().splitlines()]
    best = {f"{max(e['validation_accuracy'] for e in entries[: i + 1]):.3f}" for i in range(len(entries))}
    assert set(re.findall(r"accuracy (\d\.\d{3})  ", plain(shown))) <= best


def test_nothing_of_the_bar_is_left(shown):
    lines = screen(shown)
    assert lines[0].startswith("labels found: negative, positive")
    assert lines[1].startswith("96 training rows are few: recipe few-labels")
    assert lines[2].split() == ["validation", "of", "own", "score"]
    assert [line.split()[0] for line in lines[3:]] == ["accuracy", "macro_f1", "inlay:", "report:"]


def test_no_line_is_longer_than_the_terminal(shown):
    assert all(len(line) <= WIDTH for line in plain(shown).replace("\r", "\n").split("\n"))


@pytest.fixture
def show(place, monkeypatch, capsys):
    """Run `inlay train …` in this process with its progress on a terminal; hands back what is seen there."""

    def run(*words):
        for name in ("CI", "NO_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in LOOK.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("INLAY_CACHE", str(place / "cache"))
        monkeypatch.chdir(place)
        monkeypatch.setattr(
            "transformers.utils.logging._tqdm_active", False
        )  # as in a process of our own: no bars of others
        with terminal() as (end, written), os.fdopen(os.dup(end), "w") as stream, monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            main(["train", "--host", "bert", "--batch-size", "8", "--max-steps", "2", "--threads", "1", *words])
        return screen(written[0])

    return run


def labelled(place, name, good, bad):
    return write_rows(place / name, [row | {"label": good if row["label"] == "positive" else bad} for row in rows(32)])


def test_it_can_be_seen_in_this_process_too(show, place):
    """That the two tests below fail for the brackets and nothing else."""
    labelled(place, "plain.jsonl", "b", "a")
    told = show(TRAIN, "plain.jsonl", "--out", "runs/plain")
    assert told[:2] == ["no validation rows: 3 training rows are held out for validation", "labels found: a, b"]
    assert told[2:] == ["29 training rows are few: recipe few-labels is used (the usual one: default)"]


@pytest.mark.parametrize(("good", "bad"), [("[/b]", "[b]"), ("[red]", "[blue]"), ("[link=x]", "a[0]")])
def test_labels_in_brackets_are_shown_as_they_are(show, place, good, bad):
    labelled(place, "brackets.jsonl", good, bad)
    told = show(TRAIN, "brackets.jsonl", "--out", f"runs/brackets-{len(good)}")
    assert f"labels found: {', '.join(sorted((good, bad)))}" in told


def test_a_folder_in_brackets_is_no_markup(show, place):
    assert show(*ROWS, "--out", "runs/[/b] x")[0] == "labels found: negative, positive"
    assert json.loads((place / "runs" / "[/b] x" / "run.json").read_text())["name"] == "b-x"


def test_quiet_shows_nothing(show):
    assert show(*ROWS, "--out", "runs/silent", "--quiet") == []
