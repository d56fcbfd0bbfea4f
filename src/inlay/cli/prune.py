"""inlay prune"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import any_host_flag, host_flag, json_flag, path_argument, threads_flag, trust_flag
from inlay.cli.output import columns, tell

HELP = """Remove the members that a fusion does not listen to, and measure what that costs.

The smaller fusion is written as a run of its own, with the members it still needs.

\b
Example:
  inlay prune runs/rte-fused --keep 2 --out runs/rte-pruned
"""


def work(
    path: Path, out: Path, keep: int | None, threshold: float | None, host: str | None, any_host: bool,
    trust_remote_code: bool, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    from inlay.runs.allowed import Allowed
    from inlay.runs.prune import write_pruned
    from inlay.training.threads import use_threads

    use_threads(threads)
    facts = write_pruned(path, out, keep, threshold, host, Allowed(any_host, trust_remote_code))
    scores = [(name, facts["before"][name], facts["after"][name]) for name in facts["before"]]
    text = (
        columns(scores, ("", "before", "after"))
        + f"\nfaster: {facts['faster']:.2f} times"
        + f"\nkept: {', '.join(facts['kept'])}\ngone: {', '.join(facts['gone'])}\nrun:  {out}"
    )
    tell(text, facts, as_json)


command = click.Command(
    "prune", callback=work, help=HELP,
    params=[
        path_argument,
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The run folder to write to."),
        click.Option(["--keep"], type=click.IntRange(min=1), help="Keep this many members, the most active ones."),
        click.Option(["--threshold"], type=float, help="Or keep the members whose mean attention is at least this."),
        host_flag,
        any_host_flag,
        trust_flag,
        threads_flag,
        json_flag,
    ],
)  # fmt: skip
