"""inlay export"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from inlay.cli.flags import any_host_flag, host_flag, json_flag, overwrite_flag, path_argument, trust_flag
from inlay.cli.output import tell

HELP = """Write an inlay in the format of another library.

peft takes LoRA, IA3, prefixes and prompts; adapterhub (the format of adapters) takes bottlenecks, Compacter, LoRA, IA3,
prefixes, UniPELT and fusions. What the format cannot express is refused.

A fusion's members are written next to it, because that library needs them too.

\b
Example:
  inlay export runs/rte-lora --format peft --without-head --out exported/rte
"""

POOLING = {"peft": "host", "adapterhub": "first (decoders: last)"}
"""How a head pools that each format has a form for."""


def work(
    path: Path, out: Path, format: str, overwrite: bool, host: str | None, any_host: bool, trust_remote_code: bool,
    without_head: bool, as_json: bool,
) -> None:  # fmt: skip
    from inlay.checkpoints.export import export
    from inlay.errors import ConfigError, InlayError
    from inlay.host.verbs import inlays_of
    from inlay.runs.allowed import Allowed
    from inlay.runs.use import open_for_use
    from inlay.storage.folders import check_new

    check_new(out, overwrite)
    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code))
    if opened.name is None:
        raise ConfigError(f"{path} has no inlay: the whole host was trained. It is a transformers folder already.")
    members = inlays_of(opened.host)[opened.name].method.needs
    targets = {member: out / member for member in members} | {opened.name: out / "fusion" if members else out}
    if without_head:
        for name in targets:
            inlays_of(opened.host)[name].drop_head()
    written: list[Path] = []
    try:
        for name, target in targets.items():
            written.append(export(opened.host, name, target, format))  # type: ignore[arg-type]
    except BaseException as error:
        for folder in written:  # all of it or nothing
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, InlayError) or "head" not in str(error) or without_head:
            raise
        raise type(error)(
            f"{error}\nTo write it without a head: --without-head. A head that can be written is made by training with "
            f"--pooling {POOLING[format]}."
        ) from None
    tell(
        f"{opened.name} as {format} reads it: {', '.join(map(str, written))}",
        {"name": opened.name, "format": format, "paths": [str(each) for each in written]},
        as_json,
    )


command = click.Command(
    "export", callback=work, help=HELP,
    params=[
        path_argument,
        click.Option(["--format"], type=click.Choice(["peft", "adapterhub"]), required=True, help="The format."),
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The folder to write to."),
        click.Option(["--without-head"], is_flag=True, help="Leave out the head, if the format has no such head."),
        overwrite_flag,
        host_flag,
        any_host_flag,
        trust_flag,
        json_flag,
    ],
)  # fmt: skip
