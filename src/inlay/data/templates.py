"""What a language model reads: a template of columns, with {target} where its answer stands.

    "{source}{bos} {target}"                 a decoder goes on from what stands before {target}
    "{premise}? {target}, {hypothesis}"      a masked language model fills {target} in

{bos} and {eos} are the tokenizer's own tokens. Here they are Unicode noncharacters, which no text has; the codec, which
knows the tokenizer, puts the tokens in.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

from inlay.data.errors import DataError
from inlay.data.rows import Row, text_in

TARGET = "target"
MARKS = {"bos": "\ufdd0", "eos": "\ufdd1"}
"""Tokens that a template may name, and what stands for them until a tokenizer is known."""


def columns_in(template: str) -> list[str]:
    """The columns that a template reads."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    return [name for name in names if name != TARGET and name not in MARKS]


def wrong_with(template: str) -> str | None:
    """What is wrong with a template, in words; None where it is fine."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"the template {template!r} cannot be read: {error}"
    if any(name == "" or spec or conversion for _, name, spec, conversion in parts):
        return f"the template {template!r} must name its columns in braces, and nothing else"
    count = sum(name == TARGET for _, name, _, _ in parts)
    if count != 1:
        where = "has no {target}" if not count else "has {target} more than once"
        return f'the template {template!r} {where}: the answer stands there, as in "{{source}} {{target}}"'
    return None


def around(template: str, row: Row) -> tuple[str, str]:
    """What stands before and after the answer, with a row's columns put in."""
    before = after = ""
    seen = False
    for text, name, _, _ in string.Formatter().parse(template):
        piece = text
        if name == TARGET:
            before, seen = before + piece, True
            continue
        if name is not None:
            piece += MARKS[name] if name in MARKS else text_in(row, name).strip()
        before, after = (before, after + piece) if seen else (before + piece, after)
    return before, after


def with_tokens(text: str, token: Callable[[str], str | None]) -> str:
    """A text with the tokenizer's own tokens where the template named them; one that it does not have is left out."""
    for name, mark in MARKS.items():
        text = text.replace(mark, token(name) or "")
    return text


# data as text, as the published code of LoRA and AdaMix writes it


SLOT = re.compile(r"([^,\[\]]+)\[([^\]]*)\]")
SLOTS = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
"""E2E's slots that their files call otherwise."""


def slots(value: str) -> str:
    """E2E: "name[Aromi], eatType[pub]" or "name : Aromi | eatType : pub" as "name : Aromi | Type : pub"."""
    found = SLOT.findall(value)
    pairs = found or [part.partition(" : ")[::2] for part in value.split(" | ")]
    return " | ".join(f"{SLOTS.get(name.strip(), name.strip())} : {text.strip()}" for name, text in pairs)


def triples(value: object, *, lower: bool = False) -> str:
    """Triples as "subject : relation : object | …"; DART's relations are in lower case there.

    A triple is a list of three, or a text "subject | relation | object" as WebNLG writes it; a text is taken as done.
    """
    if isinstance(value, str):
        parts = [part.split(" : ") for part in value.split(" | ")]
        if not lower or any(len(part) != 3 for part in parts):
            return value.strip()
    elif isinstance(value, list) and value:
        while len(value) == 1 and isinstance(value[0], list) and value[0] and isinstance(value[0][0], list):
            value = value[0]
        if isinstance(value[0], list) and value[0] and " | " in str(value[0][0]):
            value = value[0]  # the hub has a list of versions, of which the first is the official one
        parts = [[p.strip() for p in t.split(" | ")] if isinstance(t, str) else [str(p) for p in t] for t in value]
        if any(len(part) != 3 for part in parts):
            raise DataError(f"a triple has a subject, a relation and an object, got {str(value)[:120]}")
    else:
        raise DataError(f"expected triples, got {str(value)[:120]}")
    return " | ".join(f"{s} : {r.lower() if lower else r} : {o}" for s, r, o in parts)


LINEARISED: dict[str, Callable[[object], str]] = {
    "slots": lambda value: slots(str(value)),
    "triples": triples,
    "triples_lower": lambda value: triples(value, lower=True),
}
"""How a column becomes the text that is read."""
