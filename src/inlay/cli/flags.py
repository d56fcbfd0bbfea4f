"""Flags from a config class: one flag per field, with the field's own name, type and sentence."""

from __future__ import annotations

from collections.abc import Collection
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click

from inlay.config import Config
from inlay.runs.folder import read_settings
from inlay.runs.settings import SPELT

json_flag = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of text.")
quiet_flag = click.Option(["--quiet"], is_flag=True, help="Show no progress.")
path_argument = click.Argument(["path"], type=click.Path(path_type=Path))
host_flag = click.Option(["--host"], help="The host, if it has moved, or if PATH is an inlay that does not name one.")
threads_flag = click.Option(
    ["--threads"],
    type=click.IntRange(min=1, max=1024),
    help="Number of threads for torch; by default half of the cores.",
)
any_host_flag = click.Option(["--any-host"], is_flag=True, help="Accept a host of the same shape with other weights.")
trust_flag = click.Option(
    ["--trust-remote-code"],
    is_flag=True,
    help="Run Python code that the host brings with it; only for a host you trust.",
)
text_flag = click.Option(
    ["--text"], help="The column of the text, or a template, if it is not the same as in training."
)
pair_flag = click.Option(["--pair"], help="The column of the second text, or a template.")
label_flag = click.Option(["--label"], help="The column with what is to be predicted.")
overwrite_flag = click.Option(["--overwrite"], is_flag=True, help="Replace what is at --out, if it is an inlay.")
config_flag = click.Option(
    ["--config"],
    type=click.Path(path_type=Path),
    help="A YAML file with settings, named like the flags; flags win.",
)


class _Whole(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A whole number of a length that Python converts."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return int(value)
        except ValueError:
            self.fail(f"{str(value)[:40]!r} is not a whole number.", param, context)


WHOLE = _Whole()


class _NumberOrWord(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number, or one of a few words, as in alpha: 0.5 or annealed."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        self.name = "|".join(("float", *words))

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float | str:
        if value in self.words:
            return str(value)
        try:
            return float(value)
        except ValueError:
            self.fail(f"{str(value)[:40]!r} is neither a number nor {' or '.join(self.words)}.", param, context)


def flags(
    config: type[Config], *, leave_out: Collection[str] = (), hidden: Collection[str] = ()
) -> list[click.Parameter]:
    """An option for each field of a config: its own fields first, then those of its bases.

    hidden: settings that the verb's jobs cannot use. They are understood, so that all of them are refused at once with
    what they need, and not shown.
    """
    made: list[click.Parameter] = []
    for name in dict.fromkeys(name for base in config.__mro__ for name in get_annotations(base)):
        field = config.model_fields.get(name)
        if field is None or name in leave_out:
            continue
        kind, several = _kind(field.annotation)
        if kind is int and field.is_required() is False:
            kind = WHOLE
        default = field.default if isinstance(field.default, str | int | float) and not field.is_required() else None
        text = " ".join((field.description or "").split())
        if several:
            text += (
                " Repeat the flag, or separate the values by commas."
                if name != "options"
                else " Repeat the flag for more."
            )
        shown = f" [{default}]" if default is not None else ""
        words, help = [_flag(name, kind), name], text + shown
        made.append(click.Option(words, type=kind, multiple=several, default=None, help=help, hidden=name in hidden))
    return made


def _flag(name: str, kind: Any) -> str:
    """--name, or --name/--no-name for what is on or off."""
    flag = SPELT.get(name, name).replace("_", "-")
    return f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"


def merged(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The YAML file's settings, and the flags over them."""
    settings = read_settings(config) if config is not None else {}
    return settings | {name: _plain(name, value) for name, value in given.items() if value not in (None, ())}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple) and name != "options":
        return tuple(part.strip() for item in value for part in str(item).split(",") if part.strip())
    return value


def _kind(annotation: Any) -> tuple[Any, bool]:
    """click's type of a field, and whether it may be given more than once."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        parts = [part for part in inner if part is not NoneType]
        words = tuple(str(word) for part in parts if get_origin(part) is Literal for word in get_args(part))
        return (_NumberOrWord(words), False) if words and float in parts else _kind(parts[0])
    if origin is Literal:
        return click.Choice([str(choice) for choice in inner]), False
    if origin in (tuple, dict):
        return str, True
    if annotation is Path:
        return click.Path(path_type=Path), False
    return (annotation if annotation in (int, float, bool) else str), False
