"""Tasks: where rows come from, which columns are text, what is asked, and how it is measured."""

from inlay.data.builtin import builtin_tasks, task_named
from inlay.data.errors import DataError
from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.data.sources import Data
from inlay.data.splits import Prepared, prepare
from inlay.data.task import Task

__all__ = ["Data", "DataError", "Example", "Prepared", "Task", "builtin_tasks", "prepare", "score", "task_named"]
