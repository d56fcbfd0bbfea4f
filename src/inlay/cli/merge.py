"""inlay merge"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import host_flag, json_flag, path_argument
from inlay.cli.output import tell

HELP = """Turn a mixture into a plain inlay: the mean of its modules. It is a fraction of the size and answers the same.

\b
Example:
  inlay merge runs/rte-mixture --out inlays/rte
"""


def work(path: Path, out: Path, host: str | None, as_json: bool) -> None:
    from inlay.checkpoints.manifest import read_manifest
    from inlay.checkpoints.ours import save
    from inlay.compose.merge import merge
    from inlay.errors import ConfigError
    from inlay.runs.folder import inlay_in
    from inlay.runs.use import open_for_use

    opened = open_for_use(path, host)
    manifest = read_manifest(inlay_in(path))
    if opened.name is None:
        raise ConfigError(f"{path} has no inlay: the whole host was trained.")
    merge(opened.host, opened.name)
    folder = save(opened.host, opened.name, out, task=manifest.task, metrics=manifest.metrics)
    method = read_manifest(folder).method["kind"]
    tell(
        f"{opened.name} is a {method} inlay now: {folder}",
        {"name": opened.name, "method": method, "path": str(folder)},
        as_json,
    )


command = click.Command(
    "merge", callback=work, help=HELP,
    params=[
        path_argument,
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="Where to write the inlay."),
        host_flag,
        json_flag,
    ],
)  # fmt: skip
