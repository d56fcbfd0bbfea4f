"""inlay merge"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import any_host_flag, host_flag, json_flag, overwrite_flag, path_argument, trust_flag
from inlay.cli.output import tell

HELP = """Turn a mixture into a plain inlay: the mean of its modules. It is much smaller and gives the same answers.

\b
Example:
  inlay merge runs/rte-mixture --out inlays/rte
"""


def work(
    path: Path, out: Path, overwrite: bool, host: str | None, any_host: bool, trust_remote_code: bool, as_json: bool
) -> None:
    from inlay.checkpoints.manifest import read_manifest
    from inlay.checkpoints.ours import save
    from inlay.compose.merge import merge
    from inlay.errors import ConfigError
    from inlay.runs.allowed import Allowed
    from inlay.runs.facts import manifest_data
    from inlay.runs.folder import inlay_in
    from inlay.runs.use import open_for_use
    from inlay.storage.folders import check_new

    check_new(out, overwrite)
    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code))
    manifest = read_manifest(inlay_in(path))
    if opened.name is None:
        raise ConfigError(f"{path} has no inlay: the whole host was trained.")
    merge(opened.host, opened.name)
    data = manifest_data(opened.codec)
    folder = save(opened.host, opened.name, out, task=manifest.task, metrics=manifest.metrics, data=data)
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
        overwrite_flag,
        host_flag,
        any_host_flag,
        trust_flag,
        json_flag,
    ],
)  # fmt: skip
