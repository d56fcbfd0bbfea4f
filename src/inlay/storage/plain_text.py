"""Text that only says something: nothing in it moves a terminal's cursor, rings its bell or changes its colours."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t"
REPLACED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's control and format characters, lone surrogates and odd line ends."""
JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need."""


def printable(text: str) -> str:
    """The text as a terminal should get it; what would act is shown as its escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _harmless(char) else ascii(char)[1:-1] for char in text)


def _harmless(char: str) -> bool:
    return char in KEPT or char in JOINERS or unicodedata.category(char) not in REPLACED
