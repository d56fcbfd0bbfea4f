"""inlay eval"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import (
    any_host_flag,
    flags,
    host_flag,
    json_flag,
    label_flag,
    pair_flag,
    quiet_flag,
    text_flag,
    threads_flag,
    trust_flag,
)
from inlay.cli.output import columns, tell
from inlay.training.recipe import Generation

HELP = """Evaluate a run or an inlay on a split of its task, or on a file.

Several runs give a matrix: each row is the state after a run and each column is a task, which shows what training in
stages forgets. A joint run is evaluated on all its tasks, or on one of them: RUN:TASK.

With --matrix, each row is a task and each column a training method: single, multi-task, MT-A, and fusions of each.
Differences from single-task training are in points, and marked if they are 0.3 or more.

\b
Examples:
  inlay eval runs/rte
  inlay eval runs/rte --split validation --json
  inlay eval runs/rte --file more.jsonl
  inlay eval runs/mixture --routing ensemble --mean probabilities
  inlay eval runs/mnli runs/rte-after-mnli
  inlay eval runs/joint:rte --split validation
  inlay eval --matrix runs/rte runs/joint runs/rte-fused runs/rte-fused-jointly
  inlay eval runs/mine --file others.csv --text comment --label rating
"""


def work(
    paths: tuple[Path, ...], split: str | None, matrix: bool, threads: int | None, as_json: bool, quiet: bool,
    **one: Any,
) -> None:  # fmt: skip
    from inlay.training.threads import use_threads

    use_threads(threads)
    given = [f"--{name.replace('_', '-')}" for name, value in one.items() if value is not None and value is not False]
    if matrix and [flag for flag in given if flag != "--eval-rows"]:
        raise click.UsageError(f"{', '.join(given)} can be given for one run only, not with --matrix.")
    if matrix:
        return _tell_comparison(paths, split, one["eval_rows"], as_json)
    if len(paths) > 1 and given:
        raise click.UsageError(f"{', '.join(given)} can be given for one run only, not for a matrix of several.")
    if one["routing"] != "ensemble" and (one["passes"] is not None or one["mean"] is not None):
        raise click.UsageError("--passes and --mean belong to --routing ensemble.")
    if one["file"] is not None and (split is not None or one["data_dir"] is not None):
        raise click.UsageError("--split and --data-dir say which rows of the task are measured, --file names others.")
    if len(paths) > 1:
        _tell_matrix(paths, split, as_json)
    else:
        _tell_one(paths[0], split, as_json, quiet, one)
    return None


def _tell_matrix(paths: tuple[Path, ...], split: str | None, as_json: bool) -> None:
    from inlay.runs.matrix import matrix

    found = matrix(paths, split)
    metrics = [next(iter(cell)) for cell in found.scores[0]]
    header = ("", *(f"{task} ({metric})" for task, metric in zip(found.tasks, metrics, strict=True)))
    tell(columns(found.rows(), header), found.facts(), as_json)


def _tell_comparison(paths: tuple[Path, ...], split: str | None, rows: int | None, as_json: bool) -> None:
    from inlay.runs.comparison import compare

    found = compare(paths, split, rows)
    header, table = found.table()
    tell(columns(table, header), found.facts(), as_json)


def _tell_one(path: Path, split: str | None, as_json: bool, quiet: bool, one: dict[str, Any]) -> None:
    """One run or inlay; a joint run task by task."""
    from inlay.runs.folder import run_at

    run = run_at(path)
    tasks = [Path(f"{path}:{task.task}") for task in run.tasks()] if run is not None else []
    if not tasks:
        facts = _measured(path, split, quiet, **one)
        header = (f"{facts['source']} of {facts['task']}, {facts['rows']:,} rows", "score")
        tell(columns(list(facts["scores"].items()), header), facts, as_json)
        return
    found = [_measured(each, split, quiet, **one) for each in tasks]
    rows = [(f["task"], f["source"], f["rows"], name, value) for f in found for name, value in f["scores"].items()]
    told = columns(rows, ("task", "rows of", "rows", "metric", "score"))
    tell(told, {"path": str(path), "tasks": found}, as_json)


def _measured(
    path: Path, split: str | None, quiet: bool, *, file: Path | None, data_dir: Path | None,
    text: str | None, pair: str | None, label: str | None, eval_rows: int | None, host: str | None, any_host: bool,
    trust_remote_code: bool, answering: Any, routing: Any, passes: int | None, mean: Any, **writing: Any,
) -> dict[str, Any]:  # fmt: skip
    from inlay.errors import ConfigError
    from inlay.runs.allowed import Allowed
    from inlay.runs.use import open_for_use
    from inlay.training.evaluate import Route
    from inlay.training.progress import watcher

    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code)).reading(text=text, pair=pair, label=label)
    opened = opened.writing(**writing)
    if answering is not None:
        if opened.codec.form != "text" or opened.codec.task.kind not in ("classification", "choice"):
            raise ConfigError(
                f"--answering is {answering!r}, but nothing would use it: it needs a host that answers in text, such "
                f"as T5, and labels or choices to rank. Leave it out."
            )
        opened = replace(opened, codec=replace(opened.codec, answering=answering))
    codec = opened.codec
    source, rows = opened.rows(split, file, data_dir)
    rows = rows[:eval_rows]
    encoded = codec.encode(rows)
    way = {"routing": routing, "passes": passes, "mean": mean}
    route = Route(**{name: value for name, value in way.items() if value is not None})
    return {
        "path": str(path),
        "task": codec.task.name,
        "rows": len(rows),
        "source": source,
        "scores": codec.measure(encoded, opened.answers(encoded, watcher(quiet), route)),
    }


command = click.Command(
    "eval",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["paths"], nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.Option(
            ["--split"],
            type=click.Choice(["train", "validation", "test", "mismatched"]),
            help="The split to evaluate on; by default test, or validation if there are no test rows.",
        ),
        click.Option(
            ["--matrix"], is_flag=True, help="Compare training methods, task by task, with single-task training."
        ),
        click.Option(["--file"], type=click.Path(path_type=Path), help="Evaluate on your own labelled rows instead."),
        click.Option(
            ["--answering"],
            type=click.Choice(["generation", "ranking"]),
            help="Hosts that answer in text: let them generate, or rank the labels; by default as in the run.",
        ),
        click.Option(
            ["--routing"],
            type=click.Choice(["merged", "random", "first", "ensemble"]),
            help="Mixtures: the mean of the modules (the default), random ones, the first, or several random passes.",
        ),
        click.Option(["--passes"], type=click.IntRange(min=1), help="The number of passes of an ensemble. [4]"),
        click.Option(
            ["--mean"],
            type=click.Choice(["logits", "probabilities"]),
            help="What an ensemble averages over its passes. [logits]",
        ),
        click.Option(["--data-dir"], type=click.Path(path_type=Path), help="A folder with <task>/<split>.jsonl.gz."),
        text_flag,
        pair_flag,
        label_flag,
        click.Option(
            ["--eval-rows"], type=click.IntRange(min=1), help="Evaluate on only this many rows, the first ones."
        ),
        host_flag,
        any_host_flag,
        trust_flag,
        threads_flag,
        *flags(Generation),
        json_flag,
        quiet_flag,
    ],
)
