"""The public API: what loads on first use is what type checkers and editors see."""

import ast
from pathlib import Path

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
