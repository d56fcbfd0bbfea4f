"""A joint run: several tasks, one host, one run folder.

    run = train_jointly(JointSettings(host="bert-base-uncased", tasks=["rte", "mnli", "sst2"], out="runs/joint"))
    open_for_use("runs/joint:rte")

mode     Θ, the host    Φ_n                    known as
mt-a     trains         an inlay and a head    MT-A (Pfeiffer et al. 2021); with PALs, Stickland & Murray 2019
inlay    frozen         an inlay and a head    N single runs side by side, each as it would be alone with the same rows
full     trains         a head                 multi-task fine-tuning
head     frozen         a head

The folder has what a single run has, an inlay per task in `inlays/<task>/`, and the host in `host/` where it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.data import Prepared, Task, builtin_tasks, prepare
from inlay.data.mixing import Sampling
from inlay.errors import ConfigError, Problems
from inlay.host.verbs import activate, inlays_of, train
from inlay.methods import Method
from inlay.runs.allowed import Allowed
from inlay.runs.carry_out import Course, carry_out
from inlay.runs.facts import (
    check_same,
    check_same_host,
    facts_of_host,
    facts_of_task,
    files_of,
    manifest_data,
    settings_to_record,
    training_facts,
)
from inlay.runs.folder import RECORD, Run
from inlay.runs.job import Finishing, Job
from inlay.runs.joint_settings import JointSettings, given_to_all, single_mode
from inlay.runs.ready import check_trackers, codec_for, few_to_validate, with_room, with_unwritable
from inlay.runs.report import write_joint_report
from inlay.runs.settings import PATHS, Settings, useless, useless_here
from inlay.runs.start import method_of, norms_of
from inlay.runs.train import judge, save_host
from inlay.storage.names import NAME, NAMES_HAVE
from inlay.training.codec import Answer, EncodedSplit, answer_form, is_decoder
from inlay.training.joint import MEAN, JointLoop
from inlay.training.lesson import Lesson
from inlay.training.loop import Outcome
from inlay.training.objectives import objective_for
from inlay.training.progress import Watcher
from inlay.training.recipe import MODE_RATES, filled
from inlay.training.threads import use_threads
from inlay.training.workbench import Workbench, open_config


def train_jointly(
    settings: JointSettings,
    *,
    resume: bool = False,
    finish: bool = False,
    watch: Watcher | None = None,
    allowed: Allowed = Allowed(),  # noqa: B008 (it is frozen)
    finishing: Finishing | None = None,
) -> Run:
    """Train several tasks on one host into `settings.out`. What `resume` and `finish` do is as in `train_run`.

    finishing: is called with each task's result before the run is noted as finished.
    """
    return carry_out(
        settings, get_ready_jointly, resume=resume, finish=finish, watch=watch, allowed=allowed, finishing=finishing
    )


@dataclass(frozen=True)
class JointJob:
    """Everything that is ready before the first step."""

    settings: JointSettings
    host: PreTrainedModel
    jobs: Mapping[str, Job]
    """Each task by its name, as a single run would have it, on the same host."""
    sampling: Sampling

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{name}: {note}" for name, job in self.jobs.items() for note in job.notes)

    def facts(self) -> dict[str, Any]:
        settings, epochs = self.settings, self.settings.epochs or 1
        tasks = {
            name: facts_of_task(job) | {"settings": settings_to_record(job.settings)} for name, job in self.jobs.items()
        }
        counts = {name: own["rows"]["train"] for name, own in tasks.items()}
        first, last = (self.sampling.shares(counts, epoch, epochs) for epoch in (1, epochs))
        for name, own in tasks.items():
            own["shares"] = [round(first[name], 6), round(last[name], 6)]
        return {
            "task": None,  # each task says its own
            "name": None,
            "max_length": None,
            "mode": settings.mode,
            "settings": joint_settings_to_record(settings),
            "notes": list(self.notes),
            "rows": {
                split: sum(own["rows"][split] for own in tasks.values()) for split in ("train", "validation", "test")
            },
            "method": settings.method if settings.mode in ("mt-a", "inlay") else None,
            "tasks": tasks,
        } | facts_of_host(self.host, settings)

    def check_same(self, begun: dict[str, Any], facts: dict[str, Any], allowed: Allowed) -> None:
        if not begun:
            return
        then, now = begun["tasks"], facts["tasks"]
        if list(then) != list(now):
            raise ConfigError(f"the run began with the tasks {', '.join(then)}, not {', '.join(now)}. Start a new run.")
        for name in now:
            try:
                check_same(then[name] | {"host_weights": None}, now[name] | {"host_weights": None}, allowed)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        check_same_host(begun, facts, allowed)

    def learn(self, course: Course) -> None:
        settings, run, accelerator = self.settings, course.run, course.accelerator
        if settings.trackers:
            accelerator.init_trackers("inlay", config={"tasks": ", ".join(self.jobs), "seed": settings.seed})
        loop = JointLoop(
            self.host, [self._lesson(name, job) for name, job in self.jobs.items()], settings, sampling=self.sampling,
            mixed=settings.mixed, steps_per_epoch=settings.steps_per_epoch, stop_on=settings.stop_on,
            host_lr=settings.host_lr, accelerator=accelerator, checkpoint=run.checkpoint, log=run.log,
            rewind=run.forget_after, watch=course.watch, title="joint", finish_now=course.finish,
        )  # fmt: skip
        outcome = loop.run()
        judged = {}
        for lesson in loop.lessons:
            lesson.enter()
            known = outcome.answers_of.get(lesson.name)
            judged[lesson.name] = judge(self.jobs[lesson.name], known, accelerator, course.watch)
        if accelerator.is_main_process:
            _finish(self, run, outcome, judged, course.finishing)
        accelerator.end_training()

    def _lesson(self, name: str, job: Job) -> Lesson:
        objective, train = objective_for(self.host, job.name, job.settings), job.split("train")
        judging = job.split("validation") if job.prepared.validation else EncodedSplit([], train.features)
        return Lesson(name, job.codec, train, judging, job.settings, objective=objective, setup=job.name)


def _finish(
    job: JointJob,
    run: Run,
    outcome: Outcome,
    judged: Mapping[str, tuple[EncodedSplit, list[Answer]]],
    finishing: Finishing | None,
) -> None:
    """Write the host, the inlays and the report; the checkpoint goes last, when nothing depends on it any more."""
    if job.settings.mode in ("mt-a", "full"):
        if any(each.name for each in job.jobs.values()):
            activate(job.host, None)  # the labels that the host's config shows are its own again
        first = next(iter(job.jobs.values()))
        save_host(job.host, first.codec.tokenizer, run)
        run.note(files=files_of(run))
        job.host.config.name_or_path = str(run.host.absolute())  # the inlays' host from now on
    tasks = run.record()["tasks"]
    for name, each in job.jobs.items():
        split, answers = judged[name]
        scores = each.codec.measure(split, answers)
        if each.name is not None:
            folder, data = run.inlay_of(name), manifest_data(each.codec)
            save(job.host, each.name, folder, task=each.prepared.task.name, metrics=scores, data=data)
            tasks[name]["inlay_sha256"] = read_manifest(folder).sha256
        validation = {n.removeprefix(f"{name}/"): v for n, v in outcome.scores.items() if n.startswith(f"{name}/")}
        best_step = outcome.best_steps.get(name, outcome.best_step)
        tasks[name] |= {"judged": each.prepared.judge, "scores": scores, "validation": validation}
        tasks[name] |= {"best_step": best_step}
    run.note(tasks=tasks, **training_facts(outcome))
    write_joint_report(run, {name: each.prepared.task for name, each in job.jobs.items()}, judged)
    if finishing is not None:
        for name, each in job.jobs.items():
            finishing(each, *judged[name])
    run.note(status="finished")
    run.checkpoint.unlink(missing_ok=True)


def get_ready_jointly(
    settings: JointSettings, allowed: Allowed = Allowed(), *, resume: bool = False  # noqa: B008 (frozen)
) -> JointJob:  # fmt: skip
    """Read the rows of every task, open the host, set in what trains. Nothing is written."""
    use_threads(settings.threads)
    settings = _begun_from_a_run(settings)
    found = _checked(settings, allowed, resume)
    torch.manual_seed(settings.seed)
    tasks = {name: each.prepared.task for name, each in found.tasks.items()}
    first = next(iter(tasks.values()))
    bench = Workbench.open(settings.host, first, found.config, trust_remote_code=allowed.trust_remote_code)
    text = bench.form == "text"
    benches = {name: bench.for_task(task) for name, task in tasks.items()}
    names = {name: _set_up(benches[name], name, each, settings.mode) for name, each in found.tasks.items()}
    _let_train(bench.host, [name for name in names.values() if name is not None], settings.mode)
    kind: Any = next(iter(found.tasks.values())).method or single_mode(settings.mode)
    resolved = filled(settings, kind, text=text).model_dump(include={"lr", "epochs"})
    if settings.mode == "mt-a" and settings.host_lr is None:
        resolved["host_lr"] = MODE_RATES["full"][text]
    settings = settings.model_copy(update=resolved)
    jobs = {}
    for name, each in found.tasks.items():
        own = each.settings.model_copy(
            update={"lr": settings.lr, "epochs": settings.epochs, "name": names[name]}
            | ({} if each.method is None else {"method": each.method.kind})
        )
        codec = codec_for(benches[name], own, each.prepared)
        if text:
            own, codec = with_room(bench.host, own, codec, each.prepared)
        jobs[name] = Job(own, with_unwritable(codec, each.prepared), bench.host, codec, names[name])
    return JointJob(settings, bench.host, jobs, found.sampling)


def _set_up(bench: Workbench, name: str, found: _FoundTask, mode: str) -> str | None:
    """Set what a task has of its own into the host; returns its name, if there is anything."""
    own = found.settings
    head = None if bench.form != "labels" else bench.head(own.head_layers, own.head_dropout, own.pooling)
    if mode == "full" and head is None:
        return None
    kind: Any = "inlay" if found.method is not None else "head"
    return bench.set_up(name, kind, method=found.method, head=head, norms=norms_of(own))


def _let_train(host: PreTrainedModel, names: list[str], mode: str) -> None:
    """All inlays, and the host where the mode says so."""
    if not names:
        host.requires_grad_(True).train()
        return
    train(host, names[0], host_too=mode in ("mt-a", "full"))
    for name in names:
        inlays_of(host)[name].requires_grad_(True)


def _begun_from_a_run(settings: JointSettings) -> JointSettings:
    """With a run as the host: the host that it trained."""
    folder = Path(settings.host)
    if not (folder / RECORD).is_file():
        return settings
    run = Run(folder)
    if run.record().get("status") != "finished" or not run.host.is_dir():
        raise ConfigError(
            f"the host {folder} is a run that left no trained host: its mode is {run.record().get('mode')}. "
            f"Use its own host {run.record().get('host')}."
        )
    return settings.model_copy(update={"host": str(run.host)})


@dataclass(frozen=True)
class _FoundTask:
    """What the settings of one task name, looked up."""

    settings: Settings
    method: Method | None
    prepared: Prepared


@dataclass(frozen=True)
class _Found:
    tasks: Mapping[str, _FoundTask]
    sampling: Sampling
    config: PreTrainedConfig


def _checked(settings: JointSettings, allowed: Allowed, resume: bool) -> _Found:
    """Every task's settings, method and rows, the draws and the host's config; all that is wrong is said at once."""
    problems = Problems()
    problems.add(_wrong_names(settings))
    sampling = problems.attempt(settings.drawing)
    config = problems.attempt(lambda: open_config(settings.host, trust_remote_code=allowed.trust_remote_code))
    problems.attempt(lambda: check_trackers(settings.trackers))
    tasks = {name: _found_task(problems, settings, name, own, config) for name, own in dict(settings.tasks).items()}
    found = {name: task for name, task in tasks.items() if task is not None}
    unjudged = [name for name, each in found.items() if not each.prepared.validation]
    if unjudged and len(unjudged) < len(found):
        problems.add(
            [f"{', '.join(unjudged)}: no validation rows, but the others have some. Give them to all tasks or to none."]
        )
    problems.add(_conflicts({name: each.prepared.task for name, each in found.items()}))
    if not resume:
        problems.add(settings.of_no_use() + _unused(settings, found, config))
    problems.refuse()
    assert sampling is not None
    assert config is not None
    return _Found(found, sampling, config)


def _wrong_names(settings: JointSettings) -> list[str]:
    """What is wrong with the names of the tasks."""
    names = [name for name, _ in settings.tasks]
    found = [f"the task {name!r} is there twice." for name in dict.fromkeys(names) if names.count(name) > 1]
    found += [f"{name!r} cannot be the name of a task: {NAMES_HAVE}." for name in names if not NAME.fullmatch(name)]
    if not names:
        found.append("no tasks: name at least one.")
    if settings.stop_on not in (MEAN, *names):
        found.append(f"`stop_on` is {settings.stop_on!r}; it is {MEAN} or one of the tasks {', '.join(names)}.")
    return found


def _found_task(
    problems: Problems, settings: JointSettings, name: str, own: Mapping[str, Any], config: PreTrainedConfig | None
) -> _FoundTask | None:
    """One task's settings, method and rows; None if they cannot be had."""
    mine = problems.attempt(lambda: settings.task_settings(name, own))
    if mine is None:
        return None
    prefix = f"{name}: "
    method = problems.attempt(lambda: method_of(mine), prefix)
    prepared = problems.attempt(lambda: few_to_validate(prepare(mine), mine.eval_rows), prefix)
    if prepared is None:
        return None
    problems.attempt(lambda: mine.selected(dict.fromkeys(prepared.task.metrics, 0.0)), prefix)
    if config is not None:
        problems.attempt(lambda: answer_form(prepared.task, config), prefix)
    return _FoundTask(mine, method, prepared)


