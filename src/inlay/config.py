"""Frozen settings that refuse what they do not know, and say so in words."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from inlay.errors import ConfigError, nearest

MOST = 100
"""Errors that are told at once; a file with more is not one that somebody mistyped."""


class Config(BaseModel):
    """Base of every setting a user writes: immutable, no unknown fields, errors that name the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_in_words(type(self), error)) from None


def _in_words(config: type[Config], error: ValidationError) -> str:
    lines = []
    problems = error.errors()
    for problem in problems[:MOST]:
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{config.__name__} has no setting {field!r}.{nearest(field, config.model_fields)}")
        else:
            seen = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{config.__name__}{'.' if field else ''}{field}: {message}{seen}")
    if len(problems) > MOST:
        lines.append(f"and {len(problems) - MOST:,} more")
    return "\n".join(dict.fromkeys(lines))
