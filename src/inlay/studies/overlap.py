"""Judged rows that others have learned from, or been chosen by: the members of a fusion, or what a run starts from.

Public data sets are made of each other: a tenth of the pairs that judge MRPC are training pairs of STS-B. Texts are
compared without case, spaces and punctuation, and pairs without their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from inlay.data import Example, prepare
from inlay.runs.folder import Run
from inlay.runs.joint_settings import JointSettings, settings_from
from inlay.runs.ready import few_to_validate
from inlay.studies.cells import StudyFolder

Known = frozenset[tuple[str, ...]]


def seen_before(folder: StudyFolder, needs: Sequence[str], own: str, judged: Sequence[Example]) -> dict[str, int]:
    """Of each other task that the needed cells have learned: how many judged rows have trained or chosen it."""
    taught: dict[str, Known] = {}
    for name in needs:
        for task, rows in taught_to(folder.cell(folder.joint_of(name) or name)).items():
            taught[task] = taught.get(task, frozenset()) | rows
    taught.pop(own, None)
    found = {task: sum(key in rows for key in map(_key, judged)) for task, rows in taught.items()}
    return {task: rows for task, rows in found.items() if rows}


@lru_cache(maxsize=64)  # a worker runs many cells that are built on the same ones
def taught_to(run: Path) -> dict[str, Known]:
    """Task → what a run has learned from, and what has chosen its best state."""
    settings = settings_from(Run(run).config() | {"out": run})
    if isinstance(settings, JointSettings):
        each = [settings.task_settings(task, own) for task, own in settings.tasks]
    else:
        each = [settings]
    prepared = [few_to_validate(prepare(one), one.eval_rows) for one in each]
    return {one.task.name: _known([*one.train, *one.validation]) for one in prepared}


def _known(examples: Iterable[Example]) -> Known:
    return frozenset(map(_key, examples))


def _key(example: Example) -> tuple[str, ...]:
    return tuple(sorted(_plain(text) for pair in example.texts for text in pair if text))


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())
