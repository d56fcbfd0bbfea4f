"""Write tests/golden/before/: what the code wrote before its modules moved, for tests/test_before.py.

Kept to show how the files came about. It runs only with the code at commit 37df3cd, whose modules it reaches into:

    PYTHONPATH=src:. HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python tools/make_before.py

Random hosts of two layers and width 16, inlays with random weights, and runs over the toy rows of
tests/learning/small.py. The expected logits are those of the inlays that were saved, not of loaded ones.

Runs are the command line's own, in one folder whose path is replaced by @HERE@ in config.yaml and run.json; nothing
digests those two. Their report.html and .lock, which nothing reads, are left out. A run is interrupted by SIGTERM, as
in tests/learning/test_resume.py, and resumed in a copy; that must give what the same run gives without an interrupt.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from inlay.learning.loop import _Loop
from safetensors.torch import save_file
from tests.learning.small import rows, save_bert, save_t5, write_rows
from torch import Tensor

import inlay
from inlay.cli import main as command
from tests.hosts import batch, classifier, logits, shake
from tests.test_before import BEFORE, INLAYS, INTERRUPTED, SETUPS, TRAINED, trained_tensors

INTERRUPT_AT, STEPS = 8, 18
FUSION_SEED = 24
"""With it the two layers of bert listen to different members."""
HOSTS: dict[str, dict[str, Any]] = {"bert": {"max_position_embeddings": 16}, "t5": {}, "gpt2": {"n_positions": 16}}
POOLED = inlay.Head(labels=("no", "yes"), pooling="mean", layers=2)
COPIED = inlay.Head(labels=("left", "right", "neither"))
METHODS: dict[str, tuple[inlay.Method, inlay.Head | None]] = {
    "pfeiffer": (inlay.Pfeiffer(reduction=4), POOLED),
    "second": (inlay.Pfeiffer(size={1: 3, "default": 5}), POOLED),
    "houlsby": (inlay.Houlsby(reduction=4), COPIED),
    "parallel": (inlay.Parallel(reduction=4, scale="learned"), None),
    "bapna": (inlay.Bapna(reduction=4), None),
    "phm": (inlay.PHM(reduction=4, n=2), None),
    "compacter": (inlay.Compacter(reduction=4, n=2), None),
    "compacter-pp": (inlay.CompacterPlusPlus(reduction=2, n=4), inlay.Head(labels=1, pooling="first")),
    "lowrank": (inlay.LowRank(reduction=4), None),
    "bitfit": (inlay.BitFit(), None),
    "lora": (inlay.LoRA(rank=2, targets=("q", "v"), bias="targets"), None),
    "mixture-pfeiffer": (inlay.Mixture(inlay.Pfeiffer(reduction=4), modules=3), POOLED),
    "mixture-lora": (inlay.Mixture(inlay.LoRA(rank=2), modules=2, share="down"), None),
    "mixture-compacter": (inlay.Mixture(inlay.Compacter(reduction=4, n=2), modules=2, share=None), None),
    "head": (inlay.HeadOnly(), inlay.Head(labels=3, pooling="first", activation="gelu")),
    "thinned": (inlay.Houlsby(reduction=4), None),
}
HEADS = {"t5": COPIED, "gpt2": inlay.Head(labels=("no", "yes"), pooling="last")}
"""Where a host cannot have the pooled head."""


def write_inlays(here: Path, family: str) -> None:
    host = classifier(family, **HOSTS[family])
    host.save_pretrained(here / "hosts" / family)
    inputs = batch()
    found = {"bare": logits(host, inputs)}
    for seed, name in enumerate(INLAYS[family], start=1):
        if name in METHODS:
            method, head = METHODS[name]
            inlay.add(host, name, method, head=HEADS.get(family, head) if head is POOLED else head)
            shake(host, name, seed)
        else:
            add_fused(host, name, inputs)
        if name == "thinned":
            inlay.leave_out(host, name, [0])
    for name in INLAYS[family]:
        inlay.save(host, name, here / family / name, task="toy", metrics={"accuracy": 0.5})
        inlay.activate(host, name)
        found[name] = logits(host, inputs)
    for name, setup in SETUPS.items() if family == "bert" else ():
        inlay.activate(host, setup())
        found[name] = logits(host, inputs)
    tensors = found | {f"input.{name}": tensor for name, tensor in inputs.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, here / family / "expected.safetensors")


def add_fused(host: torch.nn.Module, name: str, inputs: dict[str, Tensor]) -> None:
    """The fusion, and what is made of it."""
    if name == "fusion":
        inlay.add_fusion(host, name, ["pfeiffer", "second"])
        shake(host, name, FUSION_SEED)
    elif name == "wide":
        inlay.collapse(host, "fusion", [inputs], name=name)
    else:
        seen = inlay.fusion_activations(host, "fusion", [inputs])
        if name == "pruned":
            inlay.prune(host, "fusion", seen, name=name, keep=1)
        else:
            inlay.prune(host, "fusion", seen, name=name, threshold=0.5, per_layer=True)


def say(*words: str) -> str:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        command([*words])
    return told.getvalue()


DATA = ("--train", "rows/train.jsonl", "--validation", "rows/validation.jsonl", "--test", "rows/test.jsonl")
WORDS = ("--host", "hosts/words", *DATA, "--threads", "1", "--quiet", "--json")
TEXT = (*DATA, "--threads", "1", "--quiet", "--json")
FAST = ("--batch-size", "16", "--epochs", "3", "--lr", "0.02")
PFEIFFER = ("--method", "pfeiffer", "--options", "reduction=4", "--options", "dropout=0.1")
MIXTURE = ("--method", "mixture", "--options", "method={kind: pfeiffer, reduction: 4}", "--options", "modules=3")
RUNS: dict[str, tuple[str, ...]] = {
    "a": ("train", *WORDS, *PFEIFFER, *FAST),
    "b": ("train", *WORDS, "--method", "houlsby", "--options", "reduction=8", "--seed", "1", *FAST),
    "mixture": ("train", *WORDS, *MIXTURE, *FAST),
    "fused": ("fuse", "trained/a", "trained/b", *WORDS, *FAST),
    "pruned": ("prune", "trained/fused", "--keep", "1", "--threads", "1", "--json"),
    "head": ("train", *WORDS, "--mode", "head", "--head-layers", "2", *FAST),
    "full": ("train", *WORDS, "--mode", "full", *FAST[:-1], "0.008"),
    "text-full": ("train", "--host", "hosts/t5-words", *TEXT, "--mode", "full", *FAST),
    "text": (
        "train",
        "--host",
        "trained/text-full/host",
        *TEXT,
        "--method",
        "houlsby",
        "--options",
        "reduction=4",
        *FAST,
    ),
}
CUT: dict[str, tuple[str, ...]] = {
    "pfeiffer": (*RUNS["a"][:-1], "0.005"),
    "mixture": (*RUNS["mixture"][:-1], "0.005"),
    "fusion": RUNS["fused"],
    "full": RUNS["full"],
}
"""With these rates all but the fusion are at their best after the interrupt."""


ASKED = ("--threads", "1", "--json")


def write_runs(here: Path) -> None:
    expected = {}
    for name in TRAINED:
        run = f"trained/{name}"
        with named_shortly("fused", run) if name == "pruned" else contextlib.nullcontext():
            say(*RUNS[name], "--out", run)
        scores = {s: json.loads(say("eval", run, "--split", s, *ASKED))["scores"] for s in ("validation", "test")}
        said = say("predict", run, "--file", "rows/test.jsonl", "--threads", "1").splitlines()
        expected[name] = {**scores, "predictions": list(map(json.loads, said))}
        print(name, scores)
    (here / "trained.json").write_text(json.dumps(expected, indent=1) + "\n")


@contextlib.contextmanager
def named_shortly(source: str, run: str) -> Iterator[None]:
    """A pruned inlay notes its host as the fusion's run names it, in a manifest with a digest: not by a whole path."""
    old, new = Path("trained", source, "run.json"), Path(run, "run.json")
    whole = old.read_text()
    old.write_text(json.dumps(json.loads(whole) | {"host": "hosts/words"}, indent=1) + "\n")
    yield
    old.write_text(whole)
    new.write_text(json.dumps(json.loads(new.read_text()) | {"host": json.loads(whole)["host"]}, indent=1) + "\n")


