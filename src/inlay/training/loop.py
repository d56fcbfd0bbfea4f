"""The loop: one readable path from batches to the best state, on accelerate, for one task or for several.

A step's gradient is that of the mean loss over its rows, however they are shared out over processes and portions:

    heads first, where the recipe says so
    for each step:                                   rows of one batch of like length
        for each portion of this process's rows:     loss = Σ rows' losses / all the step's rows + penalty
        clip, AdamW, next learning rate
    at each evaluation: metrics, best state kept, checkpoint; the best state is restored at the end

`Loop` is that path; `TrainingLoop` walks it with one task, `JointLoop` (joint.py) with several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor
from transformers import PreTrainedModel

from inlay.errors import ConfigError, InlayError
from inlay.host.recompute import checkpoint_layers
from inlay.training.batching import Batch, Batches, OneTask, by_task, portion
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.evaluate import ask, loss_on
from inlay.training.head_first import fit_head
from inlay.training.interrupt import Interrupted, Interrupts
from inlay.training.lesson import Lesson
from inlay.training.objectives import Objective, Portion, plain_loss
from inlay.training.optimizer import adamw, rate_at
from inlay.training.progress import Silent, Watcher, counter
from inlay.training.recipe import Recipe
from inlay.training.state import Learned, Position, Standing, load_state, random_state, save_state, together
from inlay.training.tokens import on_device

Entry = dict[str, float]
"""What is logged of one evaluation: step, epoch, loss, lr and validation_<metric>."""


class Diverged(InlayError):
    """Training met a number that is not finite. The last checkpoint still holds the best state so far."""

    def __init__(self, step: int, seen: str, best_step: int | None) -> None:
        kept = (
            "nothing was learned before"
            if best_step is None
            else f"the best state so far is that of step {best_step:,}"
        )
        super().__init__(
            f"training has diverged: {seen} at step {step:,}; {kept}. Use a smaller learning rate (`lr`), more "
            f"`warmup`, and look for targets that are far too large."
        )
        self.best_step = best_step

    def with_hint(self, hint: str) -> Diverged:
        """The same with another line at the end of its message."""
        self.args = (f"{self}\n{hint}",)
        return self


@dataclass
class Outcome:
    """How a training run went."""

    scores: dict[str, float]
    """Of the validation rows at the best evaluation; of several tasks as <task>/<metric>."""
    best_step: int
    steps: int
    seconds: float
    examples_per_second: float
    padding: float
    """Share of all training positions that was padding, in the first epoch."""
    history: list[Entry] = field(default_factory=list)
    """One entry per evaluation."""
    answers_of: dict[str, list[Answer]] = field(default_factory=dict)
    """Each task's, to the validation rows at the best evaluation, if it was in this process."""
    best_steps: dict[str, int] = field(default_factory=dict)
    """The step of each task's best state, where tasks share nothing."""

    @property
    def answers(self) -> list[Answer] | None:
        """Of the only task."""
        return next(iter(self.answers_of.values()), None)


