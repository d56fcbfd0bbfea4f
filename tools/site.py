"""Lay out the pages of the site below .site/: docs/ at its top, and beside it what docs/ links to.

    python tools/site.py

GitHub shows the files where they are, and links such as ../CONTRIBUTING.md work there. A site knows one folder only. So
the pages are copied into one, and every link is rewritten to where its target went. Examples become pages. A link to
something of the repository that is no page becomes plain text; a link to nothing stops the build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".site"
PLACES = {
    "README.md": "index.md",  # where a visitor arrives
    "docs/README.md": "documentation.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "examples/README.md": "examples/README.md",
}
FOLDERS = {"examples": "examples/README.md", "docs": "documentation.md"}
CODE = re.compile(r"(^```.*?^```$|^ {4}.*?$|`[^`\n]+`)", re.M | re.S)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def places() -> dict[str, str]:
    """File of the repository to its place in the site."""
    docs = [file for file in sorted((ROOT / "docs").rglob("*")) if file.is_file() and file.suffix != ".txt"]
    found = {str(file.relative_to(ROOT)): str(file.relative_to(ROOT / "docs")) for file in docs} | PLACES
    return found | {f"examples/{file.name}": f"examples/{file.stem}.md" for file in (ROOT / "examples").glob("*.py")}


def main() -> None:
    where = places()
    shutil.rmtree(SITE, ignore_errors=True)
    for source, place in where.items():
        target = SITE / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".py"):
            target.write_text(page_of(ROOT / source), encoding="utf-8")
        elif source.endswith(".md"):
            target.write_text(relinked(source, where), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, target)


def page_of(example: Path) -> str:
    code = example.read_text(encoding="utf-8")
    return f"# {example.stem}.py\n\n```python\n{code}```\n"


def relinked(source: str, where: dict[str, str]) -> str:
    def new(match: re.Match[str]) -> str:
        target, hash_, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = os.path.normpath(Path(source).parent / target)
        if not (ROOT / file).exists():
            sys.exit(f"{source}: {match['target']} leads nowhere")
        place = FOLDERS.get(file) or where.get(file)
        if place is None:
            return match["text"]
        link = os.path.relpath(place, Path(where[source]).parent)
        return f"{match['image']}[{match['text']}]({link}{hash_}{anchor})"

    parts = CODE.split((ROOT / source).read_text(encoding="utf-8"))
    return "".join(part if at % 2 else LINK.sub(new, part) for at, part in enumerate(parts))


if __name__ == "__main__":
    main()
