"""The text demo: a small decoder learns to put restaurant facts into words, with LoRA and with an AdaMix of LoRA.

SmolLM2-135M comes from the package index. The rows are those of the E2E challenge, which no package carries: they are
read from `data_dir`, or from the hub.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inlay.checkpoints.ours import save
from inlay.compose.merge import merge
from inlay.data import Data, DataError, Prepared, prepare
from inlay.data.text_metrics import has_java
from inlay.demo.wheels import decoder_folder
from inlay.demo.workers import Result, Workers
from inlay.errors import InlayError
from inlay.methods import LoRA, Method, Mixture
from inlay.runs.facts import manifest_data
from inlay.storage.files import write_whole
from inlay.storage.plain_json import as_json
from inlay.training.generation import write
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import objective_for
from inlay.training.progress import Watcher
from inlay.training.recipe import Generation, Recipe
from inlay.training.threads import cores
from inlay.training.workbench import Workbench

WAYS = {"nothing": "the host as it is", "lora": "LoRA", "adamix": "AdaMix of 4 LoRAs, merged"}
RECIPE = Recipe(lr=2e-3, epochs=1, batch_size=8, max_length=160, label_smoothing=0.1)
SHOWN = 5
"""Texts that are printed beside their references."""


@dataclass(frozen=True)
class TextStudy:
    """What is learned, from how many rows, and on how many it is judged."""

    host: str
    prepared: Prepared
    seed: int = 0

    def method(self, way: str) -> Method:
        lora = LoRA(rank=8, alpha=16, targets=("q", "v"))
        return lora if way == "lora" else Mixture(method=lora, modules=4)


@dataclass(frozen=True)
class LearnText:
    """One way: trained, judged, its texts kept."""

    study: TextStudy
    way: str
    out: Path

    @property
    def name(self) -> str:
        return WAYS[self.way]

    def __call__(self, watch: Watcher) -> list[Result]:
        torch.manual_seed(self.study.seed)
        prepared = self.study.prepared
        bench = Workbench.open(self.study.host, prepared.task)
        codec = replace(bench.codec(RECIPE.max_length), generation=Generation(max_new_tokens=70))
        began = time.monotonic()
        if self.way != "nothing":
            bench.set_up(self.way, "inlay", method=self.study.method(self.way))
            objective = objective_for(bench.host, self.way, RECIPE)
            train = replace(codec, label_smoothing=RECIPE.label_smoothing)
            TrainingLoop(
                bench.host, train, train.encode(prepared.train), None, RECIPE, objective=objective, watch=watch,
                title=self.name,
            ).run()  # fmt: skip
            if self.way == "adamix":
                merge(bench.host, self.way)
            save(bench.host, self.way, self.out / self.way, task=prepared.task.name, data=manifest_data(codec))
        judged = codec.encode(prepared.test)
        texts = write(bench.host, codec, judged)
        scores = codec.measure(judged, [codec.decode(t, e) for t, e in zip(texts, prepared.test, strict=True)])
        return [{"way": self.way, "scores": scores, "texts": texts, "seconds": time.monotonic() - began}]


def run_text_demo(
    out: Path, say: Callable[[str], None], *, data_dir: Path | None = None, rows: int = 300, judged: int = 60,
    processes: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train both ways, print texts beside their references; writes and returns the results."""
    began = time.monotonic()
    prepared = few_rows(data_dir, rows, judged)
    say("host: SmolLM2-135M-Instruct, from the package index")
    study = TextStudy(str(decoder_folder()), prepared)
    for note in prepared.notes:
        say(note)
    say(f"E2E: {len(prepared.train)} pairs of facts and text to learn from, {len(prepared.test)} facts to be judged on")
    with Workers(min(processes or cores(), len(WAYS))) as workers:
        results = workers.run([LearnText(study, way, out / "inlays") for way in ("adamix", "lora", "nothing")])
    seconds = time.monotonic() - began
    say("\n" + as_text(results))
    say("\n" + beside(prepared, results))
    facts = {
        "host": study.host,
        "seconds": round(seconds, 1),
        "ways": {result["way"]: result["scores"] for result in results},
        "texts": [
            {"source": e.texts[0][0], "references": list(e.answers or (e.target,))}
            | {result["way"]: result["texts"][i] for result in results}
            for i, e in enumerate(prepared.test)
        ],
    }
    write_whole(out / "results.json", as_json(facts, indent=1) + "\n")
    say(f"\nall texts: {out / 'results.json'}   ({seconds:.0f} s)")
    return dict(json.loads(as_json(facts)))


def few_rows(data_dir: Path | None, rows: int, judged: int) -> Prepared:
    """Some of E2E's rows, drawn with a fixed seed."""
    metrics: tuple[Any, ...] = ("bleu", "nist", *(("meteor", "rouge_l", "cider") if has_java() else ()))
    try:
        found = prepare(Data(task="e2e", data_dir=data_dir, metrics=metrics))
    except DataError as error:
        raise InlayError(
            f"{error}\nThe text demo learns from the rows of the E2E challenge, which are in no package: give a folder "
            f"with --data-dir that has e2e_nlg/train.jsonl, validation.jsonl and test.jsonl (or .jsonl.gz), a row "
            f'being {{"source": "name[...], eatType[...]", "references": ["...", "..."]}}; or be online, for the hub.'
        ) from None
    chance = random.Random(0)  # noqa: S311 (which rows, not a secret)
    train = chance.sample(found.train, min(rows, len(found.train)))
    return replace(found, train=train, validation=[], test=chance.sample(found.test, min(judged, len(found.test))))


def as_text(results: Sequence[Result]) -> str:
    """The table as it is printed: scores of every way."""
    order = [next(result for result in results if result["way"] == way) for way in WAYS]
    metrics = list(order[0]["scores"])
    lines = [f"{'trained':<28}" + "".join(f"{metric:>9}" for metric in metrics) + f"{'seconds':>9}"]
    for result in order:
        each = "".join(f"{result['scores'][metric]:9.3f}" for metric in metrics)
        lines.append(f"{WAYS[result['way']]:<28}{each}{result['seconds']:9.0f}")
    return "\n".join(lines)


def beside(prepared: Prepared, results: Sequence[Result]) -> str:
    """A few texts of every way beside their facts and a reference."""
    lines = []
    for i, example in enumerate(prepared.test[:SHOWN]):
        lines.append(f"facts      {example.texts[0][0]}")
        lines.append(f"reference  {example.target}")
        for way in WAYS:
            text = next(result["texts"][i] for result in results if result["way"] == way)
            lines.append(f"{way:<10} {' '.join(text.split()) or '(nothing)'}")
        lines.append("")
    return "\n".join(lines).rstrip()
