"""What an earlier version wrote still loads: inlays, finished runs, and runs that were interrupted.

`tests/golden/before/` was written by tools/make_before.py, with the code as it was before its modules moved. Only the
public API and the command line are used here.

<family>/<inlay>/                 as `inlay.save` wrote it
<family>/expected.safetensors     input.<name>, and the logits of every inlay, setup and of the bare host
hosts/, rows/                     tiny hosts and toy rows; `words` has a tokenizer
trained/<run>/                    run folders without their reports; @HERE@ is the folder that they are in
trained.json                      what `inlay eval` and `inlay predict` said of them
interrupted/<run>/                runs with a checkpoint
resumed/<run>.safetensors         the inlay that came of each; resumed.json the steps it took, and the scores
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import inlay
from inlay.cli import main

BEFORE = Path(__file__).parent / "golden" / "before"
METHODS = (
    "pfeiffer", "second", "houlsby", "parallel", "bapna", "phm", "compacter", "compacter-pp", "lowrank", "bitfit", "lora",
    "mixture-pfeiffer", "mixture-lora", "mixture-compacter", "fusion", "pruned", "pruned-layers", "wide", "head", "thinned",
)  # fmt: skip
INLAYS = {
    "bert": METHODS,
    "t5": ("pfeiffer", "second", "compacter", "lora", "fusion"),
    "gpt2": ("pfeiffer", "second", "houlsby", "bitfit", "lora", "fusion"),
}
SETUPS: dict[str, Callable[[], Any]] = {
    "stack": lambda: inlay.Stack("houlsby", "pfeiffer"),
    "average": lambda: inlay.Average("compacter", "lora", weights=[1, 3]),
    "rows": lambda: inlay.Rows("pfeiffer", "second", "pfeiffer"),
    "pinned": lambda: inlay.Fuse("fusion", pin={"second": 0.25}),
    "fusion on lora": lambda: inlay.Stack("lora", "fusion"),
}
"""On bert."""
TRAINED = ("a", "b", "mixture", "fused", "pruned", "head", "full", "text-full", "text")
INTERRUPTED = ("pfeiffer", "mixture", "fusion", "full")
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def host_of(family: str) -> hf.PreTrainedModel:
    return hf.AutoModelForSequenceClassification.from_pretrained(BEFORE / "hosts" / family).eval()


def expected(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs, and the logits by setup."""
    found = load_file(BEFORE / family / "expected.safetensors")
    inputs = {key.removeprefix("input."): found.pop(key) for key in sorted(found) if key.startswith("input.")}
    return inputs, found


def load(host: hf.PreTrainedModel, family: str, name: str) -> None:
    """An inlay, after the members it is over."""
    for member in manifest(BEFORE / family / name)["members"]:
        if not on(host, member):
            load(host, family, member)
    assert inlay.load(host, BEFORE / family / name) == name


def on(host: hf.PreTrainedModel, name: str) -> bool:
    return any(row.name == name for row in inlay.summary(host).rows)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "inlay.json").read_text())


def check(host: hf.PreTrainedModel, inputs: dict[str, Tensor], wanted: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(host(**inputs).logits, wanted, **CLOSE)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in INLAYS.items() for name in names])
def test_an_inlay_loads_acts_and_is_saved_as_before(family, name, tmp_path):
    host, (inputs, wanted) = host_of(family), expected(family)
    check(host, inputs, wanted["bare"])
    load(host, family, name)
    inlay.activate(host, name)
    check(host, inputs, wanted[name])
    inlay.activate(host, None)
    check(host, inputs, wanted["bare"])
    again = inlay.save(host, name, tmp_path / "again")
    before, now = manifest(BEFORE / family / name), manifest(again)
    for what in ("format", "name", "method", "head", "norms", "members"):
        assert before[what] == now[what]
    old, new = (load_file(folder / "weights.safetensors") for folder in (BEFORE / family / name, again))
    assert old.keys() == new.keys()
    assert all(torch.equal(tensor, new[key]) for key, tensor in old.items())


def test_all_of_them_load_on_one_host_and_combine():
    host, (inputs, wanted) = host_of("bert"), expected("bert")
    for name in INLAYS["bert"]:
        if not on(host, name):
            load(host, "bert", name)
    for name, setup in SETUPS.items():
        inlay.activate(host, setup())
        check(host, inputs, wanted[name])


