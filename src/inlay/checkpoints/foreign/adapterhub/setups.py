"""adapter_setup.json: which adapters of a folder act, and how.

    {"type": "Stack", "children": [{"type": "single", "children": ["domain"]}, {"type": "Fuse", "children": [...]}]}

Only the three types that Inlay knows are read; a type is never looked up by name in a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.checkpoints.foreign.files import Folder
from inlay.errors import CheckpointError, InlayError
from inlay.host.registry import Inlay, Inlays
from inlay.host.setup import Average, Setup, Stack, names_in, walk
from inlay.methods import Bottleneck, LoRA

SETUP = "adapter_setup.json"
DEEPEST = 8
LONGEST = 20_000
"""Characters of a setup. Nobody needs a longer one, and resolving it would take long."""
_BLOCK = {"type", "children", "kwargs"}


@dataclass(frozen=True)
class Member:
    """An adapter or a fusion of a setup. A fusion of one adapter has the same folder as the adapter."""

    folder: str
    fusion: bool = False

    @property
    def name(self) -> str:
        return fusion_name(self.folder) if self.fusion else self.folder


def fusion_name(theirs: str) -> str:
    """Our name for a fusion. Theirs is its members' names and commas, so that one of a single member needs a suffix."""
    return theirs.replace(",", ".") if "," in theirs else f"{theirs}.fusion"


def read_setup(folder: Folder) -> tuple[Setup, list[Member]]:
    """The setup in our words, and what to load for it in this order: members of a fusion come before it."""
    file, found = folder / SETUP, folder.object(SETUP)
    if len(str(found)) > LONGEST:
        raise CheckpointError(f"{file} is longer than a setup can be.")
    odd = sorted(found.keys() - {"adapter_setup", "head_setup", "version"})
    if odd:
        raise CheckpointError(f"{file} has unknown options: {', '.join(odd)}.")
    members: dict[Member, None] = {}
    try:
        return _parsed(found.get("adapter_setup"), members, DEEPEST), list(members)
    except InlayError as error:
        raise CheckpointError(f"{file}: {error}") from None


def uppermost(setup: Setup) -> Setup:
    """The part whose head acts."""
    while isinstance(setup, Stack):
        setup = setup.parts[-1]
    return setup


def _parsed(block: Any, members: dict[Member, None], depth: int) -> Setup:
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
        return _average(parts, _numbers(options.get("weights")))
    if kind == "Fuse" and not options and all(isinstance(part, str) for part in parts):
        return _member(",".join(map(str, parts)), members, fusion=True)
    raise CheckpointError(
        f"a {kind!r} of {', '.join(map(repr, parts))} has no counterpart; "
        f"Inlay reads Stack, Average and Fuse of adapters"
    )


def _average(parts: list[Setup], weights: list[float] | None) -> Setup:
    """`adapters` scales the weights to sum to one, and then divides by the number of parts once more."""
    if len(parts) > 1:
        raise CheckpointError(
            f"an Average of {', '.join(map(str, parts))} is not a mean in `adapters`, which divides by the number of "
            f"parts twice, even the host's own output. {_by_hand('Average')}"
        )
    return Average(*parts, weights=weights).parts[0]


def check_stacks(setup: Setup, inlays: Inlays, folder: Folder) -> None:
    """Refuse a Stack whose parts meet at a module where `adapters` does not add up what they do."""
    for stack in (part for part in walk(setup) if isinstance(part, Stack)):
        acting: dict[tuple[str, bool], list[Inlay]] = {}
        for inlay in (inlays[name] for name in names_in(stack)):
            for module in {place.module for place in inlays.places_of(inlay) if place.changes}:
                acting.setdefault((module, isinstance(inlay.method, LoRA)), []).append(inlay)
        for (module, _), together in acting.items():
            if len(together) > 1 and (reason := _not_added(together)):
                raise CheckpointError(f"{folder / SETUP}: at {module}, {reason}. {_by_hand('Stack')}")


def _not_added(together: Sequence[Inlay]) -> str | None:
    names = " and ".join(repr(inlay.name) for inlay in together)
    if all(isinstance(inlay.method, LoRA) for inlay in together):
        return (
            f"{names} are stacked LoRAs. In `adapters` the next one reads what the one before gave, instead of the "
            f"module's input, and only the last one is added"
        )
    parallel = [i.name for i in together if isinstance(i.method, Bottleneck) and i.method.reads == "residual"]
    if parallel:
        return (
            f"{names} are stacked, and {parallel[0]!r} is parallel. In `adapters` a parallel adapter drops what the "
            f"parts before it gave, and those after it read its output without the host's"
        )
    return None


def _by_hand(kind: str) -> str:
    return (
        f"inlay.{kind} means something else, so the setup is not read. "
        f"To use the adapters Inlay's way, load their folders one by one and activate inlay.{kind}(…) of them."
    )


def _numbers(weights: Any) -> list[float] | None:
    if weights is None:
        return None
    if not isinstance(weights, list) or not all(isinstance(w, int | float) for w in weights):
        raise CheckpointError(f"the weights of an Average should be numbers, got {weights!r}")
    return weights


def _member(theirs: Any, members: dict[Member, None], fusion: bool = False) -> str:
    if not isinstance(theirs, str) or Path(theirs).name != theirs or theirs in ("", ".", ".."):
        raise CheckpointError(f"{theirs!r} is not the name of a folder beside it")
    member = Member(theirs, fusion)
    members[member] = None
    return member.name
