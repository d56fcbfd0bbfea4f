"""One place where the library's names become the command line's: a setting in a message is shown as its flag."""

from __future__ import annotations

import re

import click

SETTINGS = "JointSettings|Settings|Data|Recipe|FusionOptions|Task"
"""Configs whose fields are flags; a message begins with one of them, as in "Settings.lr: …"."""


def as_flags(message: str, verb: click.Command | None) -> str:
    """A message in the words of a verb: `batch_size`, and Settings.batch_size, are --batch-size.

    Names that the verb has no flag for, such as those of a method's options, stay as they are.
    """
    options = [] if verb is None else [param for param in verb.params if isinstance(param, click.Option)]
    called = {str(option.name): option.opts[0] for option in options}

    def flag(found: re.Match[str]) -> str:
        return called.get(found["name"], found[0])

    message = re.sub(r"`(?P<name>\w+)`", flag, message)
    message = re.sub(rf"^(?:{SETTINGS})\.(?P<name>\w+)", flag, message, flags=re.M)
    message = re.sub(rf"^(?:{SETTINGS}) has no setting", "there is no setting", message, flags=re.M)
    return re.sub(rf"^(?:{SETTINGS}): ", "", message, flags=re.M)
