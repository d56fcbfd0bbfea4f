"""inlay eval"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import host_flag, json_flag, path_argument, threads_flag
from inlay.cli.output import columns, tell

HELP = """Measure a run or an inlay on a split of its task, or on a file.

\b
Examples:
  inlay eval runs/rte
  inlay eval runs/rte --split validation --json
  inlay eval runs/rte --file more.jsonl
"""


def work(
    path: Path, split: str | None, file: Path | None, host: str | None, threads: int | None, as_json: bool
) -> None:
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import ask
    from inlay.training.threads import use_threads

    use_threads(threads)
    opened = open_for_use(path, host)
    source, rows = opened.rows(split, file)
    encoded = opened.codec.encode(rows)
    scores = opened.codec.measure(encoded, ask(opened.host, opened.codec, encoded))
    facts = {
        "path": str(path),
        "task": opened.codec.task.name,
        "rows": len(rows),
        "source": source,
        "scores": scores,
    }
    tell(columns(list(scores.items()), (f"{source} of {facts['task']}, {len(rows):,} rows", "score")), facts, as_json)


command = click.Command(
    "eval",
    callback=work,
    help=HELP,
    params=[
        path_argument,
        click.Option(
            ["--split"],
            type=click.Choice(["train", "validation", "test"]),
            help="The split to measure; by default test, or validation if there are no test rows.",
        ),
        click.Option(["--file"], type=click.Path(path_type=Path), help="Measure on your own labelled rows instead."),
        host_flag,
        threads_flag,
        json_flag,
    ],
)
