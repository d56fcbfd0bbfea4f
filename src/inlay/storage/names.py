"""How inlays, served models and the tasks of a joint run may be named: each name is also that of a folder."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAMES_HAVE = "use 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or a digit"
"""The same rule in words, for messages."""
