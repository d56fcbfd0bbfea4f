"""inlay demo"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import tell

HELP = """Train, fuse and compare on real data: minutes on a laptop, without a GPU or an account.

An inlay is trained for each source task. Then, for a target with few labelled rows, a head alone, full fine-tuning, a
single inlay and a fusion over all inlays are compared on the same held-out rows, over several seeds.

\b
Examples:
  inlay demo
  inlay demo --data-dir path/to/data --out runs/demo-inference
"""


def work(out: Path | None, data_dir: Path | None, seeds: int, processes: int | None, as_json: bool) -> None:
    from inlay.runs.folder import Run

    out = out or _free(Path("runs") / "demo")
    with Run(out).locked(fresh=True):
        from inlay.demo import run_demo  # torch only when there is something to do

        facts = run_demo(
            out, lambda text: click.echo(text, err=as_json), data_dir=data_dir, seeds=seeds, processes=processes
        )
    if as_json:
        tell("", facts, as_json)


def _free(path: Path) -> Path:
    """The path, or the first of path-2, path-3 … that is not there yet."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


command = click.Command(
    "demo",
    callback=work,
    help=HELP,
    params=[
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            help="The folder to write to; by default runs/demo, or runs/demo-2 …",
        ),
        click.Option(
            ["--data-dir"],
            type=click.Path(path_type=Path, exists=True),
            help="A folder with the rows of MNLI, QQP, SICK and MRPC (sources) and of RTE and CB (targets).",
        ),
        click.Option(["--seeds"], type=click.IntRange(min=1), default=3, help="How many seeds to run. [3]"),
        click.Option(
            ["--processes"],
            type=click.IntRange(min=1),
            help="Processes to run at once; by default one per core.",
        ),
        json_flag,
    ],
)
