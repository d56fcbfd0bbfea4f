"""One training job from its settings to a finished run folder: what `inlay train` and `inlay fuse` do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig, PreTrainedModel

from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.data import Prepared, prepare
from inlay.errors import ConfigError, InlayError
from inlay.host.verbs import inlays_of, summary
from inlay.methods import Method, method_from
from inlay.runs.folder import Run, inlay_in, versions
from inlay.runs.report import write_report
from inlay.runs.settings import Settings
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.evaluate import ask
from inlay.training.interrupt import Interrupted
from inlay.training.loop import Outcome, TrainingLoop, accelerator_for, check_batch
from inlay.training.objectives import objective_for
from inlay.training.progress import Silent, Watcher
from inlay.training.recipe import filled
from inlay.training.threads import use_threads
from inlay.training.workbench import Workbench, open_config

T = TypeVar("T")
FILES = ("data_dir", "train_file", "validation_file", "test_file")
"""Settings that are paths of rows."""


@dataclass(frozen=True)
class Job:
    """Everything that is ready before the first step."""

    settings: Settings
    prepared: Prepared
    host: PreTrainedModel
    codec: Codec
    name: str | None
    """The inlay's name; None where the host alone trains."""

    def split(self, name: str) -> EncodedSplit:
        return self.codec.encode(self.prepared.split(name))


def get_ready(settings: Settings) -> Job:
    """Read the rows, open the host, set in what trains. Nothing is written."""
    use_threads(settings.threads)
    found = _checked(settings)
    torch.manual_seed(settings.seed)
    bench = Workbench.open(settings.host, found.prepared.task, found.config)
    name = bench.set_up(
        settings.name or _usual_name(settings.out),
        settings.mode,
        method=found.method,
        members=found.members,
        head=bench.head(settings.head_layers, settings.head_dropout),
    )
    kind = settings.method if settings.mode == "inlay" else settings.mode
    text = bench.form == "text"
    if settings.lr is None and settings.mode == "inlay" and found.method is not None:
        settings = settings.model_copy(update={"lr": found.method.usual_rate(text)})
    resolved = filled(settings, kind, text=text).model_dump(include={"lr", "epochs"})
    settings = settings.model_copy(update=resolved | {"name": name})
    return Job(settings, found.prepared, bench.host, bench.codec(settings.max_length), name)


def _usual_name(out: Path) -> str:
    """An inlay is called like its run's folder, with what a name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(out).absolute().name).strip("._-")[:64] or "own"


@dataclass(frozen=True)
class _Found:
    """What the settings name, looked up."""

    method: Method | None
    prepared: Prepared
    members: list[Path]
    config: PretrainedConfig


def _checked(settings: Settings) -> _Found:
    """Method, rows, members and the host's config; whatever is wrong with any of them is said at once."""
    problems: list[str] = []

    def look(up: Callable[[], T]) -> T:
        try:
            return up()
        except InlayError as error:
            problems.append(str(error))
            return cast(T, None)

    found = _Found(
        look(lambda: method_from({"kind": settings.method, **settings.options}) if settings.mode == "inlay" else None),
        look(lambda: prepare(settings)),
        look(lambda: [inlay_in(member) for member in settings.members if read_manifest(inlay_in(member))]),
        look(lambda: open_config(settings.host)),
    )
    if problems:
        raise ConfigError("\n".join(problems))
    check_batch(len(found.prepared.train), settings)
    return found


def train_run(settings: Settings, *, resume: bool = False, watch: Watcher | None = None) -> Run:
    """Train as the settings say, into `settings.out`. An interrupt saves the run and raises `Interrupted`."""
    watch = watch or Silent()
    run = Run(settings.out)
    accelerator = accelerator_for(settings, settings.trackers, settings.out)
    if not accelerator.is_main_process:
        _train(get_ready(settings), run, accelerator, Silent())
        return run
    with run.locked(fresh=not resume):
        if resume and run.record().get("status") == "finished":
            raise ConfigError(f"{run.folder} is finished. Look at it with: inlay inspect {run.folder}")
        job = get_ready(settings)
        facts = _facts(job) | {"processes": accelerator.num_processes}
        if resume:
            _check_same_rows(run.record(), facts)
        run.write_config(_lasting(job.settings))
        run.note(status="running", **facts)
        for note in job.prepared.notes:
            watch.say(note)
        try:
            _train(job, run, accelerator, watch)
        except Interrupted:
            run.note(status="interrupted")
            raise
    return run


