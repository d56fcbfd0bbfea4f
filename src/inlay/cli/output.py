"""What a verb says: text for people or JSON for machines, on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from inlay.storage.plain_json import as_json


def tell(text: str, facts: Any, json: bool) -> None:
    """The text, or with --json the facts."""
    say(as_json(facts, indent=1) if json else text)


def say(text: str) -> None:
    """On stdout, all of it or an error: click.echo is silent about what a full disk did not take."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what was not taken does not fail again at exit
        if not isinstance(error, BrokenPipeError):  # the reader has gone, as in `| head`: nothing more to say
            raise


def columns(rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Rows as aligned columns; numbers to the right."""
    cells = [[shown(value) for value in row] for row in rows]
    whole = [list(header), *cells] if header else cells
    widths = [max(len(row[i]) for row in whole) for i in range(len(whole[0]))] if whole else []
    right = [bool(rows) and isinstance(rows[0][i], int | float) for i in range(len(widths))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in whole
    ]
    return "\n".join(lines)


def shown(value: Any, separator: str = ", ") -> str:
    """A value as text for people: four digits after the point, thousands apart, lists and tables in one line."""
    if value is None or value == []:  # such as a metric that is not defined
        return "—"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return separator.join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