@pytest.mark.parametrize("family", INLAYS)
def test_every_folder_has_its_test(family):
    """And every inlay does something: its logits are neither the bare host's nor another's."""
    assert {folder.name for folder in (BEFORE / family).iterdir() if folder.is_dir()} == set(INLAYS[family])
    _, wanted = expected(family)
    assert wanted.keys() == {"bare", *INLAYS[family], *(SETUPS if family == "bert" else ())}
    for name, logits in wanted.items():
        others = [other for key, other in wanted.items() if key != name and other.shape == logits.shape]
        assert all((logits - other).abs().max() > 1e-3 for other in others), name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of everything, in which the runs know where they are."""
    here = tmp_path_factory.mktemp("before") / "here"
    shutil.copytree(BEFORE, here)
    for pattern in ("config.yaml", "run.json"):
        for file in here.rglob(pattern):
            file.write_text(file.read_text(encoding="utf-8").replace("@HERE@", str(here)), encoding="utf-8")
    return here


@pytest.fixture
def say(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `inlay …` in that copy; hands back what it prints."""
    monkeypatch.setenv("INLAY_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)

    def run(*words: str) -> str:
        capsys.readouterr()
        main([*words])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_is_measured_and_predicts_as_before(name, say, place):
    wanted = json.loads((place / "trained.json").read_text())[name]
    run = f"trained/{name}"
    told = json.loads(say("eval", run, "--split", "validation", "--threads", "1", "--json"))
    assert told["scores"] == wanted["validation"]
    assert json.loads(say("eval", run, "--threads", "1", "--json"))["scores"] == wanted["test"]
    told = say("predict", run, "--file", "rows/test.jsonl", "--threads", "1").splitlines()
    same(list(map(json.loads, told)), as_before_with_columns(wanted["predictions"]))


def as_before_with_columns(predictions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row keeps its own label now, and the answer stands beside it under a name of its own."""
    rows = [json.loads(line) for line in (BEFORE / "rows" / "test.jsonl").read_text().splitlines()]
    return [
        {"text": p["text"], "label": row["label"], "predicted_label": p["label"], "probabilities": p["probabilities"]}
        for p, row in zip(predictions, rows, strict=True)
    ]


def test_a_text_is_labelled_as_before(say, place):
    wanted = json.loads((place / "trained.json").read_text())["a"]["predictions"][:1]
    same([json.loads(say("predict", "trained/a", wanted[0]["text"], "--threads", "1"))], wanted)


@pytest.mark.parametrize("name", ["a", "mixture", "head"])
def test_a_runs_inlay_is_measured_without_its_run(name, say, place):
    wanted = json.loads((place / "trained.json").read_text())[name]["test"]
    flags = ("--host", "hosts/words", "--file", "rows/test.jsonl", "--threads", "1", "--json")
    assert json.loads(say("eval", f"trained/{name}/inlay", *flags))["scores"] == wanted


def same(told: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Predictions; their probabilities are rounded to six digits."""
    assert [row | {"probabilities": None} for row in told] == [row | {"probabilities": None} for row in wanted]
    for here, there in zip(told, wanted, strict=True):
        assert here["probabilities"] == pytest.approx(there["probabilities"], abs=2e-6)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_goes_on_from_its_checkpoint(name, say, place):
    wanted = json.loads((place / "resumed.json").read_text())[name]
    run = place / "interrupted" / name
    assert (run / "checkpoint.safetensors").is_file()
    steps = []
    counting = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        record = json.loads(say("train", "--resume", str(run), "--json", "--quiet"))
    finally:
        counting.remove()
    assert len(steps) == wanted["steps"], "it did not go on from the checkpoint"
    assert record["status"] == "finished"
    assert (record["scores"], record["validation"]) == (wanted["scores"], wanted["validation"])
    assert not (run / "checkpoint.safetensors").exists()
    old, new = load_file(place / "resumed" / f"{name}.safetensors"), trained_tensors(run)
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        # no logit depends on a key's bias: its gradient is rounding, of which AdamW makes steps, each machine its own
        near = {"atol": 1e-4, "rtol": 0.0} if key.endswith("key.bias") else CLOSE
        torch.testing.assert_close(new[key], tensor, **near)
    assert json.loads(say("eval", str(run), "--threads", "1", "--json"))["scores"] == record["scores"]


def trained_tensors(run: Path) -> dict[str, Tensor]:
    """What a run learned: the inlay's tensors, and the host's after full fine-tuning."""
    found = load_file(run / "inlay" / "weights.safetensors")
    host = run / "host" / "model.safetensors"
    return found | ({f"host.{key}": tensor for key, tensor in load_file(host).items()} if host.exists() else {})


def test_nothing_names_the_machine_it_was_made_on():
    for file in BEFORE.rglob("*"):
        assert file.is_dir() or not any(word in file.read_bytes() for word in (b"/work", b"/root", b"/tmp", b"/home"))
