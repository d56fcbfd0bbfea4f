"""inlay params"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from inlay.cli.flags import json_flag, trust_flag
from inlay.cli.output import columns, tell

HELP = """Count the parameters that a method would train on a host, without loading any weights.

HOST is a name such as bert-base or t5-base, a folder, or a model of the hub. Without --method all methods are counted.

\b
Examples:
  inlay params t5-base
  inlay params bert-base --method pfeiffer --options reduction=64
"""


def work(host: str, method: str | None, options: tuple[str, ...], trust_remote_code: bool, as_json: bool) -> None:
    from inlay.errors import ConfigError, InlayError
    from inlay.host.count import NAMED_HOSTS, count, without_weights
    from inlay.methods import METHODS, method_from
    from inlay.runs.settings import named_values
    from inlay.training.workbench import open_config

    config = NAMED_HOSTS[host] if host in NAMED_HOSTS else open_config(host, trust_remote_code=trust_remote_code)
    empty = without_weights(config, trust_remote_code=trust_remote_code)
    if method is not None:
        counted = count(empty, method_from({"kind": method, **named_values(options)}))
        tell(str(counted), asdict(counted) | {"percent": counted.percent}, as_json)
        return
    if options:
        raise ConfigError("options belong to one method; give --method as well.")
    found: list[dict[str, Any]] = []
    for kind in [kind for kind, known in METHODS.items() if known.standalone]:
        try:
            counted = count(empty, method_from({"kind": kind}))
        except InlayError:
            continue  # it has no place in this host
        found.append({"method": kind} | asdict(counted) | {"percent": counted.percent})
    found.sort(key=lambda row: row["trainable"])
    rows = [(row["method"], row["trainable"], row["percent"], row["bytes"] // 1024) for row in found]
    tell(columns(rows, ("method", "parameters", "% of host", "KB")), {"host": host, "methods": found}, as_json)


command = click.Command(
    "params",
    callback=work,
    help=HELP,
    params=[
        click.Argument(["host"]),
        click.Option(["--method"], help="Count only this method (see `inlay ls methods`)."),
        click.Option(
            ["--options"],
            multiple=True,
            help="The method's own settings, as in reduction=16. Repeat the flag for more.",
        ),
        trust_flag,
        json_flag,
    ],
)
