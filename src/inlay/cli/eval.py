"""inlay eval"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import host_flag, json_flag, threads_flag
from inlay.cli.output import columns, tell

HELP = """Measure a run or an inlay on a split of its task, or on a file.

Several runs give a matrix: each row is the state after a run, each column a task, so that it shows what training in
stages forgets.

\b
Examples:
  inlay eval runs/rte
  inlay eval runs/rte --split validation --json
  inlay eval runs/rte --file more.jsonl
  inlay eval runs/mixture --routing ensemble --mean probabilities
  inlay eval runs/mnli runs/rte-after-mnli
"""


def work(
    paths: tuple[Path, ...], split: str | None, file: Path | None, host: str | None, answering: str | None,
    routing: str | None, passes: int | None, mean: str | None, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    from inlay.training.threads import use_threads

    use_threads(threads)
    one = {"file": file, "host": host, "answering": answering, "routing": routing, "passes": passes, "mean": mean}
    given = [f"--{name}" for name, value in one.items() if value is not None]
    if len(paths) > 1 and given:
        raise click.UsageError(f"{', '.join(given)} can be given for one run only, not for a matrix of several.")
    if routing != "ensemble" and (passes is not None or mean is not None):
        raise click.UsageError("--passes and --mean belong to --routing ensemble.")
    if len(paths) > 1:
        _tell_matrix(paths, split, as_json)
    else:
        _tell_one(paths[0], split, file, host, answering, (routing, passes, mean), as_json)


def _tell_matrix(paths: tuple[Path, ...], split: str | None, as_json: bool) -> None:
    from inlay.runs.matrix import matrix

    found = matrix(paths, split)
    metrics = [next(iter(cell)) for cell in found.scores[0]]
    header = ("", *(f"{task} ({metric})" for task, metric in zip(found.tasks, metrics, strict=True)))
    tell(columns(found.rows(), header), found.facts(), as_json)


def _tell_one(
    path: Path,
    split: str | None,
    file: Path | None,
    host: str | None,
    answering: Any,
    way: tuple[Any, ...],
    as_json: bool,
) -> None:
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import Route, ask

    opened = open_for_use(path, host)
    codec = opened.codec if answering is None else replace(opened.codec, answering=answering)
    source, rows = opened.rows(split, file)
    encoded = codec.encode(rows)
    route = Route(**{name: v for name, v in zip(("routing", "passes", "mean"), way, strict=True) if v is not None})
    scores = codec.measure(encoded, ask(opened.host, codec, encoded, route=route))
    facts = {
        "path": str(path),
        "task": codec.task.name,
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
        click.Argument(["paths"], nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.Option(
            ["--split"],
            type=click.Choice(["train", "validation", "test", "mismatched"]),
            help="The split to measure; by default test, or validation if there are no test rows.",
        ),
        click.Option(["--file"], type=click.Path(path_type=Path), help="Measure on your own labelled rows instead."),
        click.Option(
            ["--answering"],
            type=click.Choice(["generation", "ranking"]),
            help="Hosts that answer in text: let them write, or rank the labels; by default as the run does.",
        ),
        click.Option(
            ["--routing"],
            type=click.Choice(["merged", "random", "first", "ensemble"]),
            help="A mixture: the mean of its modules (the default), random ones, the first, or several random passes.",
        ),
        click.Option(["--passes"], type=click.IntRange(min=1), help="An ensemble's passes. [4]"),
        click.Option(
            ["--mean"], type=click.Choice(["logits", "probabilities"]), help="What an ensemble averages. [logits]"
        ),
        host_flag,
        threads_flag,
        json_flag,
    ],
)
