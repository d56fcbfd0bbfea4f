"""inlay validate"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import any_host_flag, config_flag, flags, json_flag, merged, trust_flag
from inlay.cli.output import columns, shown, tell
from inlay.runs.settings import Settings

HELP = """Check a config and its rows, and estimate the cost of training. All mistakes are named at once.

\b
Examples:
  inlay validate --config rte.yaml
  inlay validate --host bert-base-uncased --train-file mine.csv --text review --label stars
"""


def work(config: Path | None, any_host: bool, trust_remote_code: bool, as_json: bool, **given: Any) -> None:
    from inlay.runs.estimate import estimate
    from inlay.runs.train import Allowed, get_ready

    job = get_ready(
        Settings(**{"out": Path("runs/unnamed")} | merged(config, given)), Allowed(any_host, trust_remote_code)
    )
    facts = estimate(job)
    text = columns([(name.replace("_", " "), shown(value, "; ")) for name, value in facts.items()])
    tell(f"{text}\nNothing is wrong with it.", facts, as_json)


command = click.Command(
    "validate", callback=work, help=HELP, params=[config_flag, *flags(Settings), any_host_flag, trust_flag, json_flag]
)
