"""One training job from its settings to a finished run folder: what `inlay train` and `inlay fuse` do."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from inlay.checkpoints.manifest import CARD, MANIFEST, WEIGHTS, read_manifest
from inlay.checkpoints.ours import save
from inlay.data import Prepared, prepare
from inlay.errors import ConfigError, InlayError
from inlay.host.verbs import inlays_of, summary
from inlay.methods.base import Method, method_from
from inlay.runs.folder import Run, versions
from inlay.runs.report import write_report
from inlay.runs.settings import Settings
from inlay.storage.folders import replacing
from inlay.training.codec import Answer, Language, Split
from inlay.training.evaluate import ask
from inlay.training.interrupt import Interrupted
from inlay.training.loop import Outcome, accelerator_for, check_batch, fit
from inlay.training.modes import begin
from inlay.training.objectives import objective_for
from inlay.training.progress import Silent, Watcher
from inlay.training.recipe import filled
from inlay.training.threads import use_threads
from inlay.training.workbench import form_of, longest_input, open_config, open_host, own_head


@dataclass(frozen=True)
class Job:
    """Everything that is ready before the first step."""

    settings: Settings
    prepared: Prepared
    host: PreTrainedModel
    language: Language
    name: str | None
    """The inlay's name; None where the host alone trains."""

    def split(self, name: str) -> Split:
        return self.language.split(self.prepared.split(name))


def get_ready(settings: Settings) -> Job:
    """Read the rows, open the host, set in what trains. Nothing is written."""
    use_threads(settings.threads)
    method, prepared, members = _checked(settings)
    torch.manual_seed(settings.seed)
    host, tokenizer = open_host(settings.host, prepared.task)
    form = form_of(prepared.task, host.config)
    head = own_head(prepared.task, form, host, settings.head_layers, settings.head_dropout)
    name = begin(host, settings.name or _usual_name(settings.out), settings.mode, head, method=method, members=members)
    resolved = filled(settings, kind_of(settings), text=form == "text").model_dump(include={"lr", "epochs"})
    settings = settings.model_copy(update=resolved | {"name": name})
    language = Language(prepared.task, form, tokenizer, longest_input(host, tokenizer, settings.max_length))
    return Job(settings, prepared, host, language, name)


def _usual_name(out: Path) -> str:
    """An inlay is called like its run's folder, with what a name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(out).absolute().name).strip("._-")[:64] or "own"


def _checked(settings: Settings) -> tuple[Method | None, Prepared, list[Path]]:
    """Method, rows and members; whatever is wrong with any of them, or with the host's name, is said at once."""
    problems: list[str] = []
    found: list[Any] = []
    for look in (
        lambda: method_from({"kind": settings.method, **settings.options}) if settings.mode == "inlay" else None,
        lambda: prepare(settings),
        lambda: [inlay_in(member) for member in settings.members if read_manifest(inlay_in(member))],
        lambda: open_config(settings.host),
    ):
        try:
            found.append(look())
        except InlayError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    method, prepared, members, _ = found
    check_batch(len(prepared.train), settings)
    return method, prepared, members


def kind_of(settings: Settings) -> str:
    """What the papers' values go by: the method, or the mode where there is no method."""
    return settings.method if settings.mode == "inlay" else settings.mode


def inlay_in(folder: Path) -> Path:
    """The inlay of a run, or the inlay itself."""
    return folder / "inlay" if (folder / "run.json").is_file() else folder


def train(settings: Settings, *, resume: bool = False, watch: Watcher | None = None) -> Run:
    """Train as the settings say, into `settings.out`. An interrupt saves the run and raises `Interrupted`."""
    watch = watch or Silent()
    run = Run(settings.out)
    accelerator = accelerator_for(settings, settings.trackers, settings.out)
    if not accelerator.is_main_process:
        _train(get_ready(settings), run, accelerator, Silent())
        return run
    with run.held(fresh=not resume):
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
        raise ConfigError(f"the files are not those that the run began with ({then}; now {here}). Train anew.")


def _lasting(settings: Settings) -> dict[str, Any]:
    """Every setting, with paths that hold from any folder."""
    found = settings.model_dump(mode="json", exclude_none=True, exclude={"out"})
    for name in ("data_dir", "train", "validation", "test"):
        if name in found:
            found[name] = str(Path(found[name]).absolute())
    found["members"] = [str(member.absolute()) for member in settings.members]
    if Path(settings.host).is_dir():
        found["host"] = str(Path(settings.host).absolute())
    return found


def _train(job: Job, run: Run, accelerator: Accelerator, watch: Watcher) -> None:
    main = accelerator.is_main_process
    if job.settings.trackers:
        accelerator.init_trackers("inlay", config={"task": job.prepared.task.name, "seed": job.settings.seed})
    outcome = fit(
        job.host,
        job.language,
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
    judged = job.split(job.prepared.judge)
    answers = ask(job.host, job.language, judged, accelerator=accelerator)
    if main:
        _finish(job, run, outcome, judged, answers)
    accelerator.end_training()


def _finish(job: Job, run: Run, outcome: Outcome, judged: Split, answers: list[Answer]) -> None:
    """Write the result; the checkpoint goes last, when nothing depends on it any more."""
    scores = job.language.measure(judged, answers)
    if job.name is not None:
        if job.settings.mode == "fusion":
            names = inlays_of(job.host)[job.name].method.needs
            for name, member in zip(names, job.settings.members, strict=True):
                keep_member(inlay_in(member), run.members / name)
        save(job.host, job.name, run.inlay, task=job.prepared.task.name, metrics=scores)
    if job.settings.mode == "full":
        own = {name: tensor for name, tensor in job.host.state_dict().items() if not name.startswith("inlays.")}
        job.host.save_pretrained(run.host, state_dict=own)
        job.language.tokenizer.save_pretrained(run.host)
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


def keep_member(folder: Path, target: Path) -> None:
    """A copy of a member, whole or not at all."""
    with replacing(target, (MANIFEST,)) as copy:
        for file in (MANIFEST, WEIGHTS, CARD):
            if (folder / file).exists():
                shutil.copyfile(folder / file, copy / file)


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
        "max_length": job.language.max_length,
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "versions": versions(),
    }
