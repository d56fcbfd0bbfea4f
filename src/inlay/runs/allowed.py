"""What a user has to allow by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """What a user has to say each time, because no file may say it for them."""

    any_host: bool = False
    """Go on with a host of the same form whose weights are others."""
    trust_remote_code: bool = False
    """Let the host's own Python code run."""
