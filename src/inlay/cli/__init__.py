"""The command line: `inlay VERB`. One verb per file; torch is imported only when a verb works."""

from inlay.cli.app import main

__all__ = ["main"]
