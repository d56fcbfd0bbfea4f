"""A new method is one registered class: everything else in Inlay knows it without another line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import inlay
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.cli import main
from inlay.methods.acting import Reads
from inlay.methods.base import METHODS, BottleneckForm, register
from tests.hosts import batch, classifier
from tests.training.small import rows, save_bert, write_rows

LABELLED = batch(4) | {"labels": torch.tensor([0, 1, 0, 1])}


class Squeeze(nn.Module):
    """δ = up tanh(down x)"""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(x)))


class ReadableSqueeze(Squeeze):
    """The same, and a fusion can read it."""

    def form(self, reads: Reads) -> BottleneckForm:
        return BottleneckForm(reads, False, "tanh", self.down.weight, self.down.bias, self.up.weight.T, self.up.bias)


class Squeezing(inlay.Method):
    """What both new methods have in common."""

    size: int = 3
    """The width of the squeeze."""

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        yield from anatomy.of_kind("ffn")

    def reads_at(self, place: Place) -> Reads:
        return "output"


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    """Two new methods, known for the length of a test."""
    known = dict(METHODS)

    @register("squeeze")
    class Squeezed(Squeezing):
        """A squeeze after the FFN, made up for this test."""

        rate: ClassVar[float] = 2e-2
        epochs: ClassVar[int] = 2
        mixes: ClassVar[tuple[str, ...]] = ("down", "up")

        def build(self, place: Place, shared: nn.Module) -> nn.Module:
            return ReadableSqueeze(place.d_out, self.size)

    @register("closed")
    class Closed(Squeezing):
        """A squeeze that neither a fusion nor a mixture can take apart."""

        def build(self, place: Place, shared: nn.Module) -> nn.Module:
            return Squeeze(place.d_out, self.size)

    yield
    METHODS.clear()
    METHODS.update(known)


def new(kind: str, **fields: int) -> inlay.Method:
    return METHODS[kind](**fields)


def train_a_step(host: nn.Module, name: str) -> None:
    inlay.train(host, name)
    trained = [parameter for parameter in host.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    loss = host(**LABELLED).loss + inlay.penalty(host)
    loss.backward()
    optimizer.step()
    assert any(not torch.equal(now, old) for now, old in zip(trained, before, strict=True))


def logits(host: nn.Module) -> Tensor:
    host.eval()
    with torch.no_grad():
        return host(**batch(4)).logits


@pytest.mark.parametrize("kind", ["squeeze", "closed"])
def test_it_is_added_trained_saved_loaded_and_counted(kind: str, tmp_path: Path) -> None:
    host = classifier()
    bare = logits(host)
    inlay.add(host, "new", new(kind, size=4), head=inlay.Head(labels=2))
    train_a_step(host, "new")
    told = logits(host)
    assert told.shape != bare.shape or not torch.equal(told, bare)
    inlay.save(host, "new", tmp_path / "new")
    other = classifier()
    inlay.load(other, tmp_path / "new")
    inlay.activate(other, "new")
    torch.testing.assert_close(logits(other), told)
    assert inlay.count(host.config, new(kind, size=4)).trainable == 2 * (2 * 16 * 4 + 16 + 4)


def test_a_mixture_of_it_trains_and_merges() -> None:
    host = classifier()
    inlay.add(host, "mixed", inlay.Mixture(new("squeeze"), modules=2), head=inlay.Head(labels=2))
    train_a_step(host, "mixed")
    inlay.mixture_loss(host, LABELLED).loss.backward()
    told = logits(host)
    inlay.merge(host, "mixed")
    torch.testing.assert_close(logits(host), told)
    with pytest.raises(inlay.ConfigError, match="a mixture takes a method with two projections"):
        inlay.Mixture(new("closed"))


def test_a_fusion_takes_what_it_can_read_and_refuses_the_rest() -> None:
    host = classifier()
    for name, kind in (("a", "squeeze"), ("b", "squeeze"), ("c", "closed")):
        inlay.add(host, name, new(kind), head=inlay.Head(labels=2))
    inlay.add(host, "p", inlay.Pfeiffer(reduction=2))
    inlay.add_fusion(host, "fused", ["p", "a", "b"])
    train_a_step(host, "fused")
    with pytest.raises(inlay.SetupError, match="'c'"):
        inlay.add_fusion(host, "refused", ["a", "c"])


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `inlay …` in a folder with a tiny host and rows; hands back what it prints."""
    save_bert(tmp_path / "bert")
    write_rows(tmp_path / "train.jsonl", rows(32))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        capsys.readouterr()
        main([*words])
        return capsys.readouterr().out

    return run


def test_the_command_line_knows_it(say) -> None:
    listed = {row["method"]: row["about"] for row in json.loads(say("ls", "methods", "--json"))["methods"]}
    assert listed["squeeze"] == "A squeeze after the FFN, made up for this test."
    assert "closed" in listed
    told = json.loads(say("params", "bert", "--method", "squeeze", "--options", "size=4", "--json"))
    assert told["trainable"] == 2 * (2 * 16 * 4 + 16 + 4)
    assert {row["method"] for row in json.loads(say("params", "bert", "--json"))["methods"]} >= {"squeeze", "closed"}
    flags = (
        "--host",
        "bert",
        "--train-file",
        "train.jsonl",
        "--batch-size",
        "8",
        "--threads",
        "1",
        "--quiet",
        "--json",
        "--recipe",
        "default",
    )
    record = json.loads(say("train", *flags, "--method", "squeeze", "--options", "size=4", "--out", "runs/new"))
    assert (record["status"], record["method"]) == ("finished", "squeeze")
    config = Path("runs/new/config.yaml").read_text()
    assert "lr: 0.02\n" in config, "the method's own rate"
    assert "epochs: 2\n" in config
    assert json.loads(say("eval", "runs/new", "--json"))["scores"] == record["scores"]
    mixture = ("--method", "mixture", "--options", "method={kind: squeeze}", "--options", "modules=2", "--epochs", "1")
    assert json.loads(say("train", *flags, *mixture, "--out", "runs/mixed"))["status"] == "finished"
    assert json.loads(say("merge", "runs/mixed", "--out", "merged", "--json"))["method"] == "squeeze"
