"""What a server refuses, each with the status and the word that an answer has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from inlay.errors import InlayError
from inlay.storage.plain_text import printable

LONGEST = 2000
"""Characters of a message; what was sent may be repeated in it."""
PATH = re.compile(r"(?<![\w.~:/])(?:[A-Za-z]:)?(?:[/\\][^\s/\\'\"`:;,()<>|]+)+[/\\]?")
"""A path from the root of a disk on."""


class ServeError(InlayError):
    """Base of what a server answers with instead of a result."""

    status = 500
    error_type = "internal"
    retry_after: float | None = None
    """Seconds after which to ask again."""

    def __init__(self, message: str, *, urls: Sequence[str] = ()) -> None:
        """urls: what of the message is a route of the server, or was asked for, and no path of its disk."""
        super().__init__(message)
        self.urls = tuple(urls)


class BadRequest(ServeError):
    """The request cannot be read at all."""

    status, error_type = 400, "bad_request"


class Unauthorized(ServeError):
    """A key is needed."""

    status, error_type = 401, "unauthorized"


class Forbidden(ServeError):
    """The key does not allow this."""

    status, error_type = 403, "forbidden"


class NotFound(ServeError):
    """There is no such model, inlay or route."""

    status, error_type = 404, "not_found"


class MethodNotAllowed(ServeError):
    """The route is there, for another method."""

    status, error_type = 405, "method_not_allowed"


class TooLarge(ServeError):
    """More than the server would ever take at once."""

    status, error_type = 413, "too_large"


class Invalid(ServeError):
    """The request can be read and does not fit."""

    status, error_type = 422, "validation"


class Overloaded(ServeError):
    """The queue is full."""

    status, error_type = 429, "overloaded"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ServeError):
    """The server is going down, or its model thread does not answer."""

    status, error_type = 503, "unavailable"
    retry_after = 5.0


class DeadlineExceeded(ServeError):
    """The answer did not come in time."""

    status, error_type = 504, "deadline"


class Gone(ServeError):
    """The client has gone; nobody reads this."""

    status, error_type = 499, "gone"


def as_answer(error: ServeError) -> dict[str, str]:
    """The body of an answer that is an error."""
    return {"error": public_text(error), "error_type": error.error_type}


def public_text(error: object) -> str:
    """A message as an answer may have it: no folder of this machine, nothing that acts on a terminal, not too long."""
    urls = error.urls if isinstance(error, ServeError) else ()
    path = re.compile("|".join([*map(re.escape, urls), PATH.pattern]))
    text = path.sub(lambda found: found[0] if found[0] in urls else _last(found[0]), str(error))
    text = printable(text.encode("utf-8", "replace").decode())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _last(path: str) -> str:
    """The name at the end of a path."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def check_several(inputs: object) -> None:
    """Refuse one input where a list is meant: a text would be read letter by letter, an object name by name."""
    if isinstance(inputs, str | bytes | Mapping):
        raise Invalid(f"inputs is a list of them, got {type(inputs).__name__}: put the input into one, as in [input].")
