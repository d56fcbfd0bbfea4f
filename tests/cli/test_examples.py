"""Every example in a help text, and every command of docs/cli.md, is run: on a tiny host under the name they use.

Training is cut to one epoch, the hub's rows are made up, and the demo, which downloads, is only called.
"""

import io
import json
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from inlay.cli import main
from inlay.cli.app import VERBS
from inlay.data import sources
from inlay.data.rows import Table
from inlay.serve import Engine, build_app
from tests.training.small import rows, save_bert, save_t5, write_rows

SHORT = {"train", "fuse", "validate"}
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def examples() -> list[str]:
    found = []
    for verb in VERBS:
        text = import_module(f"inlay.cli.{'import_' if verb == 'import' else verb}").HELP
        found += re.findall(r"^  ((?:cat \S+ \| )?inlay .+)$", text, re.M)
    for block in re.findall(r"^```bash\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.S | re.M):
        found += [line for line in block.splitlines() if line.startswith("inlay ")]
    return list(dict.fromkeys(found))


def from_the_hub(hub, task):
    """Rows of any task, from words that the tiny host knows."""
    labels = task.labels or ("0", "1")
    made = []
    for i in range(24):
        row = dict.fromkeys(task.columns(), "good w1" if i % 2 else "bad w2")
        row |= {"choices": ["good w1", "bad w2"]} if task.kind == "choice" else {}
        made.append(row | {task.label: i % 2 if task.kind == "choice" else labels[i % len(labels)]})
    return {"train": Table(made, "hub"), "validation": Table(made[:8], "hub")}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    save_t5(folder / "t5-base")
    save_bert(folder / "bert-base-uncased", hidden_size=128)  # so that a Compacter divides it
    for name, text, label in (
        ("mine.csv", "review", "stars"),
        ("others.csv", "comment", "rating"),
        ("reviews.csv", "review", "n"),
    ):
        lines = [f"{row['text']},{row['label']}" for row in rows(40)]
        (folder / name).write_text("\n".join([f"{text},{label}", *lines]) + "\n")
    (folder / "keys.txt").write_text("admin a-key-of-many-letters\n")
    (folder / "reviews.txt").write_text("good w1\nbad w2\n")
    write_rows(folder / "more.jsonl", [{"premise": "good", "hypothesis": "bad", "label": "entailment"}] * 3)
    (folder / "rte.yaml").write_text("host: bert-base-uncased\ntask: rte\nout: runs/unnamed\n")
    (folder / "small.yaml").write_text(
        "hosts: {bert: bert-base-uncased}\ntasks: {own: {train_file: mine.csv, text: review, label: stars}}\n"
        "settings: {epochs: 1, batch_size: 8}\nways: {head: {kind: head}}\n"
    )
    (folder / "path" / "to" / "data").mkdir(parents=True)
    (folder / "data" / "rte").mkdir(parents=True)
    shutil.copyfile(folder / "more.jsonl", folder / "data" / "rte" / "validation.jsonl")
    return folder


@pytest.fixture
def run(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setenv("INLAY_CACHE", str(here / "cache"))
    monkeypatch.setattr(sources, "_from_hub", from_the_hub)
    monkeypatch.setattr("inlay.demo.run_demo", lambda *words, **flags: {})
    monkeypatch.setattr("inlay.demo.text.run_text_demo", lambda *words, **flags: {})
    monkeypatch.setattr("inlay.serve.server.serve", lambda engine, *words, **flags: engine.close())  # it would not end
    monkeypatch.setattr(
        "inlay.serve.replicas.run_replicas", lambda order, *words, **flags: None
    )  # test_replicas has it

    def run(line):
        if " | " in line:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((here / "reviews.txt").read_bytes())))
            line = line.partition(" | ")[2]
        words = shlex.split(line)[1:]
        if words[0] in SHORT and "--resume" not in words:
            words += ["--epochs", "1", "--batch-size", "8", "--threads", "1"]
        if "--server" in words:
            served = Engine.open(["runs/sentiment"])
            monkeypatch.setattr("inlay.serve.client.httpx.Client", lambda **how: TestClient(build_app(served)))
        if "--out" in words and words[0] != "predict":
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        main(words)

    return run


def test_every_example_runs(run, here, capsys):
    train = "inlay train --host bert-base-uncased --quiet"
    for name, more in {
        "rte": "--task rte", "mnli": "--task mnli", "qqp": "--task qqp", "copa": "--task copa",
        "mine": "--train-file mine.csv --text review --label stars", "sentiment": "--train-file mine.csv --text review --label stars",
        "rte-lora": "--task rte --method lora",
        "rte-mixture": "--task rte --method mixture --options 'method={kind: pfeiffer, size: 4}'",
    }.items():  # fmt: skip
        run(f"{train} {more} --out runs/{name}")
    shutil.copytree(here / "runs" / "rte-mixture", here / "runs" / "mixture")
    run("inlay fuse runs/mnli runs/qqp runs/rte --task rte --out runs/rte-fused --quiet")
    for other in ("cb", "mrpc"):
        shutil.copytree(here / "runs" / "rte-fused", here / "runs" / f"{other}-fused")
    run("inlay export runs/rte-lora --format peft --without-head --out downloads/rte-lora")
    for line in examples():
        if "--resume" in line or line.startswith("inlay finish"):
            with pytest.raises(SystemExit):  # the run is finished: a mistake in words
                run(line)
            told = capsys.readouterr().err
            assert "is finished" in told, f"{line}\n{told}"
        else:
            run(line)
    assert json.loads((here / "labels.jsonl").read_text().splitlines()[0])["label"]
