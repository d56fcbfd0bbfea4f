"""Self-contained HTML pages from the templates beside this file: no script, and nothing to fetch."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """A whole document. Every value is escaped, except pictures, which `plots` hands over as markup."""
    return _environment().get_template(f"{template}.html.j2").render(**values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("inlay.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["cell"] = _cell
    return made


def _cell(value: Any) -> str:
    """A table's cell as text: four digits after the point, and thousands apart."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
