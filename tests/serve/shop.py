"""A tiny host with inlays of every kind and fusions over them, saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inlay
from inlay.data.task import Task
from inlay.methods.base import Method
from inlay.training.workbench import Workbench
from tests.hosts import shake
from tests.training.small import KINDS, rows_of, save_bert

TAGS = ("B-NEG", "B-POS", "I-NEG", "I-POS", "O")
TASKS = {
    "classification": Task(name="sst", labels=("negative", "positive")),
    "regression": Task(name="sts", kind="regression"),
    "choice": Task(name="csqa", kind="choice"),
    "multilabel": Task(name="toxic", kind="multilabel", labels=("neg", "pos", "odd")),
    "tags": Task(name="ner", kind="tags", labels=TAGS),
    "spans": Task(name="squad", kind="spans"),
}
METHODS: tuple[Method, ...] = (
    inlay.Pfeiffer(reduction=2), inlay.Houlsby(size=3), inlay.LoRA(rank=2), inlay.Compacter(reduction=2, n=2),
    inlay.Parallel(size=4), inlay.IA3(), inlay.Prefix(length=3), inlay.Prompt(length=2), inlay.BitFit(),
    inlay.Bapna(size=3), inlay.PAL(size=4, heads=2),
)  # fmt: skip
LENGTH = 24
"""The longest input, so that contexts fall into windows."""


def pair_task() -> Task:
    return Task(name="nli", text="premise", pair="hypothesis", labels=("yes", "no", "maybe"))


def fill_shop(folder: Path) -> Path:
    """<folder>/bert, and inlays: one per kind and method, 20 in all, and three fusions."""
    save_bert(folder / "bert")
    bench = Workbench.open(str(folder / "bert"), TASKS["classification"])
    tasks: list[tuple[str, Task]] = [(f"{kind}-{i}", TASKS[kind]) for i in range(3) for kind in KINDS]
    tasks += [("nli-0", pair_task()), ("nli-1", pair_task())]
    for number, (name, task) in enumerate(tasks):
        put_in(bench.for_task(task), name, METHODS[number % len(METHODS)], number)
        keep(bench, name, task, folder)
    for number, (kind, members) in enumerate(
        {"classification": ["a", "b"], "tags": ["a", "b", "c"], "spans": ["b", "c"]}.items()
    ):
        for member in members:
            if member not in bench.host.inlays:
                put_in(bench, member, inlay.Pfeiffer(size=2 + ord(member) % 3), 50 + ord(member))
                keep(bench, member, TASKS["classification"], folder)
        name, own = f"fused-{kind}", bench.for_task(TASKS[kind])
        inlay.add_fusion(bench.host, name, members, head=own.head())
        shake(bench.host, name, 90 + number)
        keep(bench, name, TASKS[kind], folder)
    return folder


def put_in(bench: Workbench, name: str, method: Method, seed: int) -> None:
    inlay.add(bench.host, name, method, head=bench.head())
    shake(bench.host, name, seed)


def keep(bench: Workbench, name: str, task: Task, folder: Path) -> None:
    facts = {"task": task.model_dump(mode="json"), "max_length": LENGTH}
    inlay.save(bench.host, name, folder / "inlays" / name, task=task.name, data=facts)


def inputs_for(kind: str, count: int, seed: int = 0) -> list[Any]:
    """Inputs of a kind as a request has them."""
    return [_input(kind, row) for row in rows_of("classification" if kind == "nli" else kind, count, seed)]


def _input(kind: str, row: dict[str, Any]) -> Any:
    if kind == "choice":
        return {"text": row["text"], "choices": row["choices"]}
    if kind == "tags":
        return {"words": row["tokens"]}
    if kind == "spans":
        return {"text": row["question"], "pair": " ".join([row["context"]] * 4)}
    if kind == "nli":
        return {"text": row["text"], "pair": "w1 good w2"}
    return row["text"]


def kind_of(model: str) -> str:
    return model.removeprefix("fused-").partition("-")[0]
