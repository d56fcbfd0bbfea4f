"""The built-in tasks, read from the table beside this file."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from inlay.data.task import Task
from inlay.errors import NamingError, nearest


@cache
def builtin_tasks() -> dict[str, Task]:
    """Every built-in task by its name."""
    table = tomllib.loads(files("inlay.data").joinpath("builtin.toml").read_text(encoding="utf-8"))
    return {name: Task(name=name, **fields) for name, fields in table.items()}


def task_named(name: str) -> Task:
    """A built-in task."""
    tasks = builtin_tasks()
    if name not in tasks:
        raise NamingError(f"no built-in task {name!r}.{nearest(name, tasks)}")
    return tasks[name]
