"""Logs as JSON, one event per line, and the ids that requests are found by."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LOG = logging.getLogger("inlay.serve")
UVICORN = logging.getLogger("uvicorn.error")
"""What is wrong with connections; that it starts and ends is said by the server itself."""
ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest is what an event says."""


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        said |= {name: value for name, value in vars(record).items() if name not in PLAIN and name[0] != "_"}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def log_to(stream: TextIO | None = None) -> None:
    """Write the server's events to a stream, stderr if none is given."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for log, level in ((LOG, logging.INFO), (UVICORN, logging.WARNING)):
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False


def request_id(given: str | None) -> str:
    """The id that the client gave, if it is one, or a new one."""
    return given if given is not None and ID.fullmatch(given) else secrets.token_hex(8)
