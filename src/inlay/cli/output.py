"""What a verb says: text for people or JSON for machines, on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from inlay.learning.files import as_json


def tell(text: str, facts: Any, json: bool) -> None:
    """The text, or with --json the facts."""
    click.echo(as_json(facts, indent=1) if json else text)


def columns(rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Rows as aligned columns; numbers to the right."""
    cells = [[_shown(value) for value in row] for row in rows]
    whole = [list(header), *cells] if header else cells
    widths = [max(len(row[i]) for row in whole) for i in range(len(whole[0]))] if whole else []
    right = [bool(rows) and isinstance(rows[0][i], int | float) for i in range(len(widths))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in whole
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
