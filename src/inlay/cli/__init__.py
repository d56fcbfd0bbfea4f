"""The command line: `inlay VERB`. One verb per file; torch is imported only when a verb works."""

from __future__ import annotations

import sys

from inlay.errors import extra_for

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """The entry point. Exit codes: 0 done, 1 our fault, 2 the user's mistake, 128 + n stopped by signal n."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        from inlay.cli.app import run

        run(given)
    except ModuleNotFoundError as error:
        extra = extra_for(error)
        if extra is None or "--debug" in given:
            raise
        verb = next((f" {word}" for word in given if not word.startswith("-")), "")
        package = (error.name or "").partition(".")[0]
        print(f"error: `inlay{verb}` needs {package}. Install it with: pip install '{extra}'", file=sys.stderr)
        sys.exit(2)
