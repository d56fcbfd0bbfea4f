"""What the demo does: its host, its tasks, how many rows of each, and how each mode trains.

Recipes were chosen on validation rows; test rows only appear in the final table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inlay.data import Data, Prepared, prepare
from inlay.data.examples import Example
from inlay.demo.corpora import corpus
from inlay.training.recipe import Recipe

MODES = ("head", "full", "single", "fused")


@dataclass(frozen=True)
class Study:
    """Source tasks with many rows, targets with few."""

    host: str
    sources: dict[str, int]
    """Training rows of each."""
    targets: dict[str, int]
    recipes: dict[str, Recipe]
    """For 'source' and each of MODES."""
    head_layers: int = 1
    reduction: int = 16

    def source(self, name: str) -> Prepared:
        raise NotImplementedError

    def target(self, name: str, seed: int) -> Prepared:
        """Which rows train and validate follows from the seed; the test rows are always the same."""
        raise NotImplementedError

    def recipe(self, mode: str, seed: int) -> Recipe:
        return self.recipes[mode].model_copy(update={"seed": seed})


SHORT: dict[str, Any] = {"batch_size": 16, "max_length": 48}


@dataclass(frozen=True)
class Tweets(Study):
    """Sentiment of tweets from 100 labelled ones; sources: three other sentiment domains, question types and spam."""

    folder: Path = Path()
    sources: dict[str, int] = field(
        default_factory=lambda: {"movies": 600, "products": 600, "editorials": 600, "questions": 400, "spam": 300}
    )
    targets: dict[str, int] = field(default_factory=lambda: {"tweets": 100})
    recipes: dict[str, Recipe] = field(
        default_factory=lambda: {
            "source": Recipe(lr=1e-3, epochs=2, **SHORT),
            "head": Recipe(lr=5e-3, epochs=6, eval_every=14, **SHORT),
            "full": Recipe(lr=1e-4, epochs=4, eval_every=14, **SHORT),
            "single": Recipe(lr=1e-3, epochs=8, eval_every=14, **SHORT),
            "fused": Recipe(lr=5e-4, epochs=8, eval_every=14, **SHORT),
        }
    )
    validation: int = 100
    test: int = 600

    def source(self, name: str) -> Prepared:
        return corpus(self.folder, name, self.sources[name], self.validation)

    def target(self, name: str, seed: int) -> Prepared:
        return corpus(self.folder, name, self.targets[name], self.validation, self.test, seed)


@dataclass(frozen=True)
class Inference(Study):
    """RTE and CB from sentence-pair tasks; rows from a data folder. The published validation rows are the test."""

    folder: Path = Path()
    sources: dict[str, int] = field(default_factory=lambda: {"mnli": 3000, "qqp": 2000, "sick": 1500, "mrpc": 1500})
    targets: dict[str, int] = field(default_factory=lambda: {"rte": 500, "cb": 200})
    recipes: dict[str, Recipe] = field(
        default_factory=lambda: {
            "source": Recipe(lr=1e-3, epochs=2, batch_size=16, max_length=64),
            "head": Recipe(lr=5e-3, epochs=4, batch_size=16, max_length=96),
            "full": Recipe(lr=1e-4, epochs=3, batch_size=16, max_length=96),
            "single": Recipe(lr=1e-3, epochs=4, batch_size=16, max_length=96),
            "fused": Recipe(lr=5e-4, epochs=3, batch_size=16, max_length=96),
        }
    )
    most_validation: int = 300

    def source(self, name: str) -> Prepared:
        read = prepare(Data(task=name, data_dir=self.folder, rows=self.sources[name]))
        return Prepared(read.task, read.train, read.validation[: self.most_validation], [])

    def target(self, name: str, seed: int) -> Prepared:
        read = prepare(Data(task=name, data_dir=self.folder))
        chosen = _drawn(read.train, seed)
        count = self.targets[name]
        return Prepared(read.task, chosen[:count], chosen[count : count + max(50, count // 5)], read.validation)


def _drawn(examples: list[Example], seed: int) -> list[Example]:
    return [examples[i] for i in torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()]
