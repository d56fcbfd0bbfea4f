"""The public API: what loads on first use is what type checkers and editors see."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import inlay


def test_every_public_name_is_there() -> None:
    for name in inlay.__all__:
        assert getattr(inlay, name) is not None
    assert dir(inlay) == inlay.__all__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(inlay.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in typed.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == inlay._HOME


SRC = Path(inlay.__file__).parent
LEARN = {
    "accelerate", "click", "datasets", "jinja2", "markupsafe", "matplotlib", "pyarrow", "rich", "scipy", "sklearn", "yaml",
}  # fmt: skip


def in_a_new_process(code: str) -> str:
    """What a new Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["inlay", "inlay.errors", "inlay.anatomy.families", "inlay.storage.folders"])
def test_what_lies_at_the_bottom_imports_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert in_a_new_process(code) == "[]\n"


def test_the_core_imports_nothing_that_only_learning_needs() -> None:
    """Not even inside a function: the rooms below `data` do without the extra `learn`."""
    rooms = ("anatomy", "methods", "host", "compose", "checkpoints", "storage")
    for file in [*SRC.glob("*.py"), *(file for room in rooms for file in (SRC / room).rglob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not LEARN & {name.partition(".")[0] for name in names}, file


ROOMS = (
    "storage", "anatomy", "methods", "host", "compose", "checkpoints", "data", "training", "report", "runs", "demo", "cli",
)  # fmt: skip


def test_imports_point_downwards() -> None:
    """What stands under `if TYPE_CHECKING` counts as well; errors and config lie below every room."""
    for at, room in enumerate(ROOMS):
        for file in (SRC / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("inlay."):
                    target = (node.module or "").split(".")[1]
                    assert target in ("errors", "config") or ROOMS.index(target) <= at, f"{file}: {node.module}"
