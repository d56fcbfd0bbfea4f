"""Frozen settings that refuse what they do not know, and say so in words."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from inlay.errors import ConfigError, nearest

MOST_ERRORS = 100
"""A message lists at most this many errors."""
LONGEST_VALUE = 200
"""A message shows at most this many characters of a value."""
DEEPEST_NESTING = 50
"""Values that are nested deeper than this are refused; no setting needs it."""


class Config(BaseModel):
    """Base of every setting a user writes: immutable, no unknown fields, errors that name the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **fields: Any) -> None:
        _check_texts(type(self), fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_in_words(type(self), error)) from None


def each_once(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    """For validators: names, none of them twice and one at least; `what` is what they name."""
    if not names or len(set(names)) != len(names):
        raise ValueError(f"name each {what} once, and at least one")
    return names


def _in_words(config: type[Config], error: ValidationError) -> str:
    lines = []
    problems = error.errors()
    for problem in problems[:MOST_ERRORS]:
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{config.__name__} has no setting {field!r}.{nearest(field, config.model_fields)}")
        else:
            seen = "" if problem["type"] == "missing" or not field else f", got {_short(problem['input'])}"
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{config.__name__}{'.' if field else ''}{field}: {message}{seen}{_hint(problem)}")
    if len(problems) > MOST_ERRORS:
        lines.append(f"and {len(problems) - MOST_ERRORS:,} more")
    return "\n".join(dict.fromkeys(lines))


def _hint(problem: Any) -> str:
    if problem["type"] == "string_type" and isinstance(problem["input"], bool):
        return ". YAML reads yes, no, on, off, true and false without quotes as truth values: put it in quotes"
    return ""


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # Python prints no number of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}…"


def _check_texts(config: type[Config], fields: dict[str, Any]) -> None:
    """Refuse texts that no file, no path and no tokenizer takes."""
    wrong = [name for name, value in fields.items() if not _writable(value)]
    if wrong:
        raise ConfigError(
            "\n".join(
                f"{config.__name__}.{name}: a text must be whole Unicode without NUL, got {_short(fields[name])}"
                for name in wrong
            )
        )


def _writable(value: Any, depth: int = 0) -> bool:
    if depth > DEEPEST_NESTING:
        return False
    if isinstance(value, str | PurePath):
        text = str(value)
        return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    if isinstance(value, dict):
        return all(_writable(inner, depth + 1) for pair in value.items() for inner in pair)
    return not isinstance(value, list | tuple) or all(_writable(inner, depth + 1) for inner in value)
