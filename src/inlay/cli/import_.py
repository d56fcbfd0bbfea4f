"""inlay import"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import json_flag, overwrite_flag, trust_flag
from inlay.cli.output import tell
from inlay.data.task import Kind

HELP = """Read a checkpoint of adapters or peft and save it as an inlay.

Give the members of a fusion first, each with --member. A whole setup becomes a folder for each of its inlays.

\b
Example:
  inlay import downloads/rte-lora --host bert-base-uncased --out inlays/rte
"""


def work(
    path: Path,
    out: Path,
    host: str,
    task: Kind,
    name: str | None,
    member: tuple[Path, ...],
    pickled: bool,
    overwrite: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    from inlay.checkpoints.load import load
    from inlay.checkpoints.ours import save
    from inlay.data.task import Task
    from inlay.host.verbs import inlays_of
    from inlay.storage.folders import check_new
    from inlay.training.workbench import Workbench

    check_new(out, overwrite)
    opened = Workbench.open(host, Task(name=path.name, kind=task), trust_remote_code=trust_remote_code).host
    for each in member:
        load(opened, each, pickled=pickled)
    found = load(opened, path, name=name, pickled=pickled)
    names = [found] if isinstance(found, str) else inlays_of(opened).names()
    folders = [save(opened, each, out if isinstance(found, str) else out / each) for each in names]
    setup = "" if isinstance(found, str) else f"; its setup is {found!r}"
    tell(
        f"{', '.join(names)} imported: {', '.join(map(str, folders))}{setup}",
        {"names": names, "paths": [str(folder) for folder in folders], "setup": None if setup == "" else repr(found)},
        as_json,
    )


command = click.Command(
    "import", callback=work, help=HELP,
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path, exists=True)),
        click.Option(["--host"], required=True, help="The host it was made for."),
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="Where to write the inlay."),
        click.Option(
            ["--task"], type=click.Choice(["classification", "choice", "text"]), default="classification",
            show_default=True, help="The kind of task that the host is opened for.",
        ),
        click.Option(["--name"], help="Give the inlay this name."),
        click.Option(["--member"], type=click.Path(path_type=Path), multiple=True, help="A member of a fusion."),
        click.Option(["--pickled"], is_flag=True, help="Also read .bin files; only tensors are taken from them."),
        overwrite_flag,
        trust_flag,
        json_flag,
    ],
)  # fmt: skip
