"""Setups: which inlays act, and how.

    "rte"                          one inlay
    Stack("domain", "rte")         first "domain", then "rte" on its result
    Average("a", "b")              the mean of both results; weights sum to one
    Rows("a", "b", "a")            row i of the batch uses the i-th inlay
    Fuse("f", off=["a"])           a fusion with some members off or their weights pinned; plain "f" is the fusion
    None                           the bare host

Every one of them takes names or other setups, where that has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from inlay.errors import SetupError

Setup = Union[str, "Stack", "Average", "Rows", "Fuse", None]


@dataclass(frozen=True, init=False)
class Stack:
    """One after the other: each part acts on the result of the parts before it."""

    parts: tuple[Setup, ...]

    def __init__(self, *parts: Setup) -> None:
        object.__setattr__(self, "parts", _checked("Stack", _flat(parts)))

    def with_part(self, at: int, part: Setup) -> Stack:
        """The same with another part at one position."""
        new = object.__new__(Stack)
        object.__setattr__(new, "parts", (*self.parts[:at], part, *self.parts[at + 1 :]))
        return new


@dataclass(frozen=True, init=False)
class Average:
    """The weighted mean of what each part would have given. Weights are scaled to sum to one."""

    parts: tuple[Setup, ...]
    weights: tuple[float, ...]

    def __init__(self, *parts: Setup, weights: Sequence[float] | None = None) -> None:
        parts = _checked("Average", _flat(parts))
        given = tuple(map(float, weights)) if weights is not None else (1.0,) * len(parts)
        if len(given) != len(parts):
            raise SetupError(f"Average has {len(parts)} parts but {len(given)} weights; give one weight per part.")
        if not all(w >= 0 for w in given) or not sum(given) > 0 or sum(given) == float("inf"):
            raise SetupError(f"Average needs finite weights of at least 0 that do not all vanish, got {list(given)}.")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "weights", tuple(w / sum(given) for w in given))


@dataclass(frozen=True, init=False)
class Rows:
    """Row i of the batch uses the i-th part; None leaves a row to the bare host.

    `each`: how many rows in succession one part has, where the host sees more rows than there are parts: the beams
    of a beam search, for instance.
    """

    parts: tuple[Setup, ...]
    each: int

    def __init__(self, *parts: Setup, each: int = 1) -> None:
        parts = _flat(parts)
        if not parts:
            raise SetupError("Rows() is empty; give one inlay for each row of the batch.")
        if each < 1:
            raise SetupError(f"Rows(each={each}): a part needs at least one row.")
        for part in parts:
            _check_part("Rows", part)
            if any(isinstance(inner, Rows) for inner in walk(part)):
                raise SetupError("Rows inside Rows has no meaning: a row of the batch is already one row.")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "each", each)

    @classmethod
    def of(cls, parts: Iterable[Setup], each: int = 1) -> Rows:
        """The same of setups that have been resolved, each by itself: nothing is left to check."""
        made = object.__new__(cls)
        object.__setattr__(made, "parts", tuple(parts))
        object.__setattr__(made, "each", each)
        return made


@dataclass(frozen=True, init=False)
class Fuse:
    """A fusion by its name, with members switched off or pinned to a weight; the others share what is left."""

    name: str
    pinned: tuple[tuple[str, float], ...]

    def __init__(self, name: str, *, off: Sequence[str] = (), pin: Mapping[str, float] | None = None) -> None:
        off = (off,) if isinstance(off, str) else off
        pinned = dict.fromkeys(off, 0.0) | {member: float(weight) for member, weight in (pin or {}).items()}
        if len(pinned) < len(off) + len(pin or {}):
            raise SetupError(f"Fuse({name!r}): a member is either off or pinned, once.")
        if not all(0 <= weight <= 1 for weight in pinned.values()) or sum(pinned.values()) > 1 + 1e-6:
            raise SetupError(
                f"Fuse({name!r}): pinned weights lie between 0 and 1 and sum to at most 1, got {dict(pin or {})}."
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "pinned", tuple(pinned.items()))


def walk(setup: Setup) -> Iterator[Setup]:
    """The setup and everything inside it."""
    yield setup
    if isinstance(setup, Stack | Average | Rows):
        for part in setup.parts:
            yield from walk(part)


def check_setup(setup: Setup) -> None:
    """Refuse what is not a setup, and Rows that do not agree on the batch."""
    _check_part("a setup", setup)
    rows = {len(part.parts) * part.each for part in walk(setup) if isinstance(part, Rows)}
    if len(rows) > 1:
        raise SetupError(
            f"one batch cannot have {' and '.join(map(str, sorted(rows)))} rows: give all Rows equally many."
        )


def _flat(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parts one by one, also when they came as one list."""
    return tuple(parts[0]) if len(parts) == 1 and isinstance(parts[0], list | tuple) else parts


def names_in(setup: Setup) -> tuple[str, ...]:
    """Every inlay a setup names, once each, in order."""
    found = (part.name if isinstance(part, Fuse) else part for part in walk(setup))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str)))


def _checked(kind: str, parts: tuple[Setup, ...]) -> tuple[Setup, ...]:
    if not parts:
        raise SetupError(f"{kind}() is empty; name at least one inlay.")
    for part in parts:
        if part is None:
            raise SetupError(f"None inside {kind} has no meaning: it stands for the bare host. Leave it out.")
        _check_part(kind, part)
    return parts


def _check_part(kind: str, part: object) -> None:
    if part is not None and not isinstance(part, str | Stack | Average | Rows | Fuse):
        raise SetupError(f"{kind} takes names of inlays or other setups, got {part!r}.")
