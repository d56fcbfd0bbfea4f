"""inlay train"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inlay.cli.flags import any_host_flag, config_flag, flags, json_flag, merged, quiet_flag, trust_flag
from inlay.cli.output import columns, tell
from inlay.runs.joint_settings import JointSettings, settings_from
from inlay.runs.settings import FusionOptions

if TYPE_CHECKING:
    from inlay.runs.allowed import Allowed
    from inlay.runs.folder import Run

HELP = """Train one inlay, a head, or the whole host on a task; or several tasks together on one host.

\b
Examples:
  inlay train --host bert-base-uncased --task rte --out runs/rte
  inlay train --host bert-base-uncased --train-file mine.csv --text review --label stars --out runs/mine
  inlay train --config rte.yaml --method compacter --lr 3e-3 --out runs/rte-compacter
  inlay train --recipe compacter --method houlsby --host t5-base --task rte --out runs/rte-adapter
  inlay train --from runs/mnli --host bert-base-uncased --task rte --out runs/rte-after-mnli
  inlay train --tasks rte,mnli,sst2 --host bert-base-uncased --out runs/joint
  inlay train --tasks rte,mnli --mode inlay --mixed --host bert-base-uncased --out runs/side-by-side
  inlay train --resume runs/rte
  inlay train --resume runs/rte --epochs 40
"""
MAY_CHANGE = (
    "epochs", "max_steps", "patience", "save_every", "threads",
    "host", "data_dir", "train_file", "validation_file", "test_file",
)  # fmt: skip
"""Settings that a resumed run may change: how long it goes on, and where its host and rows are now."""


def work(
    config: Path | None,
    resume: Path | None,
    any_host: bool,
    trust_remote_code: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    from inlay.runs.allowed import Allowed

    if resume is not None:
        extra = [name for name, value in {**given, "config": config}.items() if value not in (None, ())]
        extra = [name for name in extra if name not in MAY_CHANGE]
        if extra:
            may = ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE)
            raise click.UsageError(
                f"--resume uses the run's own settings; leave out --{extra[0].replace('_', '-')}. It may change: {may}."
            )
    run_job(config, resume, given, as_json, quiet, Allowed(any_host, trust_remote_code))


def run_job(
    config: Path | None,
    resume: Path | None,
    given: dict[str, Any],
    as_json: bool,
    quiet: bool,
    allowed: Allowed,
    finish: bool = False,
) -> None:
    """Train, say how it went; on an interrupt, how to go on."""
    from accelerate import PartialState

    from inlay.runs.folder import Run
    from inlay.runs.joint import train_jointly
    from inlay.runs.train import train_run
    from inlay.training.interrupt import Interrupted
    from inlay.training.progress import watcher

    if resume is not None:
        settings = settings_from(Run(resume).config() | merged(None, given) | {"out": resume})
    else:
        settings = settings_from(merged(config, given))
    how: Any = {"resume": resume is not None, "finish": finish, "watch": watcher(quiet), "allowed": allowed}
    try:
        run = train_jointly(settings, **how) if isinstance(settings, JointSettings) else train_run(settings, **how)
    except Interrupted as stopped:
        if PartialState().is_main_process:
            click.echo(f"stopped by {stopped} and saved. To go on: inlay train --resume {settings.out}", err=True)
        raise click.exceptions.Exit(128 + stopped.signal_number) from None
    if not PartialState().is_main_process:  # one process speaks for all
        return
    record = run.record()
    tell(f"{_told(run, record)}\nreport: {run.report}", record, as_json)


def _told(run: Run, record: dict[str, Any]) -> str:
    """The scores, and where the inlays are."""
    if record.get("tasks"):
        tasks = record["tasks"]
        rows = [(name, tasks[name]["judged"], *score) for name in tasks for score in tasks[name]["scores"].items()]
        host = f"\nhost:   {run.host}" if run.host.is_dir() else ""
        text = columns(rows, ("task", "judged on", "metric", "score"))
        return f"{text}{host}\none task: {run.folder}:{next(iter(tasks))}"
    header = (f"{record['judged']} of {record['task']['name']}", "score")
    text = columns(list(record["scores"].items()), header)
    return f"{text}\ninlay:  {run.inlay}" if record["name"] else text


OF_FUSIONS = set(FusionOptions.model_fields)
resume_flag = click.Option(
    ["--resume"],
    type=click.Path(path_type=Path),
    help="Continue an interrupted run. It can be made longer, and its host and rows may have moved.",
)
command = click.Command(
    "train", callback=work, help=HELP, short_help="Train.",
    params=[
        config_flag, resume_flag, *flags(JointSettings, leave_out={"members"}, hidden=OF_FUSIONS), any_host_flag,
        trust_flag, json_flag, quiet_flag,
    ],
)  # fmt: skip
