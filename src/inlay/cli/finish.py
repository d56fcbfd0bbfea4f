"""inlay finish"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import any_host_flag, json_flag, quiet_flag, trust_flag

HELP = """Make an interrupted run's best state so far its result: scores, inlay and report, without further training.

\b
Example:
  inlay finish runs/rte
"""


def work(path: Path, any_host: bool, trust_remote_code: bool, as_json: bool, quiet: bool) -> None:
    from inlay.cli.train import run_job
    from inlay.runs.allowed import Allowed

    run_job(None, path, {}, as_json, quiet, Allowed(any_host, trust_remote_code), finish=True)


command = click.Command(
    "finish", callback=work, help=HELP,
    params=[
        click.Argument(["path"], metavar="RUN", type=click.Path(path_type=Path)),
        any_host_flag,
        trust_flag,
        json_flag,
        quiet_flag,
    ],
)  # fmt: skip
