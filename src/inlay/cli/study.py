"""inlay study"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import json_flag, quiet_flag
from inlay.cli.output import columns, tell

HELP = """Run a grid of trainings and make the tables and figures of it.

A study is a YAML file: hosts, tasks, ways to learn them, seeds. Its cells are run folders. What is done is never run
again, so a study may be stopped, killed, changed and moved, and goes on from where it was.

\b
Examples:
  inlay study plan small.yaml
  inlay study run small.yaml --out studies/small
  inlay study show studies/small
  inlay study table studies/small --format markdown
"""


def run(
    file: str,
    out: Path,
    engine: str,
    address: str | None,
    processes: int | None,
    host: tuple[str, ...],
    data_dir: Path | None,
    retry: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from inlay.studies.board import board
    from inlay.studies.cells import StudyFolder
    from inlay.studies.plan import Plan, View
    from inlay.studies.schedule import Schedule
    from inlay.studies.schedule import retry as forgive

    plan = Plan.of(_read(file, host, data_dir))
    folder = StudyFolder(out)
    view = View(plan, folder)
    runs_cells = _engine(engine, address, processes, out)
    folder.claim(plan.facts())
    view.look()
    if retry and forgive(view):
        view.look()
    shown = board(quiet)
    try:
        Schedule(view, runs_cells, shown).run()
    except KeyboardInterrupt:
        click.echo(f"stopped and saved. To go on: inlay study run {file} --out {out}", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        shown.close()
    _say_table(view, "text", as_json)
    failed = sorted(name for name in view.names() if view.gave_up(name))
    if failed:
        click.echo(
            f"{len(failed)} of {len(view.names())} cells have failed: inlay study show {out} --failed. "
            f"To try them again: --retry",
            err=True,
        )


def _engine(engine: str, address: str | None, processes: int | None, out: Path) -> Any:
    from inlay.errors import ConfigError

    if engine == "ray":
        from inlay.studies.engines.ray import RayTasks

        return RayTasks(address, processes)
    if address is not None:
        raise ConfigError("--address is where a Ray cluster is; it needs --engine ray.")
    from inlay.studies.engines.processes import Processes

    return Processes(processes, log=out / "workers.log")


def _read(file: str, host: tuple[str, ...], data_dir: Path | None) -> Any:
    from inlay.errors import ConfigError
    from inlay.studies.file import read_study

    wrong = [pair for pair in host if "=" not in pair]
    if wrong:
        raise ConfigError(f"--host is NAME=PATH, where NAME is a host of the study, got {wrong[0]!r}.")
    return read_study(file, hosts=dict(pair.split("=", 1) for pair in host), data_dir=data_dir)


def plan(file: str, out: Path | None, host: tuple[str, ...], data_dir: Path | None, as_json: bool) -> None:
    from inlay.studies.overview import overview
    from inlay.studies.plan import Plan

    text, facts = overview(Plan.of(_read(file, host, data_dir)), out)
    tell(text, facts, as_json)


def show(folder: Path, failed: bool, as_json: bool) -> None:
    from inlay.studies.overview import states
    from inlay.studies.plan import view_of

    rows, counted = states(view_of(folder), failed)
    total = ", ".join(f"{count} {state}" for state, count in counted.items())
    facts = {"states": counted, "cells": rows}
    if failed:
        text = "\n\n".join(f"{row['slot']}  {row['cell']}\n{row['error']}" for row in rows) or "nothing has failed."
    else:
        names = ("slot", "chosen from", "state", "validation", "score", "seconds", "cell")
        text = columns([[row[name] for name in names] for row in rows], names)
    tell(f"{text}\n\n{total}", facts, as_json)


def table(
    folder: Path,
    format_: str,
    score: str | None,
    against: str | None,
    ways: str | None,
    tasks: str | None,
    as_json: bool,
) -> None:
    from inlay.studies.plan import view_of

    _say_table(
        view_of(folder), format_, as_json, score=score, against=against, ways=_listed(ways), tasks=_listed(tasks)
    )


def _listed(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


def _say_table(view: Any, format_: str, as_json: bool, **asked: Any) -> None:
    from inlay.studies.formats import FORMATS, as_facts
    from inlay.studies.tables import Asked, tables

    found = tables(view, Asked(**asked))
    tell("" if as_json else FORMATS[format_](found, view), as_facts(found, view) if as_json else None, as_json)


def export(folder: Path, out: Path, as_json: bool) -> None:
    from inlay.studies.records import export as write

    count, size = write(folder, out)
    tell(f"{count} cells, {size / 1024:,.0f} KB: {out}", {"cells": count, "bytes": size, "path": str(out)}, as_json)


file_argument = click.Argument(["file"])
folder_argument = click.Argument(["folder"], type=click.Path(path_type=Path))
host_flag = click.Option(["--host"], multiple=True, help="Where a host of the study is, as NAME=PATH. Repeat for more.")
data_flag = click.Option(["--data-dir"], type=click.Path(path_type=Path), help="Where the rows are, if elsewhere.")

command = click.Group(
    "study",
    help=HELP,
    commands=[
        click.Command(
            "run", callback=run, help="Run every cell that is not done, then print the table.",
            params=[
                file_argument,
                click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The study's folder."),
                click.Option(
                    ["--engine"], type=click.Choice(["processes", "ray"]), default="processes",
                    help="Processes of this machine, or tasks of a Ray cluster. [processes]",
                ),
                click.Option(["--address"], help="Of a Ray cluster; by default one is started on this machine."),
                click.Option(
                    ["--processes"], type=click.IntRange(min=1),
                    help="Cells to run at once; by default one per core, fewer where memory is short.",
                ),
                host_flag,
                data_flag,
                click.Option(["--retry"], is_flag=True, help="Run cells that have failed again."),
                json_flag,
                quiet_flag,
            ],
        ),
        click.Command(
            "plan", callback=plan, help="Show what would be run, in which order, and what it would cost.",
            params=[
                file_argument,
                click.Option(["--out"], type=click.Path(path_type=Path), help="A study's folder, whose cells count."),
                host_flag,
                data_flag,
                json_flag,
            ],
        ),
        click.Command(
            "show", callback=show, help="Show the state of every cell.",
            params=[
                folder_argument,
                click.Option(["--failed"], is_flag=True, help="Only what has failed, and why."),
                json_flag,
            ],
        ),
        click.Command(
            "table", callback=table, help="Print the tables.",
            params=[
                folder_argument,
                click.Option(
                    ["--format", "format_"], type=click.Choice(["text", "markdown", "latex", "csv", "html"]),
                    default="text", help="How to write it. [text]",
                ),
                click.Option(["--score"], help="main (a task's main metric), mean (of all), or a metric's name."),
                click.Option(["--against"], help="The way that others are compared with."),
                click.Option(["--ways"], help="Only these ways, separated by commas."),
                click.Option(["--tasks"], help="Only these tasks, separated by commas."),
                json_flag,
            ],
        ),
        click.Command(
            "export", callback=export,
            help="Write a small record of every cell that is done: enough for tables and figures, without any row.",
            params=[
                folder_argument,
                click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The folder to write to."),
                json_flag,
            ],
        ),
    ],
)  # fmt: skip
