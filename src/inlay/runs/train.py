"""One training job from its settings to a finished run folder: what `inlay train` and `inlay fuse` do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig, PreTrainedModel

from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.data import Prepared, Task, prepare
from inlay.errors import ConfigError, InlayError
from inlay.host.verbs import inlays_of, summary
from inlay.methods import Method
from inlay.runs.folder import Run, inlay_in, versions
from inlay.runs.report import write_report
from inlay.runs.settings import Settings, unused, unused_here
from inlay.runs.start import begun_from_a_run, method_of, norms_of, start_from
from inlay.training.codec import Answer, Codec, EncodedSplit, answer_form, asking
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


def get_ready(settings: Settings, *, resume: bool = False) -> Job:
    """Read the rows, open the host, set in what trains. Nothing is written.

    resume: the settings are a run's own, of which an earlier version may have left some unused.
    """
    use_threads(settings.threads)
    settings = begun_from_a_run(settings)
    found = _checked(settings, resume)
    torch.manual_seed(settings.seed)
    bench = Workbench.open(settings.host, found.prepared.task, found.config)
    head = None if bench.form == "text" else bench.head(settings.head_layers, settings.head_dropout, settings.pooling)
    name = bench.set_up(
        settings.name or _usual_name(settings.out),
        settings.mode,
        method=found.method,
        members=found.members,
        head=head,
        norms=norms_of(settings),
        fusion=settings.fusion_options(),
    )
    if settings.start is not None and name is not None:
        start_from(bench.host, name, inlay_in(settings.start))
    kind = found.method if found.method is not None else settings.mode
    resolved = filled(settings, kind, text=bench.form == "text").model_dump(include={"lr", "epochs"})
    if found.method is not None:
        resolved["method"] = found.method.kind
    settings = settings.model_copy(update=resolved | {"name": name})
    return Job(settings, found.prepared, bench.host, codec_for(bench, settings, found.prepared), name)


def codec_for(bench: Workbench, settings: Settings, prepared: Prepared) -> Codec:
    """The workbench's codec with the settings of the loss and of answering in text."""
    return replace(
        asking(bench.codec(settings.max_length), settings),
        label_smoothing=settings.label_smoothing,
        class_weights=_class_weights(settings, prepared),
    )


def _class_weights(settings: Settings, prepared: Prepared) -> tuple[float, ...] | None:
    """One number per label; balanced: rows / (labels · rows of the label), which is 1 in the mean over the rows."""
    labels = prepared.task.labels
    if settings.class_weights == "balanced":
        counts = Counter(int(example.target) for example in prepared.train)  # type: ignore[arg-type]
        rows = len(prepared.train)
        return tuple(rows / (len(labels) * max(1, counts[i])) for i in range(len(labels)))
    if settings.class_weights is not None and len(settings.class_weights) != len(labels):
        raise ConfigError(
            f"class_weights has {len(settings.class_weights)} numbers, but there are {len(labels)} labels: "
            f"{', '.join(labels)}. Give one for each, in this order."
        )
    return settings.class_weights


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


def _checked(settings: Settings, resume: bool) -> _Found:
    """Method, rows, members and the host's config; whatever is wrong with any of them is said at once."""
    problems: list[str] = []

    def look(up: Callable[[], T]) -> T:
        try:
            return up()
        except InlayError as error:
            problems.append(str(error))
            return cast(T, None)

    found = _Found(
        look(lambda: method_of(settings)),
        look(lambda: prepare(settings)),
        look(lambda: [inlay_in(member) for member in settings.members if read_manifest(inlay_in(member))]),
        look(lambda: open_config(settings.host)),
    )
    if not resume:
        problems += unused(settings)
        if found.config is not None and found.prepared is not None:
            task = found.prepared.task
            text = look(lambda: answer_form(task, found.config)) == "text"
            problems += unused_here(settings, task.kind, text)
            look(lambda: settings.selected(dict.fromkeys(task.metrics, 0.0)))
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
        _train(get_ready(settings, resume=resume), run, accelerator, Silent())
        return run
    with run.locked(fresh=not resume):
        if resume and run.record().get("status") == "finished":
            raise ConfigError(f"{run.folder} is finished. Look at it with: inlay inspect {run.folder}")
        job = get_ready(settings, resume=resume)
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
    if begun and (begun["rows"], Task(**begun["task"])) != (now["rows"], Task(**now["task"])):
        then, here = (f"rows {facts['rows']}, labels {facts['task']['labels']}" for facts in (begun, now))
        raise ConfigError(f"the files are not those that the run began with ({then}; now {here}). Start a new run.")


def _lasting(settings: Settings) -> dict[str, Any]:
    """Every setting, with paths that hold from any folder."""
    found = settings.model_dump(mode="json", exclude_none=True, exclude={"out"})
    for name in FILES:
        if name in found:
            found[name] = str(Path(found[name]).absolute())
    found["members"] = [str(member.absolute()) for member in settings.members]
    if settings.start is not None:
        found["start"] = str(settings.start.absolute())
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
        objective=objective_for(job.host, job.name, job.settings),
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
