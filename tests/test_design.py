"""docs/design.md shows the rooms that there are, in the order that the import contract holds them to."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def rooms_on_the_page() -> list[str]:
    tree = re.search(r"^```\nsrc/inlay/\n(.*?)^```", PAGE, re.M | re.S)
    assert tree is not None
    lines = [line.strip() for line in tree[1].splitlines()]
    assert all(re.match(r"\S.*?\s{2,}\S", line) for line in lines), "one line per room, with what is in it"
    return [name.strip().rstrip("/") for line in lines for name in re.split(r"\s{2,}", line)[0].split(",")]


def test_the_page_shows_the_tree() -> None:
    source = ROOT / "src" / "inlay"
    folders = {folder.name for folder in source.iterdir() if (folder / "__init__.py").is_file()}
    files = {file.name for file in source.glob("*.py")} - {"__init__.py"}
    assert set(rooms_on_the_page()) == folders | files


def test_the_contract_is_the_order_of_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"]
    from_top = [layer.removeprefix("inlay.") for layer in reversed(layers)]
    assert [room.removesuffix(".py") for room in rooms_on_the_page()] == from_top


def test_every_file_named_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|toml))`", PAGE))
    assert named
    for path in named:
        assert any((root / path).is_file() for root in (ROOT, ROOT / "src" / "inlay")), path
