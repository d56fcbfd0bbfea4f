"""What only the user can allow, on the command line or in Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """What a user has to allow each time: no config file can do it for them."""

    any_host: bool = False
    """Accept a host of the same shape with other weights."""
    trust_remote_code: bool = False
    """Let the host's own Python code run."""
