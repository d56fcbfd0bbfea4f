"""A job from its settings to its run folder: locked, noted as it goes, and whole or to be resumed at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate import Accelerator

from inlay.errors import ConfigError
from inlay.runs.allowed import Allowed
from inlay.runs.folder import Run
from inlay.runs.job import Finishing
from inlay.runs.ready import check_trackers
from inlay.runs.settings import Settings
from inlay.training.interrupt import Interrupted
from inlay.training.loop import Diverged, accelerator_for
from inlay.training.progress import Silent, Watcher


@dataclass(frozen=True)
class Course:
    """Where a job is trained, with what, and who is told of it."""

    run: Run
    accelerator: Accelerator
    watch: Watcher
    finish: bool = False
    """Train no further, and write the best state so far as the result."""
    finishing: Finishing | None = None
    """Is called with the result before the run is noted as finished."""


class Work(Protocol):
    """A job of one task or of several, ready before its first step."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def facts(self) -> dict[str, Any]: ...

    def check_same(self, begun: dict[str, Any], facts: dict[str, Any], allowed: Allowed) -> None: ...

    def learn(self, course: Course) -> None:
        """Train, and write the result."""


def carry_out(
    settings: Settings,
    ready: Callable[..., Work],
    *,
    resume: bool,
    finish: bool,
    watch: Watcher | None,
    allowed: Allowed,
    finishing: Finishing | None = None,
) -> Run:
    """A job from its settings to its run folder: locked, noted as it goes, and whole or to be resumed at any moment."""
    watch = watch or Silent()
    run = Run(settings.out)
    check_trackers(settings.trackers)
    accelerator = accelerator_for(settings, settings.trackers, settings.out)
    if not accelerator.is_main_process:
        ready(settings, allowed, resume=resume).learn(Course(run, accelerator, Silent(), finish))
        return run
    with run.locked(fresh=not resume):
        if resume and run.record().get("status") == "finished":
            raise ConfigError(f"{run.folder} is finished. Look at it with: inlay inspect {run.folder}")
        if finish and not run.checkpoint.exists():
            raise ConfigError(f"{run.folder} has no checkpoint yet, so there is nothing to finish with.")
        job = ready(settings, allowed, resume=resume)
        facts = job.facts() | {"processes": accelerator.num_processes}
        if resume:
            job.check_same(run.record(), facts, allowed)
        run.note(status="running", **facts)
        run.write_config(facts["settings"])
        for note in job.notes:
            watch.say(note)
        try:
            job.learn(Course(run, accelerator, watch, finish, finishing))
        except Interrupted:
            run.note(status="interrupted")
            raise
        except Diverged as error:
            run.note(status="diverged")
            if error.best_step is None or not run.checkpoint.exists():
                raise
            raise error.with_hint(f"To take that state as the result: inlay finish {run.folder}") from None
    return run
