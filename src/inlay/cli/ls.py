"""inlay ls"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import inlay
from inlay.cli.flags import json_flag
from inlay.cli.output import columns, tell

if TYPE_CHECKING:
    from inlay.runs.folder import Run

HELP = """List methods, tasks, recipes, families or runs.

\b
Examples:
  inlay ls
  inlay ls tasks
  inlay ls runs --in experiments
"""


RUN = ("run", "status", "task", "trained", "parameters", "lr", "steps", "seconds", "metric", "score")


def work(what: str | None, folder: Path, as_json: bool) -> None:
    listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "methods": _methods,
        "tasks": _tasks,
        "recipes": _recipes,
        "families": _families,
        "runs": lambda: _runs(folder),
    }
    chosen = [what] if what else list(listings)
    found = {name: listings[name]() for name in chosen}
    text = "\n\n".join(f"{name}\n{_table(name, rows)}" for name, rows in found.items())
    tell(text, found, as_json)


def _table(name: str, rows: list[dict[str, Any]]) -> str:
    header = RUN if name == "runs" and rows else ()
    return columns([[row[key] for key in (header or row)] for row in rows], header) or "(none)"


def _methods() -> list[dict[str, Any]]:
    """Every registered method and the first line about its class."""
    if "inlay.methods" in sys.modules:  # somebody may have registered one of their own
        from inlay.methods import METHODS

        found = [(kind, (method.__doc__ or "").split("\n")[0]) for kind, method in METHODS.items()]
    else:  # importing them takes torch and transformers, which is seconds
        found = [each for file in Path(inlay.__file__).parent.glob("methods/*.py") for each in _registered(file)]
    return [{"method": kind, "about": about} for kind, about in sorted(found)]


def _registered(file: Path) -> Iterator[tuple[str, str]]:
    """The name and the first line about each class that a file has under `@register(name)`."""
    classes = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    for node in classes:
        for mark in node.decorator_list:
            match mark:
                case ast.Call(func=ast.Name("register"), args=[ast.Constant(str(kind))]):
                    yield kind, (ast.get_docstring(node) or "").split("\n")[0]


def _tasks() -> list[dict[str, Any]]:
    from inlay.data import builtin_tasks

    return [
        {"task": t.name, "kind": t.kind, "metric": t.main, "from": t.hub.path if t.hub else "on request from its owner"}
        for t in builtin_tasks().values()
    ]


def _recipes() -> list[dict[str, Any]]:
    from inlay.recipes import read_recipe, recipe_names

    return [{"recipe": name, "about": str(read_recipe(name)["about"])} for name in recipe_names()]


def _families() -> list[dict[str, Any]]:
    from inlay.anatomy.families import FAMILIES

    return [{"family": name} for name in sorted(FAMILIES)]


def _runs(folder: Path) -> list[dict[str, Any]]:
    from inlay.runs.folder import find_runs

    return [_run(run) for run in find_runs(folder)]


def _run(run: Run) -> dict[str, Any]:
    """What tells runs apart, side by side; the best states are those of the main metric."""
    from inlay.errors import InlayError

    try:
        record = run.record()
    except InlayError as error:
        return dict.fromkeys(RUN, None) | {"run": str(run.folder), "status": "unreadable", "why": str(error)}
    tasks = record.get("tasks") or {}
    scores = {name: value for name, value in (record.get("scores") or {}).items() if value is not None}
    if tasks and record["status"] == "finished":
        main = [next(iter(each["scores"].values())) for each in tasks.values()]
        scores = {"mean": sum(main) / len(main)} if None not in main else {}
    metric = next(iter(scores), None)
    return {
        "run": str(run.folder),
        "status": record["status"],
        "task": ", ".join(tasks) or (record["task"] or {}).get("name"),
        "trained": record.get("method") or record["mode"],
        "parameters": record.get("trained_parameters"),
        "lr": (record.get("settings") or {}).get("lr"),
        "steps": record.get("steps"),
        "seconds": record.get("seconds"),
        "metric": metric,
        "score": scores.get(metric) if metric else None,
    }


command = click.Command(
    "ls",
    callback=work,
    help=HELP,
    params=[
        click.Argument(
            ["what"], required=False, type=click.Choice(["methods", "tasks", "recipes", "families", "runs"])
        ),
        click.Option(
            ["--in", "folder"],
            type=click.Path(path_type=Path),
            default=Path("runs"),
            help="The folder of the runs. [runs]",
        ),
        json_flag,
    ],
)
