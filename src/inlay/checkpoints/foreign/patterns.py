"""Regular expressions from somebody else's file: matching them has a time limit.

peft names modules by patterns (target_modules, rank_pattern …). Python's `re` cannot be stopped, and `(.|.)(.|.)…`
against one module's name takes it longer than anybody waits; `regex` can be.
"""

from __future__ import annotations

import re
import time

import regex

from inlay.errors import ConfigError

LONGEST = 2000
LARGEST_COUNT = 1000
PATIENCE = 3.0
"""Seconds for compiling and matching all patterns of one file; an honest file takes milliseconds."""


class Patterns:
    """The patterns of one file, and the time that is left for them."""

    def __init__(self) -> None:
        self.left = PATIENCE
        self.known: dict[str, regex.Pattern[str]] = {}

    def matches(self, text: str, path: str) -> bool:
        """Whether a pattern matches a module's whole path."""
        began = time.thread_time()
        if text not in self.known:
            self.known[text] = _compiled(text)
        try:
            matched = self.known[text].fullmatch(path, timeout=max(self.left, 1e-3))
        except TimeoutError:
            raise ConfigError(f"the pattern {text[:80]!r} takes too long to match the name of a module") from None
        self.left -= time.thread_time() - began
        if self.left <= 0:
            raise ConfigError(f"its {len(self.known):,} patterns take too long; the last was {text[:80]!r}")
        return matched is not None


def _compiled(text: str) -> regex.Pattern[str]:
    """Compile a pattern. Counted repeats are unrolled by that, so their product is limited."""
    counts = 1
    for number in re.findall(r"\d+", " ".join(re.findall(r"\{[^}]*\}", text))):
        counts *= max(int(number[:9]), 1)
    if len(text) > LONGEST or counts > LARGEST_COUNT:
        raise ConfigError(
            f"the pattern {text[:80]!r} is longer, or counts further, than needed to match the name of a module"
        )
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ConfigError(f"{text[:80]!r} is not a pattern: {error}") from None
