"""inlay serve"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.flags import any_host_flag, flags, threads_flag, trust_flag
from inlay.serve.limits import Limits

HELP = """Serve runs, inlays and fusions of one host over HTTP, with a page to look inside.

PATH is a run, an inlay, or a folder of them; NAME=PATH gives it another name. All are on one host and share batches.

\b
Examples:
  inlay serve runs/rte runs/mnli runs/rte-fused
  inlay serve sentiment=runs/mine --root runs --keys keys.txt --reload 5
  inlay serve runs/rte --bind 0.0.0.0:8000 --open
  inlay serve runs/rte --engine ray --replicas 2
"""


def work(
    paths: tuple[str, ...], host: str | None, bind: str, root: Path | None, keys: Path | None, open_to_all: bool,
    cors: tuple[str, ...], reload: float | None, threads: int | None,
    any_host: bool, trust_remote_code: bool, engine: str, replicas: int | None, address: str | None, **limits: Any,
) -> None:  # fmt: skip
    from inlay.runs.allowed import Allowed
    from inlay.serve.engine import Engine
    from inlay.serve.keys import Keys
    from inlay.serve.logs import log_to
    from inlay.serve.server import check_bind, serve

    known = Keys.read(keys)
    check_bind(bind, known, open_to_all)
    if root is not None and not root.is_dir():
        raise click.UsageError(f"--root {root} is not a folder.")
    bounds = Limits(**{name: value for name, value in limits.items() if value is not None})
    log_to()
    allowed = Allowed(any_host, trust_remote_code)
    if engine == "ray":
        from inlay.serve.replicas import Order, run_replicas

        order = Order(paths, host, bounds, allowed, threads, known, root, cors, reload=reload)
        run_replicas(order, bind, replicas=replicas or 2, address=address, open_to_all=open_to_all)
        return
    if replicas is not None or address is not None:
        raise click.UsageError("--replicas and --address are for a Ray cluster; they need --engine ray.")
    serve(
        Engine.open(paths, host, limits=bounds, allowed=allowed, threads=threads),
        bind, keys=known, open_to_all=open_to_all, root=root, cors=cors, reload=reload,
    )  # fmt: skip


command = click.Command(
    "serve",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["paths"], nargs=-1, required=True),
        click.Option(["--host"], help="The host, if it has moved, or if no folder names one."),
        click.Option(["--bind"], default="127.0.0.1:8000", show_default=True, help="Address and port."),
        click.Option(
            ["--root"], type=click.Path(path_type=Path), help="The folder from which models may be loaded by request."
        ),
        click.Option(
            ["--keys"],
            type=click.Path(path_type=Path),
            help="A file with one key per line ('admin KEY' for those that may load models); or set INLAY_SERVE_KEYS.",
        ),
        click.Option(
            ["--open", "open_to_all"],
            is_flag=True,
            help="Accept requests from everybody who can reach the address, without keys.",
        ),
        click.Option(
            ["--cors"], multiple=True, help="An origin whose pages may send requests. Repeat the flag for more."
        ),
        click.Option(
            ["--reload"], type=click.FloatRange(min=0.1), help="Look for changed folders at this interval, in seconds."
        ),
        click.Option(
            ["--engine"],
            type=click.Choice(["process", "ray"]),
            default="process",
            help="This process, or replicas on a Ray cluster. [process]",
        ),
        click.Option(["--replicas"], type=click.IntRange(min=1), help="The number of replicas, with --engine ray. [2]"),
        click.Option(["--address"], help="A Ray cluster's address; by default one is started on this machine."),
        *flags(Limits),
        threads_flag,
        any_host_flag,
        trust_flag,
    ],
)
