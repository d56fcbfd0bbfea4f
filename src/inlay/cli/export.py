"""inlay export"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import tell

HELP = """Write an inlay as another library reads it: peft (LoRA) or adapterhub (bottlenecks, Compacter, fusions).

A fusion's members are written beside it, because that library needs them too.

\b
Example:
  inlay export runs/rte-lora --format peft --out exported/rte
"""


def work(path: Path, out: Path, format: str, host: str | None, without_head: bool, as_json: bool) -> None:
    from inlay.errors import ConfigError
    from inlay.host import inlays_of
    from inlay.interop import export
    from inlay.learning.opened import open_for_use

    opened = open_for_use(path, host)
    if opened.name is None:
        raise ConfigError(f"{path} has no inlay: the whole host was trained. It is a transformers folder already.")
    if without_head:
        inlays_of(opened.host)[opened.name].drop_head()
    members = getattr(inlays_of(opened.host)[opened.name].method, "members", ())
    written = [export(opened.host, member, out / member, format) for member in members]  # type: ignore[arg-type]
    target = out / "fusion" if members else out
    written.append(export(opened.host, opened.name, target, format))  # type: ignore[arg-type]
    tell(
        f"{opened.name} as {format} reads it: {', '.join(map(str, written))}",
        {"name": opened.name, "format": format, "paths": [str(each) for each in written]},
        as_json,
    )


command = click.Command(
    "export", callback=work, help=HELP,
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path)),
        click.Option(["--format"], type=click.Choice(["peft", "adapterhub"]), required=True, help="Whose form."),
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The folder to write."),
        click.Option(["--without-head"], is_flag=True, help="Leave its head out, if that format has no such head."),
        click.Option(["--host"], help="The host, where it has moved or PATH is an inlay without one."),
        json_flag,
    ],
)  # fmt: skip
