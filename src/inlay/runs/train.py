"""One training job from its settings to a finished run folder: what `inlay train` and `inlay fuse` do."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import safetensors
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.errors import CheckpointError
from inlay.runs.allowed import Allowed
from inlay.runs.carry_out import Course, carry_out
from inlay.runs.facts import check_same, facts_of, files_of, manifest_data, training_facts
from inlay.runs.folder import Run, inlay_in
from inlay.runs.job import Finishing, Job
from inlay.runs.ready import get_ready
from inlay.runs.report import write_report
from inlay.runs.settings import Settings
from inlay.storage.folders import replacing
from inlay.training.codec import Answer, EncodedSplit
from inlay.training.evaluate import ask
from inlay.training.loop import Outcome, TrainingLoop
from inlay.training.objectives import objective_for
from inlay.training.progress import Watcher, counter


def train_run(
    settings: Settings,
    *,
    resume: bool = False,
    finish: bool = False,
    watch: Watcher | None = None,
    allowed: Allowed = Allowed(),  # noqa: B008 (it is frozen)
    finishing: Finishing | None = None,
) -> Run:
    """Train as the settings say, into `settings.out`. An interrupt saves the run and raises `Interrupted`.

    resume: go on from the run's checkpoint, with settings that may be others where `inlay train --resume` allows it.
    finish: train no further, and write the best state so far as the result.
    finishing: is called with the result before the run is noted as finished.
    """

    def ready(settings: Settings, allowed: Allowed, *, resume: bool) -> _Single:
        return _Single(get_ready(settings, allowed, resume=resume))

    return carry_out(settings, ready, resume=resume, finish=finish, watch=watch, allowed=allowed, finishing=finishing)


@dataclass(frozen=True)
class _Single:
    """A job of one task, as `carry_out` takes it."""

    job: Job

    @property
    def notes(self) -> tuple[str, ...]:
        return self.job.notes

    def facts(self) -> dict[str, Any]:
        return facts_of(self.job)

    def check_same(self, begun: dict[str, Any], facts: dict[str, Any], allowed: Allowed) -> None:
        check_same(begun, facts, allowed)

    def learn(self, course: Course) -> None:
        job, run, accelerator = self.job, course.run, course.accelerator
        if job.settings.trackers:
            accelerator.init_trackers("inlay", config={"task": job.prepared.task.name, "seed": job.settings.seed})
        if accelerator.is_main_process:
            _keep_members(job, run)
        loop = TrainingLoop(
            job.host,
            job.codec,
            job.split("train"),
            job.split("validation") if job.settings.validation else None,
            job.settings,
            objective=objective_for(job.host, job.name, job.settings),
            accelerator=accelerator,
            checkpoint=run.checkpoint,
            log=run.log,
            rewind=run.forget_after,
            watch=course.watch,
            title=job.name or "host",
            finish_now=course.finish,
        )
        outcome = loop.run()
        judged, answers = judge(job, outcome.answers, accelerator, course.watch)
        if accelerator.is_main_process:
            _finish(job, run, outcome, judged, answers, course.finishing)
        accelerator.end_training()


def judge(
    job: Job, known: list[Answer] | None, accelerator: Accelerator, watch: Watcher
) -> tuple[EncodedSplit, list[Answer]]:
    """The rows that give the final score, and the answers to them; `known`: those to the validation rows."""
    name = job.prepared.judge
    judged = job.split(name)
    if name == "validation" and known is not None:  # the same rows are asked once
        return judged, known
    watch.start(f"{name} rows", 0, len(judged.examples))
    try:
        count = counter(watch, len(judged.examples))
        return judged, ask(job.host, job.codec, judged, accelerator=accelerator, watch=count)
    finally:
        watch.stop()


def _keep_members(job: Job, run: Run) -> None:
    """Copies of what is fused, as it is when the run begins: it may be trained anew in its own place meanwhile."""
    for name, member in job.members.items():
        if not (run.members / name).exists():
            run.keep_member(inlay_in(member), name)


def _finish(
    job: Job,
    run: Run,
    outcome: Outcome,
    judged: EncodedSplit,
    answers: list[Answer],
    finishing: Finishing | None = None,
) -> None:
    """Write the result; the checkpoint goes last, when nothing depends on it any more."""
    scores = job.codec.measure(judged, answers)
    if job.name is not None:
        data = manifest_data(job.codec)
        save(job.host, job.name, run.inlay, task=job.prepared.task.name, metrics=scores, data=data)
        run.note(inlay_sha256=read_manifest(run.inlay).sha256)
    if job.settings.mode == "full":
        save_host(job.host, job.codec.tokenizer, run)
        run.note(files=files_of(run))
    run.note(judged=job.prepared.judge, scores=scores, validation=outcome.scores, **training_facts(outcome))
    write_report(run, job.host, job.prepared.task, judged, answers)
    if finishing is not None:
        finishing(job, judged, answers)
    run.note(status="finished")
    run.checkpoint.unlink(missing_ok=True)


def save_host(host: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Run) -> None:
    """The host after it was trained, and its tokenizer; whole or not there."""
    own = {name: tensor for name, tensor in host.state_dict().items() if not name.startswith("inlays.")}
    if broken := [name for name, tensor in own.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
        raise CheckpointError(f"the host's weights are not finite ({', '.join(broken[:4])}) and are not saved.")
    with replacing(run.host, ("config.json",), holds=None) as folder:
        try:
            host.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        except safetensors.SafetensorError as error:  # how it tells of a full disk
            full = "os error 28" in str(error) or "No space" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(run.host)) from None
