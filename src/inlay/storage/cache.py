"""The cache folder: what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where tokens, locks and the demo's downloads are kept: $INLAY_CACHE, or inlay in the user's cache folder."""
    given = os.environ.get("INLAY_CACHE")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("inlay", appauthor=False))
