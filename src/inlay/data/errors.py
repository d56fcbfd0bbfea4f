"""What can be wrong with rows."""

from __future__ import annotations

from inlay.errors import InlayError


class DataError(InlayError):
    """Rows, columns or labels that cannot be used; the message says which file and line."""
