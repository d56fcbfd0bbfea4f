"""Hosts that answer in text, T5, from the command line: train, eval, predict and resume."""

from __future__ import annotations

import json
import signal

import pytest
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from inlay.cli import main
from tests.cli.words import TRAIN
from tests.training.small import rows, save_decoder, save_t5, write_rows

STEPS = tuple(f"{fifth / 5:.1f}" for fifth in range(26))
NUMBERS = {"positive": 4.23, "negative": 1.08}
"""Not multiples of 0.2: a host that answers in text says the nearest, 4.2 and 1.0."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    save_t5(folder / "t5", STEPS)
    save_decoder(folder / "llama")
    said = [{"source": row["text"], "said": [row["label"], f"good {row['label']}"]} for row in rows(96)]
    write_rows(folder / "said.jsonl", said)
    write_rows(folder / "said-validation.jsonl", said[:24])
    for name, count, seed in (("train", 96, 0), ("validation", 40, 1)):
        write_rows(folder / f"{name}.jsonl", rows(count, seed))
        numbers = [row | {"label": NUMBERS[row["label"]]} for row in rows(count, seed)]
        write_rows(folder / f"{name}-numbers.jsonl", numbers)
    return folder


@pytest.fixture
def say(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("INLAY_CACHE", str(desk / "cache"))

    def run(*words):
        capsys.readouterr()
        main([*words])
        return capsys.readouterr().out

    return run


def train(kind, out, *more):
    end = "-numbers.jsonl" if kind == "regression" else ".jsonl"
    files = (TRAIN, f"train{end}", "--validation-file", f"validation{end}", "--kind", kind)
    steps = ("--batch-size", "16", "--lr", "0.02", "--patience", "0", "--threads", "1", "--quiet", "--json")
    return ("train", "--host", "t5", *files, *steps, "--out", out, *more)


@pytest.mark.parametrize(
    ("kind", "metric", "field", "said"),
    [
        ("classification", "accuracy", "label", {"positive": "positive", "negative": "negative"}),
        ("regression", "pearson", "prediction", {"positive": 4.2, "negative": 1.0}),
    ],
)
def test_train_eval_and_predict(say, desk, kind, metric, field, said):
    """The whole host trains: one of random weights cannot say anything otherwise."""
    out = f"runs/{kind}"
    told = json.loads(say(*train(kind, out, "--mode", "full", "--epochs", "8")))
    assert told["scores"][metric] >= 0.8
    measured = json.loads(say("eval", out, "--json"))
    assert (measured["rows"], measured["scores"]) == (40, told["scores"])
    answers = [json.loads(line) for line in say("predict", out, "--file", "validation.jsonl").splitlines()]
    right = [answer[field] == said[row["label"]] for answer, row in zip(answers, rows(40, 1), strict=True)]
    assert sum(right) / len(right) >= 0.8
    assert kind == "regression" or sum(right) / len(right) == told["scores"]["accuracy"]
    assert all(answer.get("probabilities") is None for answer in answers), "a text has none"
    alone = json.loads(say("predict", out, answers[0]["text"]))
    assert alone == {name: value for name, value in answers[0].items() if name in alone}, "the file's label is kept"


def test_numbers_are_learned_and_said_in_steps_of_a_fifth(say, desk):
    """The answers of every validation row; a text that is no number counts as 0."""
    out = "runs/fifths"
    say(*train("regression", out, "--method", "houlsby", "--options", "reduction=1", "--epochs", "3"))
    told = say("predict", out, "--file", "validation-numbers.jsonl")
    said = [json.loads(line)["prediction"] for line in told.splitlines()]
    assert len(said) == 40
    assert all(abs(value * 5 - round(value * 5)) < 1e-9 for value in said)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(say, desk, kind, capsys):
    flags = ("--name", "own", "--method", "houlsby", "--options", "reduction=2", "--epochs", "3", "--save-every", "2")
    whole, parted = f"runs/{kind}-whole", f"runs/{kind}-parted"
    expected = json.loads(say(*train(kind, whole, *flags)))
    steps = 0

    def stop(optimizer, *_):
        nonlocal steps
        steps += 1
        if steps == 9:
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_post_hook(stop)
    try:
        with pytest.raises(SystemExit) as left:
            say(*train(kind, parted, *flags))
    finally:
        hook.remove()
    assert left.value.code == 130
    assert f"To go on: inlay train --resume {parted}" in capsys.readouterr().err
    assert json.loads((desk / parted / "run.json").read_text())["status"] == "interrupted"
    again = json.loads(say("train", "--resume", parted, "--quiet", "--json"))
    assert (again["scores"], again["steps"]) == (expected["scores"], 18)
    one, two = (load_file(desk / run / "inlay" / "weights.safetensors") for run in (whole, parted))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


# decoders


def told_to(out, *more):
    columns = ("--kind", "text", "--text", "source", "--label", "said", "--template", "{source} {eos} {target}")
    files = (TRAIN, "said.jsonl", "--validation-file", "said-validation.jsonl")
    how = ("--batch-size", "16", "--lr", "0.02", "--epochs", "3", "--threads", "1", "--quiet", "--json")
    return ("train", "--host", "llama", *files, *columns, *how, "--out", out, *more)


@pytest.fixture(scope="module")
def writer(desk):
    return "runs/writer"


def test_a_decoder_is_trained_measured_and_asked_in_text(say, desk, writer, monkeypatch, capsys):
    told = json.loads(
        say(*told_to(writer, "--method", "houlsby", "--options", "reduction=1", "--packing", "--beams", "2"))
    )
    assert told["scores"]["token_f1"] > 0.4
    assert told["rows"] == {"train": 192, "validation": 23, "test": 0}, "each right answer is trained on, scored once"
    assert told["settings"]["max_new_tokens"] == 3 + 8  # good positive </s>
    measured = json.loads(say("eval", writer, "--json"))
    assert measured["scores"] == told["scores"]
    by_file = json.loads(say("eval", writer, "--file", "said-validation.jsonl", "--json"))
    assert by_file["scores"] == told["scores"]
    answers = [json.loads(line) for line in say("predict", writer, "--file", "said-validation.jsonl").splitlines()]
    alone = json.loads(say("predict", f"{writer}/inlay", "--host", "llama", answers[0]["source"]))
    assert alone["prediction"] == answers[0]["prediction"], "the inlay alone writes as its run does: two beams"
    greedy = json.loads(say("predict", writer, answers[0]["source"], "--beams", "1"))["prediction"]
    pieces = []
    monkeypatch.setattr("click.echo", lambda piece="", nl=True, **_: pieces.append(piece + ("\n" if nl else "")))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say("predict", writer, answers[0]["source"], "--beams", "1")
    assert "".join(pieces).strip() == greedy
    assert len(pieces) > 2, "on a terminal it is shown as it is written"


def test_the_recipe_of_adamix_for_text_trains_a_decoder(say, desk):
    short = ("--recipe", "adamix-nlg", "--max-steps", "3", "--warmup", "1", "--eval-rows", "4", "--beams", "3")
    told = json.loads(say(*told_to("runs/adamix", *short)))
    assert (told["method"], told["settings"]["consistency"], told["settings"]["no_repeat_ngram"]) == (
        "mixture",
        100.0,
        4,
    )
    say("merge", "runs/adamix", "--out", "runs/merged")
    one = say("predict", "runs/adamix", "good w1", "--json")
    assert json.loads(say("predict", "runs/merged", "--host", "llama", "good w1", "--json")) == json.loads(one)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--template", "{source}"), "has no {target}"),
        (("--template", "{target} {source}"), "a decoder answers at the end"),
        (("--template", "{sauce} {target}"), "has no column 'sauce'"),
        (("--max-length", "4"), "leaves nothing of the answer after the text of row"),
        (("--sampling", "1", "--beams", "2"), "sampling follows one beginning"),
        (("--top-k", "3"), "top_k is 3, but nothing would use it: it needs sampling"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(say, desk, capsys, flags, told):
    with pytest.raises(SystemExit) as left:
        say(*told_to("runs/mistake", *flags))
    assert left.value.code == 2
    assert told in capsys.readouterr().err
    assert not (desk / "runs" / "mistake").exists()
