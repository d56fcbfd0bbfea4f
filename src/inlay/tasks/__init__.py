"""Tasks: where rows come from, which columns are text, what is asked, and how it is measured."""

from inlay.tasks.builtin import builtin_tasks, task_named
from inlay.tasks.errors import DataError
from inlay.tasks.examples import Example
from inlay.tasks.metrics import score
from inlay.tasks.sources import Data
from inlay.tasks.splits import Prepared, prepare
from inlay.tasks.task import Task

__all__ = ["Data", "DataError", "Example", "Prepared", "Task", "builtin_tasks", "prepare", "score", "task_named"]
