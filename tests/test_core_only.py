"""The core needs torch, transformers, safetensors and pydantic: without any package of the extras the README's lines run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GONE = ("accelerate", "datasets", "sklearn", "scipy", "pyarrow", "pandas", "matplotlib", "rich", "click", "jinja2")
NOT_OURS = ("yaml",)
"""huggingface_hub, which transformers needs, needs it itself: it is there, but the core must not import it."""


WITHOUT = '''
import builtins, importlib.abc, importlib.metadata, importlib.util, sys

GONE, NOT_OURS = set({gone!r}), set({not_ours!r})


class Gone(importlib.abc.MetaPathFinder):
    """An import of these fails as one of a package that is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


sys.meta_path.insert(0, Gone())
found, there, version = importlib.util.find_spec, importlib.metadata.distribution, importlib.metadata.version
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in GONE else found(name, package)


def gone(real):
    def look(name):
        if name.lower().replace("-", "_") in GONE | {{"scikit_learn"}}:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    return look


importlib.metadata.distribution, importlib.metadata.version = gone(there), gone(version)
plain_import = builtins.__import__


def watched(name, globals=None, *more, **named):
    importer = str((globals or {{}}).get("__name__")).partition(".")[0]
    if importer == "inlay" and name.partition(".")[0] in NOT_OURS:
        raise ModuleNotFoundError("inlay's core imports " + name, name=name)
    return plain_import(name, globals, *more, **named)


builtins.__import__ = watched
'''

LINES = """
import torch
import inlay
from transformers import AutoModelForSequenceClassification, BertConfig

def tiny():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=50)
    return AutoModelForSequenceClassification.from_config(BertConfig(**sizes)).eval()

host = tiny()
inlay.add(host, "mnli", inlay.Pfeiffer(reduction=16), head=inlay.Head(labels=["yes", "maybe", "no"]))
inlay.add(host, "rte", inlay.Pfeiffer(reduction=16), head=inlay.Head(labels=["yes", "no"]))
inlay.train(host, "rte")
ids = torch.arange(3, 15).reshape(2, 6)

def step():
    learned = [p for p in host.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learned]
    host(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
    torch.optim.AdamW(learned, lr=0.1).step()
    assert any(not torch.equal(a, b) for a, b in zip(before, learned))

step()
inlay.save(host, "rte", "inlays/rte")
inlay.add_fusion(host, "rte-fused", members=["mnli", "rte"], head=inlay.Head(labels=["yes", "no"]))
inlay.train(host, "rte-fused")
step()
print(inlay.summary(host))

inlay.activate(host, "rte")
other = tiny()
inlay.load(other, "inlays/rte")
inlay.activate(other, "rte")
with torch.no_grad():
    assert torch.equal(host.eval()(input_ids=ids).logits, other.eval()(input_ids=ids).logits)
assert not GONE & {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
"""


def run_without(lines: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of Python in a process in which these packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(gone=GONE, not_ours=NOT_OURS) + lines], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_readmes_lines_run_without_the_extras(tmp_path: Path) -> None:
    done = run_without(LINES, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rte-fused" in done.stdout


def test_every_name_of_the_core_loads_without_the_extras(tmp_path: Path) -> None:
    """All public names but the one that draws."""
    lines = "import inlay\nfor name in set(inlay.__all__) - {'plot_fusion'}: getattr(inlay, name)"
    done = run_without(lines, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_packages_are_really_gone(tmp_path: Path) -> None:
    """The tests above would prove nothing otherwise."""
    lines = """
for name in GONE:
    assert importlib.util.find_spec(name) is None
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name
    else:
        raise SystemExit(name + " can be imported")
import yaml
try:
    import inlay.runs.settings
except ModuleNotFoundError as error:
    assert error.name in GONE | NOT_OURS, error
else:
    raise SystemExit("the settings are of the extras, and were imported")
"""
    done = run_without(lines, tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
