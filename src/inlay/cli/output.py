"""What a verb says: text for people or JSON for machines, on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from inlay.storage.plain_json import as_json
from inlay.storage.plain_text import printable


def tell(text: str, facts: Any, machine: bool) -> None:
    """The text, or with --json the facts."""
    say(json_text(facts, indent=1) if machine else printable(text))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that stdout can write: in ASCII where it cannot write all of Unicode; control characters are escapes."""
    text = as_json(value, indent=indent)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(json.loads(text), indent=indent)
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if "\x7f" <= char <= "\x9f" else char


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
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
