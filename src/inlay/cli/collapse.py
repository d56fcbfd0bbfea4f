"""inlay collapse"""

from __future__ import annotations

from pathlib import Path

import click

from inlay.cli.flags import any_host_flag, host_flag, json_flag, overwrite_flag, path_argument, threads_flag, trust_flag
from inlay.cli.output import columns, tell

HELP = """Turn a fusion into one plain inlay: its members side by side, with their mean weights on the validation rows.

\b
Example:
  inlay collapse runs/rte-fused --out inlays/rte-collapsed
"""


def work(
    path: Path, out: Path, overwrite: bool, host: str | None, any_host: bool, trust_remote_code: bool,
    threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    from inlay.checkpoints.ours import save
    from inlay.compose.collapse import collapse
    from inlay.errors import SetupError
    from inlay.host.verbs import activate
    from inlay.runs.allowed import Allowed
    from inlay.runs.facts import manifest_data
    from inlay.runs.use import open_for_use
    from inlay.storage.folders import check_new
    from inlay.training.evaluate import batches_of
    from inlay.training.threads import use_threads

    check_new(out, overwrite)
    use_threads(threads)
    opened = open_for_use(path, host, Allowed(any_host, trust_remote_code))
    if opened.run is None or opened.name is None or opened.run.record()["mode"] != "fusion":
        raise SetupError(f"{path} is not a fusion's run; only a fusion can be collapsed.")
    task, name = opened.codec.task, f"{opened.name[:54]}-collapsed"
    seen, split = opened.listening_rows()
    before = opened.codec.measure(split, opened.answers(split))
    collapse(opened.host, opened.name, batches_of(opened.host, split), name=name)
    activate(opened.host, name)
    after = opened.codec.measure(split, opened.answers(split))
    folder = save(opened.host, name, out, task=task.name, metrics=after, data=manifest_data(opened.codec))
    text = columns([(metric, before[metric], after[metric]) for metric in before], (seen, "fusion", "collapsed"))
    tell(f"{text}\ninlay: {folder}", {"name": name, "path": str(folder), "before": before, "after": after}, as_json)


command = click.Command(
    "collapse", callback=work, help=HELP,
    params=[
        path_argument,
        click.Option(["--out"], type=click.Path(path_type=Path), required=True, help="Where to write the inlay."),
        overwrite_flag,
        host_flag,
        any_host_flag,
        trust_flag,
        threads_flag,
        json_flag,
    ],
)  # fmt: skip
