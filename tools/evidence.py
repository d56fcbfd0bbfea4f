"""Tables of docs/evidence/ from the records under evidence/, so that no number on a page is typed by hand.

    python tools/evidence.py            # write them anew
    python tools/evidence.py --check    # exit with 1 where a page says something else than its records

A page names the command before the table that it prints:

    <!-- inlay study table evidence/few-labels -->
    ```
    …
    ```
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "evidence"
TABLE = re.compile(r"<!-- inlay (study (?:table|show) [^\n]+?) -->\n```\n.*?```\n", re.DOTALL)


def printed(command: str) -> str:
    """What an `inlay study table` or `show` prints from the project's folder."""
    from inlay.cli import main

    arguments = [str(ROOT / part) if part.startswith("evidence/") else part for part in shlex.split(command)]
    with redirect_stdout(StringIO()) as told:
        main(arguments)
    return told.getvalue().strip("\n")


def renewed(page: str, say: Callable[[str], str] = printed) -> str:
    """A page with every table as its command prints it."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- inlay {found[1]} -->\n```\n{say(found[1])}\n```\n"

    return TABLE.sub(table, page)


def main(arguments: list[str]) -> int:
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'none'}")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