def _check_same_rows(begun: dict[str, Any], now: dict[str, Any]) -> None:
    """A checkpoint is a place among the rows that the run began with."""
    if begun and (begun["rows"], begun["task"]) != (now["rows"], now["task"]):
        then, here = (f"rows {facts['rows']}, labels {facts['task']['labels']}" for facts in (begun, now))
        raise ConfigError(f"the files are not those that the run began with ({then}; now {here}). Start a new run.")


def _lasting(settings: Settings) -> dict[str, Any]:
    """Every setting, with paths that hold from any folder."""
    found = settings.model_dump(mode="json", exclude_none=True, exclude={"out"})
    for name in FILES:
        if name in found:
            found[name] = str(Path(found[name]).absolute())
    found["members"] = [str(member.absolute()) for member in settings.members]
    if Path(settings.host).is_dir():
        found["host"] = str(Path(settings.host).absolute())
    return found


def _train(job: Job, run: Run, accelerator: Accelerator, watch: Watcher) -> None:
    if job.settings.trackers:
        accelerator.init_trackers("inlay", config={"task": job.prepared.task.name, "seed": job.settings.seed})
    loop = TrainingLoop(
        job.host,
        job.codec,
        job.split("train"),
        job.split("validation"),
        job.settings,
        objective=objective_for(job.host, job.name),
        accelerator=accelerator,
        checkpoint=run.checkpoint,
        log=run.log,
        rewind=run.forget_after,
        watch=watch,
        title=job.name or "host",
    )
    outcome = loop.run()
    judged = job.split(job.prepared.judge)
    answers = ask(job.host, job.codec, judged, accelerator=accelerator)
    if accelerator.is_main_process:
        _finish(job, run, outcome, judged, answers)
    accelerator.end_training()


def _finish(job: Job, run: Run, outcome: Outcome, judged: EncodedSplit, answers: list[Answer]) -> None:
    """Write the result; the checkpoint goes last, when nothing depends on it any more."""
    scores = job.codec.measure(judged, answers)
    if job.name is not None:
        if job.settings.mode == "fusion":
            names = inlays_of(job.host)[job.name].method.needs
            for name, member in zip(names, job.settings.members, strict=True):
                run.keep_member(inlay_in(member), name)
        save(job.host, job.name, run.inlay, task=job.prepared.task.name, metrics=scores)
    if job.settings.mode == "full":
        own = {name: tensor for name, tensor in job.host.state_dict().items() if not name.startswith("inlays.")}
        job.host.save_pretrained(run.host, state_dict=own)
        job.codec.tokenizer.save_pretrained(run.host)
    run.note(
        judged=job.prepared.judge,
        scores=scores,
        validation=outcome.scores,
        best_step=outcome.best_step,
        steps=outcome.steps,
        seconds=round(outcome.seconds, 1),
        examples_per_second=round(outcome.examples_per_second, 2),
        padding=round(outcome.padding, 4),
    )
    write_report(run, job.host, job.prepared.task, judged, answers)
    run.note(status="finished")
    run.checkpoint.unlink(missing_ok=True)


def _facts(job: Job) -> dict[str, Any]:
    settings, prepared = job.settings, job.prepared
    trained = sum(p.numel() for p in job.host.parameters() if p.requires_grad)
    return {
        "task": prepared.task.model_dump(mode="json", exclude={"hub"}),
        "host": _lasting(settings)["host"],
        "mode": settings.mode,
        "method": settings.method if settings.mode == "inlay" else None,
        "name": job.name,
        "rows": {split: len(getattr(prepared, split)) for split in ("train", "validation", "test")},
        "notes": list(prepared.notes),
        "trained_parameters": trained,
        "host_parameters": summary(job.host).host_parameters,
        "max_length": job.codec.max_length,
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "versions": versions(),
    }
