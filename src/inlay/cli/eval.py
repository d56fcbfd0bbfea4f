"""inlay eval"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import (
    any_host_flag,
    host_flag,
    json_flag,
    label_flag,
    pair_flag,
    path_argument,
    quiet_flag,
    text_flag,
    threads_flag,
    trust_flag,
)
from inlay.cli.output import columns, tell

HELP = """Measure a run or an inlay on a split of its task, or on a file.

\b
Examples:
  inlay eval runs/rte
  inlay eval runs/rte --split validation --json
  inlay eval runs/rte --file more.jsonl
  inlay eval runs/mine --file others.csv --text comment --label rating
"""


def work(
    path: Path,
    split: str | None,
    file: Path | None,
    data_dir: Path | None,
    text: str | None,
    pair: str | None,
    label: str | None,
    eval_rows: int | None,
    host: str | None,
    any_host: bool,
    trust_remote_code: bool,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from inlay.runs.train import Allowed
    from inlay.runs.use import open_for_use
    from inlay.training.progress import watcher
    from inlay.training.threads import use_threads

    use_threads(threads)
    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code)).reading(text=text, pair=pair, label=label)
    source, rows = opened.rows(split, file, data_dir)
    rows = rows[:eval_rows]
    encoded = opened.codec.encode(rows)
    scores = opened.codec.measure(encoded, opened.answers(encoded, watcher(quiet)))
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
        click.Option(["--data-dir"], type=click.Path(path_type=Path), help="A folder with <task>/<split>.jsonl.gz."),
        text_flag,
        pair_flag,
        label_flag,
        click.Option(["--eval-rows"], type=click.IntRange(min=1), help="Measure on the first rows only, this many."),
        host_flag,
        any_host_flag,
        trust_flag,
        threads_flag,
        json_flag,
        quiet_flag,
    ],
)
