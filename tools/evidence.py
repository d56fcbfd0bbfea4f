"""Tables of docs/evidence/ and of the README from the records under evidence/: no number of a table is typed by hand.

    python tools/evidence.py            # write them anew
    python tools/evidence.py --check    # exit with 1 where a page says something else than its records

A page names the command before the table that it prints:

    <!-- inlay study table evidence/few-labels -->
    ```
    …
    ```

`runs below evidence/few-labels logreg` is of this file: every single run against another way with the same rows.
"""

from __future__ import annotations

import csv
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]
TABLE = re.compile(r"<!-- (inlay study (?:table|show) [^\n]+?|runs below [^\n]+?) -->\n```\n.*?```\n", re.DOTALL)
FAR = 2.0
"""Points below that count."""


def printed(command: str) -> str:
    """What a command of a page prints, run in the project's folder."""
    words = [str(ROOT / word) if word.startswith("evidence/") else word for word in shlex.split(command)]
    return runs_below(words[2], words[3]) if words[0] == "runs" else _told(words[1:])


def _told(arguments: list[str]) -> str:
    from inlay.cli import main

    with redirect_stdout(StringIO()) as told:
        main(arguments)
    return told.getvalue().strip("\n")


def runs_below(folder: str, against: str) -> str:
    """Of each way and number of rows: how every run compares with the other way's of the same task, rows and seed."""
    scores: dict[str, dict[tuple[int, str, str], float]] = defaultdict(dict)
    for row in csv.DictReader(_told(["study", "table", folder, "--format", "csv"]).splitlines()):
        if row["state"] == "done":
            scores[row["way"]][int(row["rows"]), row["task"], row["seed"]] = float(row["score"])
    lines = [f"{'way':12}  rows  runs   mean  lowest  highest  more than {FAR:.0f} points below {against}"]
    for way, found in scores.items():
        for rows in sorted({key[0] for key in found}) if way != against else ():
            gains = [
                score - scores[against][key]
                for key, score in found.items()
                if key[0] == rows and key in scores[against]
            ]
            below = sum(gain < -FAR for gain in gains)
            if gains:
                mean, lowest, highest = statistics.mean(gains), min(gains), max(gains)
                lines.append(
                    f"{way:12}  {rows:4}  {len(gains):4}  {mean:+5.1f}  {lowest:+6.1f}  {highest:+7.1f}  {below}"
                )
    return "\n".join(lines)


def renewed(page: str, say: Callable[[str], str] = printed) -> str:
    """A page with every table as its command prints it."""
    return TABLE.sub(lambda found: f"<!-- {found[1]} -->\n```\n{say(found[1])}\n```\n", page)


def main(arguments: list[str]) -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'none'}")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
