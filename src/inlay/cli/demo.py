"""inlay demo"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import count
from pathlib import Path

import click

from inlay.cli.flags import json_flag
from inlay.cli.output import tell
from inlay.errors import InlayError

HELP = """Train, fuse and compare on real data: minutes on a laptop, without a GPU or an account.

An inlay is trained for each source task. Then, for two targets with few labelled rows, six methods are compared on the
same held-out rows, over several seeds: logistic regression on embeddings, full fine-tuning, a single inlay, AdaMix,
Compacter, and a fusion of all inlays; with --setfit, SetFit too. Each takes the better of two learning rates by its
validation rows. The demo is a study: `inlay study show`, `table` and `figure` read what it writes. With --data-dir the
targets are RTE and CB, with one rate each and without AdaMix and Compacter.

With --text, a small decoder learns to put facts into words (E2E) from a few hundred rows, with LoRA and with an AdaMix
of LoRA, and the demo prints its texts beside the references. This needs the extra nlg; the rows come from --data-dir,
or from the hub.

\b
Examples:
  inlay demo
  inlay demo --data-dir path/to/data --out runs/demo-inference
  inlay demo --text --data-dir path/to/data
"""


def work(
    out: Path | None, data_dir: Path | None, text: bool, rows: int | None, seeds: int | None, setfit: bool,
    processes: int | None, as_json: bool,
) -> None:  # fmt: skip
    from inlay.runs.folder import Run

    if (text and seeds is not None) or (rows is not None and not text):
        raise click.UsageError("--rows belongs to --text, and --seeds to the demo without it.")
    if setfit:
        if text or data_dir is not None:
            raise click.UsageError("--setfit belongs to the demo without --text and --data-dir.")
        if find_spec("setfit") is None:
            raise InlayError("--setfit needs the library. Install it: pip install 'inlay[setfit]'")
    out = out or _free(Path("runs") / ("demo-text" if text else "demo"))
    with Run(out).locked(fresh=True):
        from inlay.demo import run_demo  # torch only when there is something to do
        from inlay.demo.text import run_text_demo

        def say(words: str) -> None:
            click.echo(words, err=as_json)

        if text:
            facts = run_text_demo(out, say, data_dir=data_dir, rows=rows or 300, processes=processes)
        else:
            facts = run_demo(out, say, data_dir=data_dir, seeds=seeds, setfit=setfit, processes=processes)
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
            help="A folder with the rows of MNLI, QQP, SICK and MRPC (sources) and of RTE and CB (targets); with "
            "--text e2e_nlg/{train,validation,test}.jsonl.",
        ),
        click.Option(["--text"], is_flag=True, help="Train a decoder to write texts instead."),
        click.Option(["--rows"], type=click.IntRange(min=16), help="With --text: pairs to learn from. [300]"),
        click.Option(["--seeds"], type=click.IntRange(min=1), help="How many seeds to run. [3]"),
        click.Option(["--setfit"], is_flag=True, help="Add SetFit to the table; needs the extra setfit."),
        click.Option(
            ["--processes"],
            type=click.IntRange(min=1),
            help="Processes to run at once; by default one per core.",
        ),
        json_flag,
    ],
)
