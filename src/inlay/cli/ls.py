"""inlay ls"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import columns, tell

HELP = """List methods, tasks, families or runs.

\b
Examples:
  inlay ls
  inlay ls tasks
  inlay ls runs --in experiments
"""


def work(what: str | None, folder: Path, as_json: bool) -> None:
    listings: dict[str, Callable[[], list[Any]]] = {
        "methods": _methods,
        "tasks": _tasks,
        "families": _families,
        "runs": lambda: _runs(folder),
    }
    chosen = [what] if what else list(listings)
    found = {name: listings[name]() for name in chosen}
    text = "\n\n".join(f"{name}\n{columns(rows) or '(none)'}" for name, rows in found.items())
    tell(text, found[what] if what else found, as_json)


def _methods() -> list[tuple[str, str]]:
    """Every registered method and its first sentence, read from the sources: importing them would import torch."""
    found = []
    for file in sorted(Path(str(files("inlay") / "methods")).glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            kind = _registered(node)
            if kind is not None and isinstance(node, ast.ClassDef):
                found.append((kind, (ast.get_docstring(node) or "").split("\n")[0]))
    return sorted(found)


def _registered(node: ast.stmt) -> str | None:
    """The name given to @register above a class."""
    for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "register":
            return str(ast.literal_eval(decorator.args[0]))
    return None


def _tasks() -> list[tuple[str, str, str, str]]:
    from inlay.data import builtin_tasks

    return [
        (t.name, t.kind, t.main, t.hub.path if t.hub else "on request from its owner") for t in builtin_tasks().values()
    ]


def _families() -> list[tuple[str]]:
    """The table of families, read from the source for the same reason."""
    for node in ast.parse((files("inlay") / "anatomy.py").read_text(encoding="utf-8")).body:
        targets = (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "FAMILIES" in names and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return sorted((str(ast.literal_eval(key)),) for key in node.value.keys if key is not None)
    return []


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
        click.Argument(["what"], required=False, type=click.Choice(["methods", "tasks", "families", "runs"])),
        click.Option(
            ["--in", "folder"], type=click.Path(path_type=Path), default=Path("runs"), help="Folder with runs. [runs]"
        ),
        json_flag,
    ],
)
