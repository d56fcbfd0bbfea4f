"""What a schedule asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from inlay.errors import ConfigError
from inlay.studies.worker import Ending

PATIENCE = 60.0
"""Seconds that running cells have to save themselves when they are asked to stop."""


class EngineError(ConfigError):
    """An engine cannot be had."""


@dataclass(frozen=True)
class Ended:
    """A cell is not running any more."""

    cell: str
    ending: Ending
    error: str = ""
    died: bool = False
    """Its process ended with it, so that nobody has noted the failure."""


@dataclass(frozen=True)
class Moved:
    """A cell is at this step."""

    cell: str
    done: int
    total: int
    note: str


class Engine(Protocol):
    """Runs cells, several at a time."""

    def room(self, megabytes: float) -> bool:
        """Whether one more cell, which needs about this much memory, could be run now."""

    def start(self, cell: str, description: Mapping[str, Any], megabytes: float) -> None: ...

    def wait(self, seconds: float) -> list[Ended | Moved]:
        """What happened, at the latest after this time."""

    def stop(self) -> None:
        """Let the running cells save what they have, and end them."""
