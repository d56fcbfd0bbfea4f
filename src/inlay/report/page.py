"""A self-contained HTML page: text, tables and pictures, no script and nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { font-weight: 600 } table { border-collapse: collapse; margin: .5rem 0 }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } svg, img { max-width: 100%; height: auto }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document of parts that are HTML already."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def table(rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Cells are text or numbers, never HTML."""
    top = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>" if header else ""
    return "<table>" + top + "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows) + "</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td class='number'>{value:.4f}</td>"
    return (
        f"<td class='number'>{value:,}</td>"
        if isinstance(value, int) and not isinstance(value, bool)
        else f"<td>{escape(str(value))}</td>"
    )


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
