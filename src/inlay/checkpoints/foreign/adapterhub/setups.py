"""adapter_setup.json: which adapters of a folder act, and how.

    {"type": "Stack", "children": [{"type": "single", "children": ["domain"]}, {"type": "Fuse", "children": [...]}]}

Only the three types that Inlay knows are read; a type is never looked up by name in a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay.checkpoints.foreign.files import Folder
from inlay.errors import CheckpointError, InlayError
from inlay.host.setup import Average, Setup, Stack

SETUP = "adapter_setup.json"
DEEPEST = 8
LONGEST = 20_000
"""Characters of a setup. Nobody needs a longer one, and resolving it would take long."""
_BLOCK = {"type", "children", "kwargs"}


def read_setup(folder: Folder) -> tuple[Setup, dict[str, str]]:
    """The setup in our words, and its folders with our names for them, fusions after their members."""
    file, found = folder / SETUP, folder.object(SETUP)
    if len(str(found)) > LONGEST:
        raise CheckpointError(f"{file} is longer than a setup can be.")
    odd = sorted(found.keys() - {"adapter_setup", "head_setup", "version"})
    if odd:
        raise CheckpointError(f"{file} has unknown options: {', '.join(odd)}.")
    members: dict[str, str] = {}
    try:
        return _parsed(found.get("adapter_setup"), members, DEEPEST), members
    except InlayError as error:
        raise CheckpointError(f"{file}: {error}") from None


def uppermost(setup: Setup) -> Setup:
    """The part whose head acts."""
    while isinstance(setup, Stack):
        setup = setup.parts[-1]
    return setup


def _parsed(block: Any, members: dict[str, str], depth: int) -> Setup:
    whole = isinstance(block, dict) and isinstance(block.get("children"), list) and block["children"]
    if not whole or block.keys() - _BLOCK or depth == 0:
        raise CheckpointError(f"a composition block is not readable: {str(block)[:200]}")
    kind, children, options = block.get("type"), block["children"], block.get("kwargs") or {}
    if kind == "single" and len(children) == 1 and not options:
        return _member(children[0], members)
    parts = [_parsed(child, members, depth - 1) for child in children]
    if kind == "Stack" and not options:
        return parts[0] if len(parts) == 1 else Stack(*parts)
    if kind == "Average" and isinstance(options, dict) and options.keys() <= {"weights"}:
        return Average(*parts, weights=_numbers(options.get("weights")))
    if kind == "Fuse" and not options and all(isinstance(part, str) for part in parts):
        return _member(",".join(map(str, parts)), members)
    raise CheckpointError(
        f"a {kind!r} of {', '.join(map(repr, parts))} has no counterpart; "
        f"Inlay reads Stack, Average and Fuse of adapters"
    )


def _numbers(weights: Any) -> list[float] | None:
    if weights is None:
        return None
    if not isinstance(weights, list) or not all(isinstance(w, int | float) for w in weights):
        raise CheckpointError(f"the weights of an Average should be numbers, got {weights!r}")
    return weights


def _member(theirs: Any, members: dict[str, str]) -> str:
    if not isinstance(theirs, str) or Path(theirs).name != theirs or theirs in ("", ".", ".."):
        raise CheckpointError(f"{theirs!r} is not the name of a folder beside it")
    return members.setdefault(theirs, theirs.replace(",", "."))
