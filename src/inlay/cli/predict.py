"""inlay predict"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import (
    any_host_flag,
    flags,
    host_flag,
    pair_flag,
    path_argument,
    quiet_flag,
    text_flag,
    threads_flag,
    trust_flag,
)
from inlay.cli.output import json_text, say
from inlay.data.errors import DataError
from inlay.data.rows import Table, check_columns, check_text, decoded, json_row, read_table, read_text
from inlay.data.task import Task
from inlay.storage.plain_json import as_json as as_json_text
from inlay.training.recipe import Generation

HELP = """Predict for texts given as arguments, in a file or on stdin. The output is JSON lines.

Each line has all columns of its row, and the answer: label and probabilities, or prediction, labels, tags, answer. If
the row already has a column of that name, the column is kept and the answer is called predicted_label and so on.

Hosts that answer in text generate it. On a terminal, the text for a single argument is shown while it is written;
--json prints a JSON line there, too.

A file is .jsonl, .csv, .tsv or .parquet with the task's text columns, or .txt with one text per line (a tab before the
second text of a pair, or before each choice). Stdin is read like .txt; a line that begins with { is read like .jsonl.

\b
Examples:
  inlay predict runs/sentiment "I liked it."
  inlay predict runs/rte "It rains." "The street is wet."
  inlay predict runs/copa "It rained." effect "The street is wet." "The sun came out."
  inlay predict runs/sentiment --file reviews.csv --out labels.jsonl
  inlay predict runs/joint:rte "It rains." "The street is wet."
  inlay predict runs/rte --data-dir data --split validation
  cat reviews.txt | inlay predict runs/sentiment
  inlay predict sentiment "I liked it." --server http://127.0.0.1:8000
"""
AT_ONCE = 64
"""Rows of one request to a server."""


def work(
    path: Path,
    texts: tuple[str, ...],
    file: Path | None,
    data_dir: Path | None,
    split: str | None,
    out: Path | None,
    text: str | None,
    pair: str | None,
    label: str | None,
    host: str | None,
    any_host: bool,
    trust_remote_code: bool,
    threads: int | None,
    as_json: bool,
    quiet: bool,
    server: str | None,
    **writing: Any,
) -> None:
    from inlay.errors import ConfigError
    from inlay.runs.allowed import Allowed
    from inlay.runs.use import open_for_use
    from inlay.training.progress import watcher
    from inlay.training.threads import use_threads

    if sum((bool(texts), file is not None, data_dir is not None)) > 1:
        raise ConfigError("rows can come from one place only: texts, --file or --data-dir.")
    if split is not None and data_dir is None:
        raise ConfigError("--split says which rows of --data-dir are labelled; give that as well.")
    if server is not None:
        here = {"data_dir": data_dir, "text": text, "pair": pair, "label": label, "host": host, "threads": threads}
        here |= {"any_host": any_host or None, "trust_remote_code": trust_remote_code or None} | writing
        if given := sorted(f"--{name.replace('_', '-')}" for name, value in here.items() if value is not None):
            raise ConfigError(f"{', '.join(given)} says how to open a run here; the server has it open already.")
        _tell(_asked(server, str(path), texts, file), out)
        return
    use_threads(threads)
    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code)).reading(text=text, pair=pair, label=label)
    opened = opened.writing(**writing)
    table = opened.table(split, data_dir) if data_dir is not None else _table(opened.codec.task, texts, file)
    if label is not None:
        check_columns(table, [label])
    if opened.writes_one(table) and texts and out is None and not as_json and sys.stdout.isatty():
        opened.write(table, lambda piece: click.echo(_shown(piece), nl=False))  # for a reader, as it is written
        click.echo()
        return
    _tell(opened.predict(table, watcher(quiet)), out)


def _asked(server: str, model: str, texts: tuple[str, ...], file: Path | None) -> Iterator[dict[str, Any]]:
    """What a server says about the rows; PATH is the model's name there."""
    from inlay.errors import NamingError, nearest
    from inlay.runs.use import free
    from inlay.serve.client import Client
    from inlay.serve.rows import predicted

    with Client(server, os.environ.get("INLAY_SERVE_KEY")) as client:
        known = {entry["id"]: entry["inlay"] for entry in client.models() if entry["inlay"] is not None}
        if model not in known:
            raise NamingError(f"{server} has no model {model!r}.{nearest(model, known)}")
        facts = known[model]
        reads = {name: value for name, value in facts["reads"].items() if value is not None}
        table = _table(Task(name=facts["task"], kind=facts["kind"], **reads), texts, file)
        taken = {column for row in table.rows for column in row}
        for start in range(0, len(table), AT_ONCE):
            rows = [{name: row.get(name) for name in facts["columns"]} for row in table.rows[start : start + AT_ONCE]]
            answers = client.classify(model, [{"row": row} for row in rows])
            for row, answer in zip(table.rows[start:], answers, strict=False):
                said = predicted(facts["kind"], facts["labels"], answer)
                yield {**row, **{free(name, taken): value for name, value in said.items()}}


def _tell(entries: Iterable[dict[str, Any]], out: Path | None) -> None:
    from inlay.storage.files import write_out

    lines = [(as_json_text if out is not None else json_text)(entry) for entry in entries]
    if out is not None:
        write_out(out, "\n".join(lines) + "\n")
        click.echo(f"{len(lines):,} predictions: {out}", err=True)
    else:
        say("\n".join(lines))


def _shown(piece: str) -> str:
    """A piece of text without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in piece)


def _table(task: Task, texts: tuple[str, ...], file: Path | None) -> Table:
    """What is to be labelled, as rows with the task's columns."""
    if texts:
        return Table([_row(task, texts, "the command line")], "the command line")
    if file is not None and file.suffix != ".txt":
        return read_table(file)
    source = str(file) if file is not None else "stdin"
    content = read_text(file) if file is not None else decoded(_stdin(), source)
    rows, lines = [], []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{source}, line {number}"
            as_json = file is None and line.lstrip().startswith("{")
            rows.append(json_row(line, where) if as_json else _row(task, tuple(line.rstrip("\r").split("\t")), where))
            lines.append(number)
    if not rows:
        raise DataError(f"{source} is empty: there is nothing to label.")
    return Table(rows, source, lines, "line")


def _stdin() -> bytes:
    if sys.stdin is None:
        raise DataError("stdin is closed: give texts, or --file.")
    return sys.stdin.buffer.read()


def _row(task: Task, texts: tuple[str, ...], where: str) -> dict[str, Any]:
    columns = task.columns(labelled=False)
    check_text(texts, where)
    if task.kind == "choice" and len(task.choice_columns) == 1 and len(texts) > len(columns):
        choices = list(texts[len(columns) - 1 :])  # the last column is a list
        return dict(zip(columns, (*texts[: len(columns) - 1], choices), strict=True))
    if len(texts) != len(columns):
        raise DataError(f"{where}: {task.name} reads {len(columns)} text(s) ({', '.join(columns)}), got {len(texts)}.")
    return dict(zip(columns, texts, strict=True))


command = click.Command(
    "predict",
    callback=work,
    help=HELP,
    params=[
        path_argument,
        click.Argument(["texts"], nargs=-1),
        click.Option(["--file"], type=click.Path(path_type=Path), help="The file with the rows."),
        click.Option(
            ["--data-dir"],
            type=click.Path(path_type=Path),
            help="Predict for rows of the task from a folder with <task>/<split>.jsonl.gz.",
        ),
        click.Option(
            ["--split"],
            type=click.Choice(["train", "validation", "test", "mismatched"]),
            help="The split of --data-dir; by default test, or validation if there are no test rows.",
        ),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            help="Write to this file instead of stdout, all of it or nothing.",
        ),
        click.Option(
            ["--server"],
            help="Ask a running `inlay serve`; PATH is then the model's name there. Its key: INLAY_SERVE_KEY.",
        ),
        text_flag,
        pair_flag,
        click.Option(["--label"], help="The column with the right answers, if there is one; it is kept in the output."),
        host_flag,
        any_host_flag,
        trust_flag,
        threads_flag,
        *flags(Generation),
        click.Option(
            ["--json", "as_json"], is_flag=True, help="Print JSON lines even where a generated text would be shown."
        ),
        quiet_flag,
    ],
)
