"""inlay validate"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import any_host_flag, config_flag, flags, json_flag, merged, trust_flag
from inlay.cli.output import columns, shown, tell
from inlay.runs.joint_settings import JointSettings, settings_from

HELP = """Check a config and its rows, and estimate the cost of training. All mistakes are reported at once.

For several tasks (`tasks`), everything is checked but the cost is not estimated.

\b
Examples:
  inlay validate --config rte.yaml
  inlay validate --host bert-base-uncased --train-file mine.csv --text review --label stars
"""


def work(config: Path | None, any_host: bool, trust_remote_code: bool, as_json: bool, **given: Any) -> None:
    from inlay.runs.allowed import Allowed
    from inlay.runs.estimate import estimate
    from inlay.runs.joint import get_ready_jointly
    from inlay.runs.ready import get_ready

    settings = settings_from({"out": Path("runs/unnamed")} | merged(config, given))
    allowed = Allowed(any_host, trust_remote_code)
    if isinstance(settings, JointSettings):
        facts = get_ready_jointly(settings, allowed).facts()
        told = _told_jointly(facts)
    else:
        facts = estimate(get_ready(settings, allowed))
        told = _told(facts)
    tell(f"{columns(told)}\nNothing is wrong with it.", facts, as_json)


def _told_jointly(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is there of several tasks; what a step of them costs is not measured."""
    tasks = [(name, f"{own['task']['kind']}; rows {shown(own['rows'], ', ')}") for name, own in facts["tasks"].items()]
    return [
        *tasks,
        *((name.replace("_", " "), shown(facts[name])) for name in ("host_parameters", "trained_parameters")),
    ]


def _told(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people: what belongs together in one line."""
    from inlay.training.progress import clock

    at_limit = f"limit {facts['max_length']}; {facts['rows_at_max_length']} rows at it"
    step = f"{facts['seconds_per_step']:.2f} s per step of {facts['batch_size']} rows"
    peak, counts = facts["memory_megabytes_at_least"], ("host_parameters", "trained_parameters", "steps_at_most")
    return [
        ("task", f"{facts['task']} ({facts['kind']})"),
        *((name, shown(facts[name], "; ")) for name in ("rows", "labels", "notes")),
        ("longest row", f"{facts['longest_row_tokens']} tokens ({at_limit})"),
        ("padding", f"{facts['padding']:.1%}"),
        *((name.replace("_", " "), shown(facts[name])) for name in counts),
        (
            "time at most",
            f"{clock(facts['seconds_at_most'])} ({step}; evaluation {clock(facts['evaluation_seconds'])} of it)",
        ),
        ("memory at least", "—" if peak is None else f"{peak:,.0f} MB (peak of this check)"),
    ]


command = click.Command(
    "validate",
    callback=work,
    help=HELP,
    params=[config_flag, *flags(JointSettings), any_host_flag, trust_flag, json_flag],
)
