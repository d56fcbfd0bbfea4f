"""inlay import"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import tell

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
    task: str,
    name: str | None,
    member: tuple[Path, ...],
    pickled: bool,
    as_json: bool,
) -> None:
    from inlay.checkpoints.load import load
    from inlay.checkpoints.ours import save
    from inlay.data.task import Task
    from inlay.host.verbs import inlays_of
    from inlay.training.workbench import open_host

    opened, _ = open_host(host, Task(name=path.name, kind=task))  # type: ignore[arg-type]
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
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The inlay to write."),
        click.Option(
            ["--task"], type=click.Choice(["classification", "choice", "text"]), default="classification",
            show_default=True, help="What the host is opened for.",
        ),
        click.Option(["--name"], help="Another name for it."),
        click.Option(["--member"], type=click.Path(path_type=Path), multiple=True, help="A member of a fusion."),
        click.Option(["--pickled"], is_flag=True, help="Also read .bin files, as tensors only."),
        json_flag,
    ],
)  # fmt: skip
