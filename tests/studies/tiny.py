"""A study that takes seconds: a tiny host, rows of one word, and an engine that runs cells in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.studies.cells import StudyFolder
from inlay.studies.engines.base import Ended, Moved
from inlay.studies.file import Study, study_from
from inlay.studies.plan import Plan, View
from inlay.studies.schedule import Schedule
from inlay.studies.worker import run_cell
from tests.training.small import rows, save_bert, write_rows

FILE: dict[str, Any] = {
    "hosts": {"bert": "bert"},
    "data_dir": "data",
    "tasks": {"a": None, "b": None, "c": None},
    "groups": {"sources": ["a", "b"], "targets": ["b", "c"]},
    "settings": {"batch_size": 16, "epochs": 1, "lr": 0.02},
    "seeds": [0, 1],
    "rows": [32],
    "against": "single",
    "ways": {
        "logreg": {"kind": "embeddings"},
        "source": {"tasks": "sources", "rows": ["all"], "seeds": [0], "options": {"size": 4}, "show": False},
        "single": {"options": {"size": 4}, "grid": {"lr": [0.02, 0.05]}},
        "fused": {"kind": "fusion", "members": [{"way": "source", "tasks": "sources"}, {"way": "single"}]},
    },
}
"""Tiny rows of tasks a, b and c under data/, a BERT beside them."""


def place(folder: Path) -> Path:
    save_bert(folder / "bert")
    for seed, name in enumerate("abc"):
        write_rows(folder / "data" / name / "train.jsonl", rows(160, seed=seed))
        write_rows(folder / "data" / name / "test.jsonl", rows(40, seed=seed + 10))
    return folder


def study_in(folder: Path, **changed: Any) -> Study:
    """The tiny study with some of its parts changed; None takes a part away."""
    said = {name: value for name, value in (FILE | changed).items() if value is not None}
    return study_from(said, "tiny", hosts={"bert": str(folder / "bert")}, data_dir=folder / "data")


class Inline:
    """Runs one cell at a time in this process."""

    def __init__(self) -> None:
        self.events: list[Ended | Moved] = []
        self.ran: list[str] = []

    def room(self, megabytes: float) -> bool:
        return not self.events

    def start(self, cell: str, description: Mapping[str, Any], megabytes: float) -> None:
        self.ran.append(cell)
        self.events.append(Ended(cell, *run_cell(description)))

    def wait(self, seconds: float) -> list[Ended | Moved]:
        found, self.events = self.events, []
        return found

    def stop(self) -> None: ...


def run_here(study: Study, out: Path) -> tuple[View, list[str]]:
    """Run a study in this process; its view, and the cells that were run for it."""
    plan, folder, engine = Plan.of(study), StudyFolder(out), Inline()
    folder.claim(plan.facts())
    view = Schedule(View(plan, folder), engine).run()
    return view, engine.ran
