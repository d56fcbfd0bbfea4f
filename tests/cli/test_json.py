"""--json of every verb: one object on stdout and nothing else, with numbers as numbers."""

import json
import re

import click
import pytest

from inlay.cli import app, main
from inlay.cli.app import VERBS
from inlay.training.loop import TrainingLoop
from tests.cli.words import DATA

RUN = ("--host", "bert", "--train-file", "train.jsonl", "--validation-file", "validation.jsonl", "--batch-size", "16",
       "--epochs", "1", "--lr", "0.02", "--threads", "1")  # fmt: skip
SAID = {
    "train": ("train", *RUN, "--out", "json/train"),
    "finish": ("finish", "json/cut"),
    "fuse": ("fuse", "runs/a", "runs/b", *RUN, "--out", "json/fused"),
    "eval": ("eval", "runs/a", "--threads", "1"),
    "eval of several": ("eval", "runs/a", "runs/b", "--threads", "1"),
    "predict": ("predict", "runs/a", "good w1", "--threads", "1"),
    "inspect": ("inspect", "runs/fused"),
    "inspect of several": ("inspect", "runs/a", "runs/b/inlay"),
    "prune": ("prune", "runs/fused", "--keep", "1", "--out", "json/pruned", "--threads", "1"),
    "collapse": ("collapse", "runs/fused", "--out", "json/collapsed", "--threads", "1"),
    "merge": ("merge", "json/mixture", "--out", "json/merged"),
    "export": ("export", "runs/b", "--format", "adapterhub", "--without-head", "--out", "json/exported"),
    "import": ("import", "json/exported", "--host", "bert", "--out", "json/imported"),
    "params": ("params", "bert", "--method", "pfeiffer"),
    "params of all": ("params", "bert"),
    "ls": ("ls",),
    "ls runs": ("ls", "runs"),
    "validate": ("validate", *RUN),
    "demo": ("demo", "--out", "json/demo"),
}
A_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e-?\d+)?\s*(%|s|x|times|[KMG]?B|rows|tokens|steps)?\b.*")
TEXTS = {"versions", "text", "about", "closed_form", "path", "paths", "host", "settings", "notes"}
"""Fields that hold texts, which may begin with a digit."""


def test_every_verb_is_here():
    verbs = {verb for verb in VERBS if _takes_json(verb)}
    assert verbs == {words[0] for words in SAID.values()}


def _takes_json(verb):
    command = app.inlay.get_command(click.Context(app.inlay), verb)
    return any("--json" in param.opts for param in command.params)


@pytest.fixture(scope="module")
def ready(place, fused):
    """What some verbs need: a mixture, and a run that was cut short."""
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    step = TrainingLoop._train_step

    def stop(loop, rows):
        step(loop, rows)
        if loop.position.step == 2:
            raise KeyboardInterrupt

    try:
        mixture = ("--method", "mixture", "--options", "method={kind: pfeiffer, size: 4}", "--options", "modules=2")
        main(["train", *DATA, *mixture, "--out", "json/mixture", "--quiet", "--threads", "1"])
        patch.setattr(TrainingLoop, "_train_step", stop)
        with pytest.raises(SystemExit):
            main(["train", *DATA, "--save-every", "1", "--out", "json/cut", "--quiet", "--threads", "1"])
    finally:
        patch.undo()


def words_of(value, name=""):
    """Every text in a document, with the name of its field."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in TEXTS:
                yield from words_of(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from words_of(inner, name)
    elif isinstance(value, str):
        yield name, value


@pytest.mark.parametrize("name", SAID)  # in order: some read what others wrote
def test_one_object_with_numbers(name, ready, inlay_here, monkeypatch):
    monkeypatch.setattr("inlay.demo.run_demo", lambda out, say, **flags: say("a table for people") or {"seconds": 1.0})
    told = inlay_here(*SAID[name], "--json")
    found = json.loads(told, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert isinstance(found, dict)
    odd = [(field, text) for field, text in words_of(found) if A_NUMBER.fullmatch(text)]
    assert not odd, "a number is written as a number"


def test_inspect_shows_what_a_fusion_listens_to(inlay_here, fused):
    """The same means as those of the rows that the fusion was judged by, asked anew."""
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import attention_on

    found = json.loads(inlay_here("inspect", "runs/fused", "--json"))
    assert found["members"].keys() == {"a", "b"}
    opened = open_for_use(fused)
    wanted = attention_on(opened.host, opened.name, opened.codec.encode(opened.rows("validation")[1]))
    assert found["attention"].keys() == wanted.mean.keys() == {"encoder.0.ffn", "encoder.1.ffn"}
    for place, weights in found["attention"].items():
        assert weights == pytest.approx(wanted.by_member(place))
        assert sum(weights.values()) == pytest.approx(1)
    lines = inlay_here("inspect", "runs/fused").splitlines()
    at = next(i for i, line in enumerate(lines) if line.split() == ["it", "listens", "to", "a", "b"])
    assert [line.split()[0] for line in lines[at + 1 :]] == ["encoder.0.ffn", "encoder.1.ffn", "mean"]
    assert [float(cell) for cell in lines[-1].split()[1:]] == pytest.approx(list(wanted.overall().values()), abs=1e-4)


def test_attention_on_some_rows_is_that_of_rows_from_all_over(fused):
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import attention_on

    opened = open_for_use(fused)
    rows = opened.rows("validation")[1]
    some, alone, every = (
        attention_on(opened.host, opened.name, opened.codec.encode(given), at_most)
        for given, at_most in ((rows, 3), ([rows[len(rows) * i // 3] for i in range(3)], None), (rows, 1000))
    )
    for place in alone.mean:
        assert some.by_member(place) == pytest.approx(alone.by_member(place))
    assert any(some.by_member(place) != pytest.approx(every.by_member(place)) for place in alone.mean)
