"""inlay ls"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import columns, tell

HELP = """List methods, tasks, recipes, families or runs.

\b
Examples:
  inlay ls
  inlay ls tasks
  inlay ls runs --in experiments
"""


def work(what: str | None, folder: Path, as_json: bool) -> None:
    listings: dict[str, Callable[[], Sequence[tuple[str, ...]]]] = {
        "methods": _methods,
        "tasks": _tasks,
        "recipes": _recipes,
        "families": _families,
        "runs": lambda: _runs(folder),
    }
    chosen = [what] if what else list(listings)
    found = {name: listings[name]() for name in chosen}
    text = "\n\n".join(f"{name}\n{columns(rows) or '(none)'}" for name, rows in found.items())
    tell(text, found[what] if what else found, as_json)


def _methods() -> list[tuple[str, str]]:
    """Every registered method and the first sentence of its class."""
    from inlay.methods import METHODS

    return sorted((kind, (method.__doc__ or "").split("\n")[0]) for kind, method in METHODS.items())


def _tasks() -> list[tuple[str, str, str, str]]:
    from inlay.data import builtin_tasks

    return [
        (t.name, t.kind, t.main, t.hub.path if t.hub else "on request from its owner") for t in builtin_tasks().values()
    ]


def _recipes() -> list[tuple[str, str]]:
    from inlay.recipes import read_recipe, recipe_names

    return [(name, str(read_recipe(name)["about"])) for name in recipe_names()]


def _families() -> list[tuple[str]]:
    from inlay.anatomy.families import FAMILIES

    return sorted((name,) for name in FAMILIES)


def _runs(folder: Path) -> list[tuple[str, str, str, str, str]]:
    from inlay.runs.folder import find_runs

    rows = []
    for run in find_runs(folder):
        record = run.record()
        scores = record.get("scores") or {}
        main = next((f"{name} {value:.4f}" for name, value in scores.items() if value is not None), "")
        rows.append(
            (
                str(run.folder),
                str(record.get("status")),
                str(record["task"]["name"]),
                str(record["method"] or record["mode"]),
                main,
            )
        )
    return rows


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
