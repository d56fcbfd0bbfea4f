"""inlay validate"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import config_flag, flags, json_flag, merged
from inlay.cli.output import columns, tell
from inlay.runs.settings import Settings

HELP = """Check a config, its rows and its cost before training; all mistakes are named at once.

\b
Examples:
  inlay validate --config rte.yaml
  inlay validate --host bert-base-uncased --train mine.csv --text review --label stars
"""


def work(config: Path | None, as_json: bool, **given: Any) -> None:
    from inlay.runs.estimate import estimate
    from inlay.runs.train import get_ready

    job = get_ready(Settings(**{"out": Path("runs/unnamed")} | merged(config, given)))
    facts = estimate(job)
    text = columns([(name.replace("_", " "), _shown(value)) for name, value in facts.items()])
    tell(f"{text}\nnothing is wrong with it.", facts, as_json)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "—"
    return f"{value:,}" if isinstance(value, int) else str(value)


command = click.Command("validate", callback=work, help=HELP, params=[config_flag, *flags(Settings), json_flag])
