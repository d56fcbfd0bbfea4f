"""inlay predict"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

HELP = """Label texts from the command line, a file or stdin; JSON lines out.

A file is .jsonl, .csv, .tsv or .parquet with the task's text columns, or .txt with one text per line (a tab before the
second text of a pair). Stdin is read as .txt, or as .jsonl where a line begins with {.

\b
Examples:
  inlay predict runs/sentiment "I liked it."
  inlay predict runs/rte "It rains." "The street is wet."
  inlay predict runs/sentiment --file reviews.csv --out labels.jsonl
  cat reviews.txt | inlay predict runs/sentiment
"""


def work(
    path: Path, texts: tuple[str, ...], file: Path | None, out: Path | None, host: str | None, threads: int | None
) -> None:
    from inlay.errors import ConfigError
    from inlay.learning.files import write_whole
    from inlay.learning.opened import open_for_use
    from inlay.learning.threads import use_threads

    if texts and file is not None:
        raise ConfigError("give texts or a file, not both.")
    use_threads(threads)
    opened = open_for_use(path, host)
    lines = [
        json.dumps(entry, ensure_ascii=False) for entry in opened.predict(_table(opened.language.task, texts, file))
    ]
    if out is not None:
        write_whole(out, "\n".join(lines) + "\n")
        click.echo(f"{len(lines):,} predictions: {out}", err=True)
    else:
        click.echo("\n".join(lines))


def _table(task: Any, texts: tuple[str, ...], file: Path | None) -> Any:
    """What is to be labelled, as rows with the task's columns."""
    from inlay.tasks.errors import DataError
    from inlay.tasks.rows import Table, read_table

    if texts:
        return Table([_row(task, texts, "the command line")], "the command line")
    if file is not None and file.suffix != ".txt":
        return read_table(file)
    source = str(file) if file is not None else "stdin"
    try:
        content = (file.read_bytes() if file is not None else sys.stdin.buffer.read()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as UTF-8: {error}") from None
    rows = list(_rows(task, content, source))
    if not rows:
        raise DataError(f"{source} is empty: there is nothing to label.")
    return Table(rows, source)


def _rows(task: Any, content: str, source: str) -> Iterator[dict[str, Any]]:
    from inlay.tasks.errors import DataError

    for number, line in enumerate(content.splitlines(), start=1):
        if line.lstrip().startswith("{"):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{source}, line {number}: not a JSON object: {error}") from None
        elif line.strip():
            yield _row(task, tuple(line.split("\t")), f"{source}, line {number}")


def _row(task: Any, texts: tuple[str, ...], where: str) -> dict[str, Any]:
    from inlay.tasks.errors import DataError

    columns = task.columns(labelled=False)
    if len(texts) != len(columns):
        raise DataError(f"{where}: {task.name} reads {len(columns)} text(s) ({', '.join(columns)}), got {len(texts)}.")
    return dict(zip(columns, texts, strict=True))


command = click.Command(
    "predict",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path)),
        click.Argument(["texts"], nargs=-1),
        click.Option(["--file"], type=click.Path(path_type=Path), help="Rows to label."),
        click.Option(
            ["--out"], type=click.Path(path_type=Path), help="Write here instead of stdout, whole or not at all."
        ),
        click.Option(["--host"], help="The host, where it has moved or PATH is an inlay without one."),
        click.Option(["--threads"], type=click.IntRange(min=1), help="Threads of torch; without it half of the cores."),
    ],
)
