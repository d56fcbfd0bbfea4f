"""report.html of a joint run: every task's scores and curves, then what each got wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inlay.data.task import Task
from inlay.report.pages import page
from inlay.report.plots import curves
from inlay.report.run_page import confusion_of, mistakes_of, scatter_of
from inlay.storage.plain_json import number
from inlay.training.codec import Answer, EncodedSplit
from inlay.training.progress import clock


def joint_page(
    record: Mapping[str, Any],
    history: Sequence[Mapping[str, float | None]],
    config: str,
    tasks: Mapping[str, Task],
    judged: Mapping[str, tuple[EncodedSplit, Sequence[Answer]]],
) -> str:
    """The page of a joint run whose record is complete."""
    main = {name: number(record["tasks"][name]["scores"][task.main]) for name, task in tasks.items()}
    return page(
        "joint",
        title=f"{record['mode']} of {len(tasks)} tasks: mean {sum(main.values()) / len(main):.4f}",
        facts=_facts(record),
        scores=[_scores(name, record["tasks"][name]) for name in tasks],
        curve=curves(
            history,
            {f"{name}/validation_{task.main}": f"{name} {task.main}" for name, task in tasks.items()}
            | {"validation_mean": "mean"},
            "validation",
        ),
        losses=curves(history, {f"{name}/loss": name for name in tasks}, "training loss"),
        tasks=[_task(name, task, *judged[name]) for name, task in tasks.items()],
        config=config,
        versions=list(record["versions"].items()),
    )


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("host", record["host"]),
        ("mode", record["mode"]),
        ("method", record["method"] or "—"),
        ("tasks are drawn", _drawing(record["settings"])),
        ("trained parameters", f"{record['trained_parameters']:,}"),
        ("host parameters", f"{record['host_parameters']:,}"),
        ("seed", str(record["seed"])),
        ("steps", f"{record['steps']:,}, the best after {record['best_step']:,}"),
        ("time", f"{clock(record['seconds'])}, {record.get('examples_per_second') or 0:,.0f} rows per second"),
        ("memory", f"{record['peak_megabytes']:,.0f} MB at most" if record.get("peak_megabytes") else "—"),
        ("padding", f"{record['padding']:.1%}"),
        *(("note", note) for note in record["notes"]),
    ]


def _drawing(settings: Mapping[str, Any]) -> str:
    """How tasks were drawn, in words."""
    rows = "rows of any task in a step" if settings["mixed"] else "one task per step"
    own = [each for each in settings["tasks"].values() if each.get("weight") is not None]
    if settings.get("weights") or own:  # what was not given need not be there
        return f"{rows}, by weights of their own"
    if settings.get("task_temperature") is not None:
        return f"{rows}, in proportion to rows^(1/{settings['task_temperature']:g})"
    alpha = settings["alpha"]
    return f"{rows}, in proportion to rows^α, α {alpha if isinstance(alpha, str) else f'= {alpha:g}'}"


def _scores(name: str, mine: Mapping[str, Any]) -> tuple[Any, ...]:
    """Task, rows, its share of the draws, where it was judged, its scores, and its best step."""
    told = ", ".join(f"{metric} {number(value):.4f}" for metric, value in mine["scores"].items())
    drawn = [f"{share:.1%}" for share in mine["shares"]]
    return name, mine["rows"]["train"], *drawn, mine["judged"], told, mine["best_step"]


def _task(name: str, task: Task, split: EncodedSplit, answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "name": name,
        "confusion": confusion_of(task, split, answers),
        "scatter": scatter_of(task, split, answers),
        "mistakes": mistakes_of(task, split, answers),
    }
