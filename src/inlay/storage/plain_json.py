"""JSON as we write and read it: finite numbers, small files, nothing that takes for ever."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.errors import CheckpointError

LARGEST_MANIFEST = 4 << 20


def read_json(file: Path) -> Any:
    """What a small JSON file holds."""
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise ValueError("it is larger than a manifest can be")
        return json.loads(file.read_text(encoding="utf-8"), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None


def _integer(digits: str) -> int:
    """No size or count needs more digits, and Python refuses to print or convert what has thousands."""
    if len(digits) > 20:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: a number that is not finite is null."""
    return json.dumps(finite(value), ensure_ascii=False, indent=indent)


def digest_of(record: Mapping[str, Any]) -> str:
    """The sha256 of a record or manifest, without the one that it holds itself."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def number(value: float | None) -> float:
    """A number as `as_json` wrote it, where one that is not finite is null."""
    return math.nan if value is None else value


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value
