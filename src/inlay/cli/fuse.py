"""inlay fuse"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import config_flag, flags, json_flag, quiet_flag
from inlay.cli.train import run_job
from inlay.runs.settings import Settings

HELP = """Learn to combine trained inlays for a target task.

MEMBERS are runs or inlays on the same host; the target's own inlay should be one of them.

\b
Example:
  inlay fuse runs/mnli runs/qqp runs/rte --host bert-base-uncased --task rte --out runs/rte-fused
"""

OF_INLAYS = {"members", "mode", "method", "options", "start", "consistency", "consistency_detach"}
"""Settings that are no flags here: the members are arguments, the rest belongs to single inlays."""


def work(config: Path | None, members: tuple[Path, ...], as_json: bool, quiet: bool, **given: Any) -> None:
    run_job(config, None, given | {"mode": "fusion", "members": members}, as_json, quiet)


command = click.Command(
    "fuse", callback=work, help=HELP,
    params=[
        click.Argument(["members"], nargs=-1, required=True, type=click.Path(path_type=Path)),
        config_flag, *flags(Settings, leave_out=OF_INLAYS), json_flag, quiet_flag,
    ],
)  # fmt: skip