def _conflicts(tasks: Mapping[str, Task]) -> list[str]:
    """Tasks of one name that do not mean the same: other labels than the built-in one's, or than each other's."""
    found = []
    by_name: dict[str, str] = {}
    for name, task in tasks.items():
        known = builtin_tasks().get(task.name)
        if known is not None and known.labels and set(known.labels) != set(task.labels):
            found.append(
                f"{name}: {task.name!r} is a built-in task with the labels {', '.join(known.labels)}, but its rows "
                f"have {', '.join(task.labels) or 'none'}. Give it another name."
            )
        first = by_name.setdefault(task.name, name)
        if set(tasks[first].labels) != set(task.labels):
            found.append(
                f"{first} and {name} are both called {task.name!r}, but one has the labels "
                f"{', '.join(tasks[first].labels)} and the other {', '.join(task.labels)}. Give each its own name."
            )
    return found


def _unused(settings: JointSettings, found: Mapping[str, _FoundTask], config: PreTrainedConfig | None) -> list[str]:
    """What was said of a task and it does not use; what was said of all and none of them uses."""
    own, said = dict(settings.tasks), given_to_all(settings)
    told, idle = [], []
    for name, each in found.items():
        form = answer_form(each.prepared.task, config) if config is not None else "labels"
        decoder = config is not None and is_decoder(config)
        nothing = useless(each.settings) | useless_here(each.settings, each.prepared.task.kind, form, decoder)
        told += [f"{name}: {sentence}" for setting, sentence in nothing.items() if setting in own[name]]
        idle.append(nothing)
    for setting in said:
        if idle and all(setting in nothing for nothing in idle):
            told.append(idle[0][setting])
    return told


def joint_settings_to_record(settings: JointSettings) -> dict[str, Any]:
    """Every setting, with paths that hold from any folder."""
    found = settings_to_record(settings)
    found["tasks"] = {name: _lasting_own(own) for name, own in dict(settings.tasks).items()}
    return found


def _lasting_own(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: str(Path(value).absolute()) if name in PATHS and value is not None else value
        for name, value in own.items()
    }
