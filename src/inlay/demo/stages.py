"""The demo's pieces of work. Each runs in a process of its own and hands back plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from inlay.checkpoints.ours import save
from inlay.data import Prepared
from inlay.demo.studies import Study
from inlay.demo.workers import Result
from inlay.methods import Pfeiffer
from inlay.training.codec import EncodedSplit
from inlay.training.evaluate import ask, attention_on
from inlay.training.loop import TrainingLoop
from inlay.training.progress import Watcher
from inlay.training.recipe import Mode, Recipe
from inlay.training.workbench import Workbench


@dataclass(frozen=True)
class LearnSource:
    """An inlay for one source task."""

    study: Study
    name: str
    out: Path

    def __call__(self, watch: Watcher) -> list[Result]:
        work = _Work(self.study, self.study.source(self.name), self.study.recipe("source", 0), watch)
        scores = work.learn(self.name, "inlay")
        save(work.host, self.name, self.out / self.name, task=self.name, metrics=scores)
        return [{"source": self.name, **scores}]


@dataclass(frozen=True)
class TryMode:
    """One mode on one target with one seed, judged on the test rows; 'single' keeps its inlay for the fusion."""

    study: Study
    target: str
    mode: str
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.target} {self.mode} {self.seed}"

    def __call__(self, watch: Watcher) -> list[Result]:
        work = _Work(
            self.study, self.study.target(self.target, self.seed), self.study.recipe(self.mode, self.seed), watch
        )
        own = self.out / f"{self.target}-{self.seed}"
        result: Result = {"target": self.target, "mode": self.mode, "seed": self.seed}
        if self.mode == "fused":
            members = [*(self.out / source for source in self.study.sources), own]
            result["validation"] = work.learn("fused", "fusion", members)
            result["attention"] = work.attention("fused")
            save(work.host, "fused", self.out / f"{self.target}-{self.seed}-fused", task=self.target)
        elif self.mode == "single":
            result["validation"] = work.learn(self.target, "inlay")
            save(work.host, self.target, own, task=self.target)
        else:
            result["validation"] = work.learn(self.target, "head" if self.mode == "head" else "full")
        return [result | {"test": work.judged()}]


@dataclass(frozen=True)
class Pipeline:
    """Pieces that need each other's results, one after the other."""

    pieces: tuple[TryMode, ...]

    @property
    def name(self) -> str:
        first = self.pieces[0]
        return f"{first.target} {'→'.join(piece.mode for piece in self.pieces)} {first.seed}"

    def __call__(self, watch: Watcher) -> list[Result]:
        return [result for piece in self.pieces for result in piece(watch)]


class _Work:
    """A host, fresh, with a task's rows."""

    def __init__(self, study: Study, prepared: Prepared, recipe: Recipe, watch: Watcher) -> None:
        torch.manual_seed(recipe.seed)
        self.study, self.prepared, self.recipe, self.watch = study, prepared, recipe, watch
        self.bench = Workbench.open(study.host, prepared.task)
        self.host, self.codec = self.bench.host, self.bench.codec(recipe.max_length)

    def learn(self, name: str, mode: Mode, members: list[Path] | None = None) -> dict[str, float]:
        method = Pfeiffer(reduction=self.study.reduction)
        head = self.bench.head(self.study.head_layers)
        self.bench.set_up(name, mode, method=method, members=members or (), head=head)
        splits = self._split("train"), self._split("validation")
        return TrainingLoop(self.host, self.codec, *splits, self.recipe, watch=self.watch, title=name).run().scores

    def attention(self, fusion: str) -> dict[str, dict[str, float]]:
        """Place → member → mean attention over the validation rows."""
        seen = attention_on(self.host, fusion, self._split("validation"))
        return {place: seen.by_member(place) for place in seen.mean}

    def judged(self) -> dict[str, float]:
        split = self._split("test")
        return self.codec.measure(split, ask(self.host, self.codec, split))

    def _split(self, name: str) -> EncodedSplit:
        return self.codec.encode(self.prepared.split(name))
