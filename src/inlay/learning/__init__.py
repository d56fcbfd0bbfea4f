"""Learning: tokens, batches, the loop, evaluation and runs.

    job     a whole run from its settings: `train(Settings(...))`
    loop    `fit(host, language, train, validation, recipe)` for a host that is set up already

Names load on first use: settings and runs can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Answer": "material",
    "Interrupted": "interrupt",
    "Language": "material",
    "Outcome": "loop",
    "Recipe": "recipe",
    "Run": "run",
    "Settings": "settings",
    "Split": "material",
    "ask": "evaluate",
    "filled": "recipe",
    "fit": "loop",
    "get_ready": "job",
    "open_for_use": "opened",
    "open_host": "hosts",
    "own_head": "hosts",
    "train": "job",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inlay.learning' has no attribute {name!r}")
    return getattr(import_module(f"inlay.learning.{_HOME[name]}"), name)
