"""report.html of a run, from its record and its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from inlay.data.task import Task
from inlay.report.joint_page import joint_page
from inlay.report.run_page import run_page
from inlay.runs.folder import CONFIG, Run
from inlay.storage.files import write_whole
from inlay.training.codec import Answer, EncodedSplit
from inlay.training.evaluate import attention_on

LISTENED = 256
"""Judged rows that a fusion's attention is measured on, at most: a mean over thousands of tokens stays where it is."""


def write_report(run: Run, host: PreTrainedModel, task: Task, judged: EncodedSplit, answers: Sequence[Answer]) -> None:
    """Write the page of a run whose record is complete; the host answers as it did when it was judged.

    What a fusion listens to is noted in the record as well.
    """
    record, config = run.record(), (run.folder / CONFIG).read_text(encoding="utf-8")
    attention = attention_on(host, record["name"], judged, LISTENED) if record["mode"] == "fusion" else None
    if attention is not None:
        run.note(attention={place: attention.by_member(place) for place in attention.mean})
    write_whole(run.report, run_page(record, run.history(), config, task, judged, answers, attention))


def write_joint_report(
    run: Run,
    tasks: Mapping[str, Task],
    judged: Mapping[str, tuple[EncodedSplit, Sequence[Answer]]],
) -> None:
    """Write the page of a joint run whose record is complete."""
    record, config = run.record(), (run.folder / CONFIG).read_text(encoding="utf-8")
    write_whole(run.report, joint_page(record, run.history(), config, tasks, judged))
