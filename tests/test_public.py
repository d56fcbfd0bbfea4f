"""The public API: what loads on first use is what type checkers and editors see."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inlay

ROOT = Path(__file__).parent.parent


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


def test_every_public_class_and_function_says_what_it_is() -> None:
    named = {name: getattr(inlay, name) for name in inlay.__all__}
    spoken = {name: inspect.getdoc(it) for name, it in named.items() if inspect.isclass(it) or inspect.isfunction(it)}
    assert len(spoken) > 40
    assert [name for name, text in spoken.items() if not text] == []


def test_what_the_pages_call_is_public() -> None:
    """Every inlay.name in the Python of the README and the docs."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    called = {name for block in code for name in re.findall(r"(?<![\w./])inlay\.([A-Za-z]\w*)", block)}
    rooms = {path.stem for path in Path(inlay.__file__).parent.iterdir()}
    assert len(called) > 20
    assert called - set(inlay.__all__) - rooms == set()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pfeifer'"):
        inlay.pfeifer  # noqa: B018
    assert not hasattr(inlay, "_no_such_name")


def test_importing_is_quick_and_a_star_brings_everything() -> None:
    script = (
        "import sys, inlay; assert 'torch' not in sys.modules; own = set(dir(inlay))\n"
        "from inlay import *; missing = own - set(globals()); assert not missing, missing"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a clone")
@pytest.mark.parametrize(
    "room",
    ["runs", "host", "data", "report", "cli", "storage", "training"],
)  # fmt: skip
def test_no_room_of_the_source_is_ignored_by_git(room: str) -> None:
    """A module that git ignores is there for its author and missing for everybody else."""
    file = f"src/inlay/{room}/a_new_module.py"
    done = subprocess.run(
        [str(shutil.which("git")), "check-ignore", "--no-index", file], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 1, f"{file} is ignored"
