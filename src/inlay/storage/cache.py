"""The cache folder: what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where tokens and the demo's downloads are kept: $INLAY_CACHE, or inlay in the user's cache folder."""
    given = os.environ.get("INLAY_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inlay"
