"""The site: its pages are all there, the reference has every public name once, and links are rewritten rightly."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import inlay

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "site.py"))


def test_the_reference_has_every_public_name_once() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: inlay\.(\w+)$", text, re.M)) == inlay.__all__
    assert not re.search(r"^::: (?!inlay\.\w+$)", text, re.M), "no path but the public one"


def test_the_reference_is_not_the_only_page_with_a_public_name() -> None:
    pages = [page for page in DOCS.rglob("*.md") if page.name != "api.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [name for name in inlay.__all__ if not re.search(rf"\b{name}\b", text)]


def test_every_page_is_in_the_navigation(site: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [leaf for value in (part.values() if isinstance(part, dict) else part) for leaf in leaves(value)]

    pages = [place for place in site["places"]().values() if place.endswith(".md")]
    assert sorted(leaves(config["nav"])) == sorted(pages)
    assert config["theme"]["font"] is False


def test_links_lead_to_where_their_target_went(site: dict[str, Any]) -> None:
    where = site["places"]()
    assert "](index.md)" in site["relinked"]("docs/README.md", where)
    assert "](../examples/adamix.md)" in site["relinked"]("docs/methods/adamix.md", where)
    start = site["relinked"]("README.md", where)
    assert "](methods/fusion.md)" in start
    assert "![" in start
    assert "](fusion-cost.png)" in start
    assert "[benchmarks]" not in site["relinked"]("docs/README.md", where), "no page: plain text"


def test_the_lock_is_of_the_tested_versions() -> None:
    runpy.run_path(str(ROOT / "tools" / "lock.py"))["check"]()
