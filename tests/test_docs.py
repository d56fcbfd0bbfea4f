"""The docs are true: their Python runs, prints what they say, and their tables are those of the classes.

All ```python blocks of a page run in order, in one namespace, in an empty folder. A ```text block directly after one is
what it prints. `<!-- not run: reason -->` before a block leaves it out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import inlay
from inlay.anatomy import families
from inlay.methods import METHODS, Bottleneck

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
SKELETON = ["Idea", "Formula", "When to use it", "How it relates to its siblings", "Parameters", "Example", "Paper"]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+? -->\n+)?^```python\n(?P<code>.*?)^```$(?P<output>\n\n```text\n(?P<text>.*?)^```$)?",
    re.S | re.M,
)


@dataclass
class Block:
    line: int
    code: str
    prints: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [m for m in BLOCK.finditer(text) if not m["skip"]]
    return [Block(text.count("\n", 0, m.start("code")) + 1, m["code"], m["text"]) for m in found]


def short(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=short)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    known = dict(METHODS)
    space: dict = {"__name__": "page"}
    try:
        for block in blocks(page):
            printed = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")  # errors name the page's own line
            with contextlib.redirect_stdout(printed):
                exec(code, space)  # noqa: S102 - our own pages
            if block.prints is not None:
                assert printed.getvalue() == block.prints, f"{short(page)}, line {block.line}"
    finally:
        METHODS.clear()
        METHODS.update(known)


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if target.endswith((".png", ".svg")):
            continue  # pictures are made by benchmarks
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("page", METHOD_PAGES, ids=short)
def test_a_method_page_has_the_skeleton(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.M)
    assert [h for h in headings if h in SKELETON] == SKELETON


def tables(page: Path) -> dict[str, dict[str, str]]:
    """Class to its table of fields, with the default as it is written: ### `inlay.X`, then | `field` | `default` | …"""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
        if name := re.match(r"`inlay\.([\w.]+)`", part):
            found[name[1].rpartition(".")[2]] = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", part, re.M))
    return found


def test_the_tables_of_parameters_are_those_of_the_classes() -> None:
    documented: dict[str, dict[str, str]] = {}
    for page in METHOD_PAGES:
        documented |= tables(page)
    common = Bottleneck.model_fields
    assert documented.pop("Bottleneck") == {name: repr(field.default) for name, field in common.items()}
    for kind, method in METHODS.items():
        if kind in ("wide", "fusion"):
            continue  # made by collapse and add_fusion
        own = {
            name: field
            for name, field in method.model_fields.items()
            if name not in common or common[name].default != field.default
        }
        if not issubclass(method, Bottleneck):
            own = dict(method.model_fields)
        wanted = {
            n: "required" if f.is_required() else repr(f.get_default(call_default_factory=True)) for n, f in own.items()
        }
        assert documented.pop(method.__name__, {}) == wanted, method.__name__
    settings = list(inspect.signature(inlay.add_fusion).parameters.values())[2:]  # without host and name
    assert documented.pop("add_fusion") == {
        p.name: "required" if p.default is p.empty else repr(p.default) for p in settings
    }
    assert not documented


def test_the_table_of_heads() -> None:
    text = (ROOT / "docs" / "all-of-inlay.md").read_text(encoding="utf-8")
    part = text[text.index("## Heads and norms") : text.index("## Save and load")]
    found = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", part, re.M))
    assert found == {name: repr(field.default) for name, field in inlay.Head.model_fields.items()}


def test_every_public_function_is_in_the_docs() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in inlay.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_the_example_of_adamix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("adamix_example", ROOT / "examples" / "adamix.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "adamix_example", module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["adamix.py", "--rows", "50", "--epochs", "2", "--seeds", "2"])
    module.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["seed", "merged", "random", "first", "ensemble"]
    for line in printed[2:4]:
        assert all(0 <= float(value) <= 100 for value in line.split()[1:])
    assert sum("merged - " in line for line in printed) == 3
    monkeypatch.setattr(sys, "argv", ["adamix.py", "--host", "somewhere"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "belong together" in capsys.readouterr().err
