"""inlay study"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inlay.cli.flags import json_flag, quiet_flag
from inlay.cli.output import columns, tell

if TYPE_CHECKING:
    from inlay.studies.engines.base import Engine
    from inlay.studies.file import Study
    from inlay.studies.plan import View

HELP = """Run a grid of trainings and make its tables and figures.

A study is a YAML file: hosts, tasks, ways to learn them, seeds. Its cells are run folders. A finished cell is never run
again, so a study can be stopped, killed, changed and moved, and continues where it was.

\b
Examples:
  inlay study plan small.yaml
  inlay study run small.yaml --out studies/small
  inlay study show studies/small
  inlay study table studies/small --format markdown
  inlay study report studies/small
"""


def run(
    file: str,
    out: Path,
    engine: str,
    address: str | None,
    processes: int | None,
    host: tuple[str, ...],
    data_dir: Path | None,
    records: Path | None,
    retry: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from inlay.studies.board import board
    from inlay.studies.cells import StudyFolder
    from inlay.studies.plan import Plan, View
    from inlay.studies.records import Records
    from inlay.studies.schedule import Schedule
    from inlay.studies.schedule import retry as forgive

    plan = Plan.of(_read(file, host, data_dir))
    folder = StudyFolder(out)
    view = View(plan, folder)
    kept = Records(records) if records is not None else None
    if kept is not None:
        kept.check(folder, plan.facts())
    runs_cells = _engine(engine, address, processes, out)
    folder.claim(plan.facts())
    if kept is not None and (count := kept.bring(folder)) and not quiet:
        click.echo(f"{count} cells are done by their records in {records}", err=True)
    view.look()
    if retry and forgive(view):
        view.look()
    shown = board(quiet)
    try:
        Schedule(view, runs_cells, shown, kept).run()
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
        raise click.exceptions.Exit(2)


def _engine(engine: str, address: str | None, processes: int | None, out: Path) -> Engine:
    from inlay.errors import ConfigError

    if engine == "ray":
        from inlay.studies.engines.ray import RayTasks

        return RayTasks(address, processes)
    if address is not None:
        raise ConfigError("--address is where a Ray cluster is; it needs --engine ray.")
    from inlay.studies.engines.processes import Processes

    return Processes(processes, log=out / "workers.log")


def _read(file: str, host: tuple[str, ...], data_dir: Path | None) -> Study:
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
    rows: str | None,
    seeds: str | None,
    as_json: bool,
) -> None:
    from inlay.studies.plan import view_of

    _say_table(
        view_of(folder), format_, as_json, score=score, against=against, ways=_listed(ways), tasks=_listed(tasks),
        rows=_row_numbers(rows), seeds=_numbers("--seeds", seeds),
    )  # fmt: skip


def _listed(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _listed(text))
    except ValueError:
        raise click.UsageError(f"{flag} takes numbers, separated by commas, not {text!r}.") from None


def _row_numbers(text: str | None) -> tuple[int | None, ...]:
    """`all` is a number of rows too."""
    words = _listed(text)
    return (
        *_numbers("--rows", ",".join(word for word in words if word != "all")),
        *(None for w in words if w == "all"),
    )


def _say_table(view: View, format_: str, as_json: bool, **asked: Any) -> None:
    from inlay.studies.formats import FORMATS, as_facts
    from inlay.studies.tables import Asked, tables

    found = tables(view, Asked(**asked))
    tell("" if as_json else FORMATS[format_](found, view), as_facts(found, view) if as_json else None, as_json)


def figure(
    folder: Path, name: str, out: Path, against: str | None, ways: str | None, tasks: str | None, as_json: bool
) -> None:  # fmt: skip
    from inlay.errors import ConfigError
    from inlay.storage.files import write_whole
    from inlay.studies.figures import draw
    from inlay.studies.plan import view_of
    from inlay.studies.tables import Asked

    if out.suffix.lower() in OTHER_PICTURES:
        raise ConfigError(f"`out` is {out}, but figures are SVG: name a .svg file, or a folder.")
    asked = Asked(against=against, ways=_listed(ways), tasks=_listed(tasks))
    made = draw(view_of(folder), name, asked)
    files: dict[str, str] = {}
    folder = out.with_suffix("") if out.suffix == ".svg" else out
    for title, picture in made.items():
        words = "".join(char if char.isalnum() else "-" for char in title).strip("-")
        file = out if len(made) == 1 and out.suffix == ".svg" else folder / f"{name}-{words}.svg"
        if str(file) in files.values():  # titles that differ by a mark alone
            file = file.with_name(f"{name}-{words}-{len(files) + 1}.svg")
        write_whole(file, str(picture))
        files[title] = str(file)
    tell("\n".join(f"{file}  {title}" for title, file in files.items()), files, as_json)


def report(folder: Path, against: str | None, score: str | None, as_json: bool) -> None:
    from inlay.studies.page import write_page
    from inlay.studies.plan import view_of
    from inlay.studies.tables import Asked

    file = write_page(view_of(folder), Asked(against=against, score=score))
    tell(f"report: {file}", {"report": str(file)}, as_json)


def diff(before: str, after: str, host: tuple[str, ...], data_dir: Path | None, as_json: bool) -> None:
    from inlay.studies.cells import StudyFolder
    from inlay.studies.changes import changes, is_study_folder
    from inlay.studies.plan import Plan

    paths = (Path(before), Path(after))
    plans = [
        Plan.opened(StudyFolder(path)) if is_study_folder(path) else Plan.of(_read(str(path), host, data_dir))
        for path in paths
    ]
    folder = next((StudyFolder(path) for path in paths if is_study_folder(path)), None)
    found = changes(plans[0], plans[1], folder)
    lines = [*found["changed"]] or ["nothing that the file says has changed."]
    lines += [f"- {slot}" for slot in found["slots_gone"]] + [f"+ {slot}" for slot in found["slots_new"]]
    done = f", {found['cells_done_and_valid']} of them done" if folder is not None else ""
    lines.append(f"\n{found['cells_valid']} cells stay valid{done}; {found['cells_new']} are new.")
    if found["cells_done_and_not_used"]:
        lines.append(f"{len(found['cells_done_and_not_used'])} finished cells are not used any more; they stay.")
    tell("\n".join(lines), found, as_json)


def export(folder: Path, out: Path, as_json: bool) -> None:
    from inlay.studies.records import export as write

    count, size = write(folder, out)
    tell(f"{count} cells, {size / 1024:,.0f} KB: {out}", {"cells": count, "bytes": size, "path": str(out)}, as_json)


file_argument = click.Argument(["file"])
folder_argument = click.Argument(["folder"], type=click.Path(path_type=Path))
host_flag = click.Option(["--host"], multiple=True, help="Where a host of the study is, as NAME=PATH. Repeat for more.")
data_flag = click.Option(["--data-dir"], type=click.Path(path_type=Path), help="Where the rows are, if elsewhere.")
score_flag = click.Option(["--score"], help="main (a task's main metric), mean (of all), a metric's name, or loss.")
against_flag = click.Option(["--against"], help="The way to compare the others with.")
ways_flag = click.Option(["--ways"], help="Only these ways, separated by commas.")
tasks_flag = click.Option(["--tasks"], help="Only these tasks, separated by commas.")
rows_flag = click.Option(["--rows"], help="Only these numbers of training rows, or all, separated by commas.")
seeds_flag = click.Option(["--seeds"], help="Only these seeds, separated by commas.")
OTHER_PICTURES = (".png", ".pdf", ".jpg", ".jpeg", ".eps")
FIGURES = ("attention", "convergence", "differences", "parameters", "rows")

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
                    help="Run cells as processes on this machine, or as tasks on a Ray cluster. [processes]",
                ),
                click.Option(["--address"], help="A Ray cluster's address; by default one is started on this machine."),
                click.Option(
                    ["--processes"], type=click.IntRange(min=1),
                    help="Cells to run at once; by default one per core, fewer if memory is short.",
                ),
                host_flag,
                data_flag,
                click.Option(
                    ["--records"], type=click.Path(path_type=Path),
                    help="A folder of small records: a cell with a record counts as done; each finished cell gets one.",
                ),
                click.Option(["--retry"], is_flag=True, help="Run cells that have failed again."),
                json_flag,
                quiet_flag,
            ],
        ),
        click.Command(
            "plan", callback=plan, help="Show what would be run, in which order, and what it would cost.",
            params=[
                file_argument,
                click.Option(
                    ["--out"], type=click.Path(path_type=Path), help="A study's folder, whose finished cells count."
                ),
                host_flag,
                data_flag,
                json_flag,
            ],
        ),
        click.Command(
            "show", callback=show, help="Show the state of every cell.",
            params=[
                folder_argument,
                click.Option(["--failed"], is_flag=True, help="Only failed cells, and why they failed."),
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
                score_flag,
                against_flag,
                ways_flag,
                tasks_flag,
                rows_flag,
                seeds_flag,
                json_flag,
            ],
        ),
        click.Command(
            "figure", callback=figure, help="Draw a figure as SVG.",
            params=[
                folder_argument,
                click.Argument(["name"], type=click.Choice(sorted(FIGURES))),
                click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="A file, or a folder."),
                against_flag,
                ways_flag,
                tasks_flag,
                json_flag,
            ],
        ),
        click.Command(
            "report", callback=report, help="Write report.html, one page with everything, into the study's folder.",
            params=[folder_argument, against_flag, score_flag, json_flag],
        ),
        click.Command(
            "diff", callback=diff, help="Show what changed between two files or folders, and which cells stay.",
            params=[click.Argument(["before"]), click.Argument(["after"]), host_flag, data_flag, json_flag],
        ),
        click.Command(
            "export", callback=export,
            help="Write a small record of every finished cell: enough for tables and figures, but no rows of data.",
            params=[
                folder_argument,
                click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="The folder to write to."),
                json_flag,
            ],
        ),
    ],
)  # fmt: skip
for each in command.commands.values():
    each.short_help = each.help  # click cuts it off otherwise