@dataclass(eq=False, repr=False)
class Loop:
    """Trains whatever requires gradients; after `run` the host holds the state that was best on the validation rows.

    `TrainingLoop` and `JointLoop` say what is learned from: the recipe, the lessons and the batches of an epoch.
    """

    host: PreTrainedModel
    _: KW_ONLY
    accelerator: Accelerator = None
    """Without it, one that fits the recipe."""
    checkpoint: Path | None = None
    """The run is saved there as it goes, and goes on from there if the file exists."""
    log: Callable[[Entry], None] | None = None
    """Is given one entry per evaluation."""
    rewind: Callable[[int], None] | None = None
    """Is told the step that training goes on from, before the first one; -1: from the very beginning."""
    watch: Watcher = field(default_factory=Silent)
    title: str = "train"
    finish_now: bool = False
    """Train no further than the checkpoint."""

    def prepare(self, recipe: Recipe, lessons: Sequence[Lesson], batches: Batches) -> None:
        """Ready for the first step."""
        assert recipe.epochs is not None
        self.recipe, self.lessons, self.batches = recipe, list(lessons), batches
        self.accelerator = self.accelerator or accelerator_for(recipe)
        if recipe.gradient_checkpointing:
            checkpoint_layers(self.host)
        whole = recipe.epochs * batches.steps
        self.total_steps = min(recipe.max_steps or whole, whole)
        self.learned = Learned(self.host)
        if not self.learned.now:
            raise ConfigError(
                "nothing to train: no parameter of the host requires a gradient. Call inlay.train(host, name) first."
            )
        self.model, self.optimizer = self.accelerator.prepare(self.host, self.make_optimizer())
        self.position = Position()
        self.history: list[Entry] = []
        self.seen_rows = 0
        self.best_answers: dict[str, list[Answer]] = {}

    def run(self) -> Outcome:
        self._resume()
        began = time.monotonic()
        self.watch.start(self.title, self.position.step, self.total_steps)
        try:
            with Interrupts(alone=self.accelerator.num_processes == 1) as interrupts:
                self._fit_heads()
                for batch in self._batches():
                    self._train_step(batch)
                    self._evaluate_and_save_if_due()
                    self._leave_if_asked(interrupts)
            if self.position.loss_steps or not self.learned.best:  # max_steps may end between two evaluations
                self._evaluate()
        finally:
            self.watch.stop()
        self.learned.restore()
        self.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return self._outcome(time.monotonic() - began)

    # what several tasks do in another way

    def make_optimizer(self) -> torch.optim.AdamW:
        return adamw(self.learned.now, self.recipe)

    def shares_of(self, rows: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """The weight of each task of a batch in the step's loss."""
        return dict.fromkeys(rows, 1.0)

    def passes(self, rows: dict[int, list[int]]) -> list[dict[int, list[int]]]:
        """The rows of a portion as they are run, one pass after the other."""
        return [rows]

    def loss_of(self, rows: Mapping[int, list[int]], weights: Mapping[int, float], step_share: float) -> Tensor:
        """The loss of one pass over the rows of each task; `weights` are those of a single row of each."""
        ((task, mine),) = rows.items()
        return self.lesson_loss(self.lessons[task], mine, weights[task], step_share)

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.learned.now.values(), self.recipe.clip)

    def deciding(self) -> list[Lesson]:
        """The tasks that choose the best state and stop early."""
        return self.lessons

    def keep_best(self, standings: Mapping[str, Standing], better: bool) -> list[Lesson]:
        """Keep the best state; returns the lessons that are kept as they are now."""
        if better:
            self.learned.keep()
        return self.lessons if better else []

    # steps

    def _fit_heads(self) -> None:
        """Fit new heads before the first step, if the recipe says so; their score is the first one to beat."""
        if not self.recipe.head_first or self.position.step or self.position.stopped:
            return
        for lesson in self.lessons:
            lesson.enter()
            if fit_head(self.host, lesson.codec, lesson.train, lesson.validation):
                self.position.loss_sum += loss_on(self.host, lesson.codec, lesson.train, self.accelerator)
                self.position.loss_steps += 1
        if self.position.loss_steps:
            self._evaluate()

    def _resume(self) -> None:
        """The first step of a new run, or where the checkpoint left off."""
        process = self.accelerator.process_index
        torch.manual_seed(self.recipe.seed + 1_000 * process)
        begun = self.checkpoint is not None and self.checkpoint.exists()
        if begun and self.checkpoint is not None:
            self.position = load_state(self.checkpoint, self.learned, self.optimizer.optimizer, process)
            self.batches.restore(self.position.streams, self.learned.more)
        self.position.stopped |= self.finish_now
        if self.rewind is not None and self.accelerator.is_main_process:
            self.rewind(self.position.step if begun else -1)

    def _batches(self) -> Iterator[Batch]:
        """The remaining batches. The position advances before one is handed out, so that a save after it is right."""
        at = self.position
        while at.step < self.total_steps and not at.stopped:
            batches = self.batches.epoch(at.epoch)
            for batch in batches[at.batch :]:
                at.step, at.batch = at.step + 1, at.batch + 1
                if at.batch == len(batches):
                    at.epoch, at.batch = at.epoch + 1, 0
                yield batch
                if at.step >= self.total_steps or at.stopped:
                    return

    def _train_step(self, batch: Batch) -> None:
        """One step of the optimizer over the rows of one batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr() * group.get("share", 1.0)
        portions, shares = self._portions(batch), self.shares_of(by_task(batch))
        step_loss = 0.0
        for i, (rows, weights) in enumerate(portions):
            last = i == len(portions) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self.loss_of(rows, weights, _step_share([each for each, _ in portions], rows, shares))
                self.accelerator.backward(loss)
            step_loss += float(loss.detach())
        self._check_finite(math.isfinite(step_loss), f"the loss is {step_loss}")
        if self.recipe.clip:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen_rows += len(batch)
        self.position.loss_sum += step_loss
        self.position.loss_steps += 1
        self.watch.step(self.position.step, step_loss, self._best_so_far())

    def lesson_loss(self, lesson: Lesson, rows: list[int], row_weight: float, step_share: float) -> Tensor:
        """The loss of some rows of one task."""
        lesson.enter()
        batch = on_device(lesson.train.features.collate(rows), self.accelerator.device)
        return lesson.objective(self.model, self.host, lesson.codec, Portion(batch, row_weight, step_share))

    def _check_finite(self, fine: bool, seen: str) -> None:
        """Stop before a number that is not finite is saved or kept; all processes stop at the same step."""
        if self.accelerator.num_processes > 1:
            fine = min(gather_object([fine]))
        if not fine:
            best = self.position.best_step if self.learned.best else None
            raise Diverged(self.position.step, seen, best)

    def _portions(self, batch: Batch) -> list[tuple[dict[int, list[int]], dict[int, float]]]:
        """This process's rows of a batch in `accumulate` portions, each with the weight of a row of each task."""
        world = self.accelerator.num_processes
        mine = portion(batch, self.accelerator.process_index, world)
        if not mine:
            first = by_task(batch[:1])
            return [(first, dict.fromkeys(first, 0.0))]  # fewer rows than processes: take part, and count for nothing
        whole = by_task(batch)
        shares = self.shares_of(whole)
        counts = {task: self.lessons[task].train.features.weights(rows) for task, rows in whole.items()}
        weights = {task: world * shares[task] / counts[task] for task in whole}  # processes' gradients are averaged
        parts = [portion(mine, i, self.recipe.accumulate) for i in range(self.recipe.accumulate)]
        return [(rows, weights) for part in parts if part for rows in self.passes(by_task(part))]

    def _lr(self) -> float:
        return rate_at(self.position.step - 1, self.total_steps, self.recipe)

    def _best_so_far(self) -> str:
        best, loss = self.position.best if self._judges() else None, self.position.best_loss
        if loss is not None:
            return f"validation loss {loss:.3f}"
        first = self.lessons[0]
        name = "best" if len(self.lessons) > 1 else self.recipe.select or first.codec.task.main
        return f"{name} {abs(best):.3f}" if best is not None and math.isfinite(best) else ""

    # evaluation

    def _evaluate_and_save_if_due(self) -> None:
        if self.position.step % (self.recipe.eval_every or self.batches.steps) == 0:
            self._evaluate()
            self._save()
        elif self.position.step % self.recipe.save_every == 0:
            self._save()

    def _evaluate(self) -> None:
        """Measure, log, keep the best state, and stop early where patience has run out."""
        self._check_finite(self.learned.is_finite(), "the trained weights are not finite")
        if not self._judges():
            self._keep_latest()
            return
        answers = self._answers()
        scores = {lesson.name: lesson.codec.measure(lesson.validation, answers[lesson.name]) for lesson in self.lessons}
        values = {lesson.name: lesson.recipe.selected(scores[lesson.name])[1] for lesson in self.lessons}
        quiet = [
            lesson for lesson in self.lessons
            if lesson.codec.says_nothing(values[lesson.name], answers[lesson.name])
        ]  # fmt: skip
        standings = {lesson.name: Standing(values[lesson.name]) for lesson in self.lessons}
        losses = {lesson: self._validation_loss(lesson) for lesson in self.judged_by_loss(quiet)}
        standings |= {lesson.name: Standing.of_loss(loss) for lesson, loss in losses.items()}
        whole = together([standings[lesson.name] for lesson in self.deciding()])
        logged = {f"{lesson.prefix}validation_loss": loss for lesson, loss in losses.items()}
        logged |= {} if whole.loss is None else {"validation_loss": whole.loss}
        self._log(self._entry(scores, values) | logged)
        for lesson in self._keep_if_better(whole, standings):
            self.position.best_scores |= {lesson.prefix + name: x for name, x in scores[lesson.name].items()}
            self.best_answers[lesson.name] = answers[lesson.name]

    def _keep_if_better(self, whole: Standing, standings: Mapping[str, Standing]) -> list[Lesson]:
        """Keep what is better than before, and stop where nothing has been for long; returns the lessons that are kept.

        whole: how good this state is for all deciding tasks together.
        """
        at = self.position
        better = whole.beats(None if at.best is None else Standing(at.best, at.best_loss))
        if better:
            at.best, at.best_loss, at.best_step = whole.value, whole.loss, at.step
        kept = self.keep_best(standings, better)
        at.waited = 0 if any(lesson in kept for lesson in self.deciding()) else at.waited + 1
        at.stopped = bool(self.recipe.patience) and at.waited >= self.recipe.patience
        return kept

    def _judges(self) -> bool:
        """Whether there are validation rows, which choose the best state."""
        return any(lesson.validation.examples for lesson in self.lessons)

    def _keep_latest(self) -> None:
        """Log, and keep this state: without validation rows later is better."""
        self._log(self._entry({lesson.name: {} for lesson in self.lessons}, {}))
        self.position.best, self.position.best_step = float(self.position.step), self.position.step
        self.learned.keep()

    def judged_by_loss(self, quiet: Sequence[Lesson]) -> Sequence[Lesson]:
        """The tasks whose validation loss is measured, given those whose metric says nothing."""
        return self.deciding() if all(lesson in quiet for lesson in self.deciding()) else []

    def _validation_loss(self, lesson: Lesson) -> float:
        lesson.enter()
        return loss_on(self.host, lesson.codec, lesson.validation, self.accelerator)

    def _answers(self) -> dict[str, list[Answer]]:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        found = {}
        with torch.random.fork_rng(devices):  # asking leaves no trace in the random numbers of training
            count = counter(self.watch, sum(len(lesson.validation.examples) for lesson in self.lessons))
            for lesson in self.lessons:
                lesson.enter()
                rows = lesson.validation
                found[lesson.name] = ask(self.host, lesson.codec, rows, accelerator=self.accelerator, watch=count)
        return found

    def _entry(self, scores: Mapping[str, Mapping[str, float]], values: Mapping[str, float]) -> Entry:
        """What is logged of an evaluation; with several tasks each metric has its task's name in front."""
        at = self.position
        loss = torch.tensor(at.loss_sum / at.loss_steps if at.loss_steps else math.nan, device=self.accelerator.device)
        at.loss_sum, at.loss_steps = 0.0, 0
        entry = {
            "step": at.step,
            "epoch": at.step / self.batches.steps,
            "loss": float(self.accelerator.reduce(loss, "mean")),
            "lr": self._lr() if at.step else 0.0,
        }
        for lesson in self.lessons:
            entry |= {f"{lesson.prefix}validation_{name}": score for name, score in scores[lesson.name].items()}
        return entry

    def _log(self, entry: Entry) -> None:
        self.history.append(entry)
        if self.log is not None and self.accelerator.is_main_process:
            self.log(entry)
        if self.accelerator.trackers:
            values = {name: value for name, value in entry.items() if name != "step"}
            self.accelerator.log(values, step=self.position.step)

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        self._check_finite(self.learned.is_finite(), "the trained weights are not finite")
        states = gather_object([random_state()]) if self.accelerator.num_processes > 1 else [random_state()]
        if self.accelerator.is_main_process:
            self.position.streams, self.learned.more = self.batches.state(begun=self.position.batch > 0)
            save_state(self.checkpoint, self.position, self.learned, self.optimizer.optimizer, states)

    def _leave_if_asked(self, interrupts: Interrupts) -> None:
        number = interrupts.seen or 0
        if self.accelerator.num_processes > 1:  # all processes leave at the same step
            number = max(gather_object([number]))
        if number:
            self._save()
            raise Interrupted(number)

    def _outcome(self, seconds: float) -> Outcome:
        at = self.position
        speed = self.seen_rows / max(seconds, 1e-9)
        return Outcome(
            at.best_scores, at.best_step, at.step, seconds, speed, self.batches.padding(), self.history,
            self.best_answers, at.best_steps,
        )  # fmt: skip


