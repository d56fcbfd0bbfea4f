"""Under torch.compile as users call it: with inductor. The methods' other tests compile with the eager backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import inlay
from tests.hosts import classifier, logits, shake


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("method", [inlay.Prompt(length=3), inlay.Prefix(length=3)], ids=lambda method: method.kind)
@pytest.mark.long
def test_compiled_it_gives_the_same(method: inlay.Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the usual folder may hold what a killed process left half written
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    host = classifier("bert", num_hidden_layers=1)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.activate(host, "a")
    torch.testing.assert_close(logits(torch.compile(host)), logits(host), atol=1e-5, rtol=1e-4)
