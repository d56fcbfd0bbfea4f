"""inlay fuse"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import any_host_flag, config_flag, flags, json_flag, merged, quiet_flag, trust_flag
from inlay.cli.train import run_job
from inlay.runs.settings import Settings

HELP = """Learn to combine trained inlays for a target task.

MEMBERS are runs or inlays on the same host; the target's own inlay should be the last of them. The host is theirs,
unless --host names it. A joint run stands for the inlays of all its tasks, with the target's last.

\b
Examples:
  inlay fuse runs/mnli runs/qqp runs/rte --task rte --out runs/rte-fused
  inlay fuse runs/joint --task rte --out runs/rte-fused-jointly
"""

SAID = {"members", "mode", "method"}
"""Settings that are no flags here: the members are arguments, which says the mode and the method."""
OF_INLAYS = {"options", "start", "consistency", "consistency_detach"}
"""Settings of single inlays."""


def work(
    config: Path | None,
    members: tuple[Path, ...],
    any_host: bool,
    trust_remote_code: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    from inlay.runs.allowed import Allowed

    said = merged(config, given)
    members = _one_by_one(members, said.get("task"))
    if "host" not in said:
        given["host"] = _host_of(members)
    allowed = Allowed(any_host, trust_remote_code)
    run_job(config, None, given | {"mode": "fusion", "members": members}, as_json, quiet, allowed)


def _one_by_one(members: tuple[Path, ...], target: str | None) -> tuple[Path, ...]:
    """The members with joint runs as what is in them, of these the target's own last."""
    from inlay.runs.folder import run_at

    found: list[Path] = []
    own: list[Path] = []
    for member in members:
        run = run_at(member)
        for each in [Path(f"{member}:{task.task}") for task in run.tasks()] if run is not None else []:
            (own if each.name.rpartition(":")[2] == target else found).append(each)
        if run is None or not run.tasks():
            found.append(member)
    return (*found, *own)


def _host_of(members: tuple[Path, ...]) -> str:
    """The host that all members name."""
    from inlay.checkpoints.manifest import read_manifest
    from inlay.errors import ConfigError
    from inlay.runs.folder import run_at

    runs = {member: run_at(member) for member in members}
    names = {m: run.record()["host"] if run else read_manifest(m).host["name"] for m, run in runs.items()}
    if len(set(names.values())) != 1 or not all(names.values()):
        listed = "; ".join(f"{member}: {name or 'not named'}" for member, name in names.items())
        raise ConfigError(f"the members do not name one host ({listed}). Give it with --host.")
    return next(iter(names.values()))


command = click.Command(
    "fuse", callback=work, help=HELP,
    params=[
        click.Argument(["members"], nargs=-1, required=True, type=click.Path(path_type=Path)),
        config_flag, *flags(Settings, leave_out=SAID, hidden=OF_INLAYS), any_host_flag, trust_flag, json_flag,
        quiet_flag,
    ],
)  # fmt: skip