def write_interrupted(here: Path, aside: Path) -> None:
    expected = {}
    original = _Loop._step

    def step(self: Any, chosen: list[int]) -> None:
        original(self, chosen)
        if self.position.step == INTERRUPT_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    for name in INTERRUPTED:
        run, whole, resumed = here / "interrupted" / name, aside / f"{name}-whole", aside / name
        say(*CUT[name], "--name", name, "--out", str(whole))
        _Loop._step = step
        with contextlib.suppress(SystemExit):
            say(*CUT[name], "--name", name, "--out", str(run))
        _Loop._step = original
        assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
        shutil.copytree(run, resumed)
        record = json.loads(say("train", "--resume", str(resumed), "--quiet", "--json"))
        tensors, straight = trained_tensors(resumed), trained_tensors(whole)
        assert tensors.keys() == straight.keys()
        assert all(torch.equal(tensor, straight[key]) for key, tensor in tensors.items())
        assert record["steps"] == STEPS
        (here / "resumed").mkdir(exist_ok=True)
        save_file(tensors, here / "resumed" / f"{name}.safetensors")
        expected[name] = {"steps": STEPS - INTERRUPT_AT, **{key: record[key] for key in ("scores", "validation")}}
        print(name, expected[name], "best", record["best_step"])
    (here / "resumed.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        here, aside = Path(folder).resolve() / "before", Path(folder).resolve() / "aside"
        here.mkdir()
        os.environ["INLAY_CACHE"] = str(aside / "cache")
        os.chdir(here)
        for family in INLAYS:
            write_inlays(here, family)
        save_bert(here / "hosts" / "words")
        save_t5(here / "hosts" / "t5-words")
        for seed, (split, count) in enumerate({"train": 96, "validation": 40, "test": 24}.items()):
            write_rows(here / "rows" / f"{split}.jsonl", rows(count, seed))
        write_runs(here)
        write_interrupted(here, aside)
        for unread in [*here.rglob("report.html"), *here.rglob(".lock")]:
            unread.unlink()
        for pattern in ("config.yaml", "run.json"):
            for file in here.rglob(pattern):
                file.write_text(file.read_text(encoding="utf-8").replace(str(here), "@HERE@"), encoding="utf-8")
        named = [file for file in here.rglob("*") if file.is_file() and folder.encode() in file.read_bytes()]
        assert not named, named
        shutil.rmtree(BEFORE, ignore_errors=True)
        os.chdir(BEFORE.parent)
        shutil.copytree(here, BEFORE)


if __name__ == "__main__":
    main()