@dataclass(eq=False, repr=False)
class TrainingLoop(Loop):
    """Trains on one task; after `run` the host holds the state that was best on the validation rows."""

    codec: Codec
    train: EncodedSplit
    validation: EncodedSplit | None
    """None: nothing chooses among states, and the last one is the result."""
    recipe: Recipe
    _: KW_ONLY
    objective: Objective = plain_loss
    """The loss of a step's portion."""

    def __post_init__(self) -> None:
        check_complete(self.recipe)
        check_batch(len(self.train.features), self.recipe)
        judging = self.validation or EncodedSplit([], self.train.features)
        lesson = Lesson(self.codec.task.name, self.codec, self.train, judging, self.recipe, objective=self.objective)
        batches = OneTask(self.train.features.lengths, self.recipe.batch_size, self.recipe.seed)
        self.prepare(self.recipe, [lesson], batches)


def _step_share(passes: Sequence[Collection[int]], tasks: Collection[int], shares: Mapping[int, float]) -> float:
    """The part of a once-per-step term, such as a penalty, that one pass adds: passes of one task share its part."""
    if len(tasks) > 1:
        return 1 / len(passes)
    (task,) = tasks
    return shares[task] / sum(task in each for each in passes)


def accelerator_for(recipe: Recipe, trackers: tuple[str, ...] = (), folder: Path | None = None) -> Accelerator:
    """accelerate, set up for small parts of a large model: some parameters get no gradient in some steps."""
    if recipe.precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("`precision` fp16 needs a GPU; use bf16 or no.")
    AcceleratorState._reset_state()  # accelerate keeps the first precision of a process; each run has its own
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it processes on CPUs do not find each other
        mixed_precision=recipe.precision,
        log_with=list(trackers) or None,
        project_dir=folder,
        kwargs_handlers=[unused],
    )


def check_complete(recipe: Recipe) -> None:
    if recipe.lr is None or recipe.epochs is None:
        raise ConfigError(
            "this recipe is not complete: lr and epochs are open. Use inlay.training.recipe.filled(recipe, kind)."
        )


def check_batch(rows: int, recipe: Recipe) -> None:
    if rows < recipe.batch_size:
        raise ConfigError(
            f"{rows} training rows are fewer than a batch of {recipe.batch_size}; use a smaller `batch_size`."
        )
