"""The examples run as they are, without a network, and what they print holds. adamix.py is run by test_docs.py."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {"ten_lines", "trainer", "own_loop", "fuse", "compacter_t5", "adamix"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def running(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return running


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number.replace(",", "")) for number in re.findall(pattern, text)]
    assert found, pattern
    return found


def test_every_example_is_tested_and_listed() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == TESTED
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+)\.py\)", listed)) == TESTED


def test_examples_use_the_public_api_only() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert not re.search(r"^\s*(from inlay|import inlay\.)", file.read_text(encoding="utf-8"), re.M), file.name


def test_ten_lines(run) -> None:
    printed = run("ten_lines")
    for name in ("mnli", "rte", "rte-again", "rte-fused"):
        assert re.search(rf"^{name} ", printed, re.M)
    assert "the host is what it was, bit for bit: True" in printed


def test_trainer(run) -> None:
    printed = run("trainer")
    # per layer 64 to 16 and back with biases, and a head of 64 to 2
    assert numbers(r"trainable parameters: ([\d,]+)", printed) == [2 * (64 * 16 + 16 + 16 * 64 + 64) + 64 * 2 + 2]
    ((before, after),) = re.findall(r"([\d.]+) before, ([\d.]+) after", printed)
    assert float(after) >= 0.75 > float(before)


def test_own_loop(run) -> None:
    printed = run("own_loop")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < 0.85 * losses[0]
    assert "the same logits: True" in printed
    assert "bit for bit: True" in printed


def test_fuse(run) -> None:
    printed = run("fuse")
    low, even, _single, fused = numbers(r"accuracy ([\d.]+)", printed)
    assert min(low, even) > 0.75
    assert fused > 0.6
    weights = numbers(r"(?:low|even) ([\d.]+)\b", printed.partition("listens to")[2])
    assert abs(sum(weights) - 1) < 0.011
    assert "low alone, as before the fusion: True" in printed


def test_compacter_t5(run) -> None:
    printed = run("compacter_t5")
    counted, trained = numbers(r"trainable:? +([\d,]+)", printed)
    assert counted == trained
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < 0.3 * losses[0]
    assert numbers(r"said in (\d+)%", printed)[0] >= 80
