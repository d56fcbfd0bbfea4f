"""How much a server takes at once. docs/serving.md has the same table."""

from __future__ import annotations

import time

from pydantic import ConfigDict, Field

from inlay.config import Config


class Limits(Config):
    """How much a server takes at once, and how long it waits."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    rows: int = Field(default=512, ge=1)
    """Rows that wait or run, of all clients together; more get 429, a request that could never fit gets 413.
    A row is one text that the host reads: an input, each of its choices, each window of a long context."""
    batch_rows: int = Field(default=64, ge=1)
    """Rows of one forward."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward, padding included. A single row may be longer."""
    wait: float = Field(default=0.002, ge=0, le=1)
    """Seconds that a row waits for others while the host is free."""
    new_tokens: int = Field(default=1024, ge=1)
    """Tokens that a completion may ask for."""
    deadline: float = Field(default=30.0, gt=0)
    """Seconds until a request is given up with 504; a request may ask for less."""
    body: int = Field(default=1 << 20, ge=1024)
    """Bytes of a request's body."""
    models: int = Field(default=1000, ge=1)
    """Models that are loaded at once."""
    heartbeat: float = Field(default=30.0, gt=0)
    """Seconds without a sign of the model thread after which the server says that it is not healthy."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that a server that goes down has to finish what it took."""
    idle: float = Field(default=10.0, gt=0)
    """Seconds that a connection may be open without a whole request."""

    def until(self, seconds: float | None) -> float:
        """When a request that would wait this long is given up, on the clock of `time.monotonic`."""
        return time.monotonic() + min(seconds or self.deadline, self.deadline)
