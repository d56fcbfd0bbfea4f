"""The loop: one readable path from batches to the best state, on accelerate.

A step's gradient is that of the mean loss over its rows, however they are shared out over processes and portions:

    for each step:                                   rows of one batch of like length
        for each portion of this process's rows:     loss = Σ rows' losses / all the step's rows + penalty
        clip, AdamW, next learning rate
    at each evaluation: metrics, best state kept, checkpoint; the best state is restored at the end
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.errors import ConfigError, InlayError
from inlay.training.batching import padding_share, portion, training_batches
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.evaluate import ask, loss_on
from inlay.training.interrupt import Interrupted, Interrupts
from inlay.training.objectives import Objective, Portion, plain_loss
from inlay.training.progress import Silent, Watcher, counter
from inlay.training.recipe import Recipe
from inlay.training.state import Learned, Position, load_state, random_state, save_state

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

    @classmethod
    def told(cls, message: str) -> Diverged:
        """With another message."""
        error = cls(0, "", None)
        error.args = (message,)
        return error


@dataclass
class Outcome:
    """How a training run went."""

    scores: dict[str, float]
    """Of the validation rows at the best evaluation."""
    best_step: int
    steps: int
    seconds: float
    examples_per_second: float
    padding: float
    """Share of all training positions that was padding, in the first epoch."""
    history: list[Entry] = field(default_factory=list)
    """One entry per evaluation."""
    answers: list[Answer] | None = None
    """To the validation rows at the best evaluation, if it was in this process."""


@dataclass(eq=False, repr=False)
class TrainingLoop:
    """Trains whatever requires gradients; after `run` the host holds the state that was best on the validation rows."""

    host: PreTrainedModel
    codec: Codec
    train: EncodedSplit
    validation: EncodedSplit
    recipe: Recipe
    _: KW_ONLY
    objective: Objective = plain_loss
    """The loss of a step's portion."""
    accelerator: Accelerator = None
    """Without it, one that fits the recipe."""
    checkpoint: Path | None = None
    """The run is saved there as it goes, and goes on from there if the file exists."""
    log: Callable[[Entry], None] | None = None
    """Is given one entry per evaluation."""
    rewind: Callable[[int], None] | None = None
    """Is told the step that training goes on from, before the first one."""
    watch: Watcher = field(default_factory=Silent)
    title: str = "train"
    finish_now: bool = False
    """Train no further than the checkpoint."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        if recipe.lr is None or recipe.epochs is None:
            raise ConfigError(
                "this recipe is not complete: lr and epochs are open. Use inlay.training.recipe.filled(recipe, kind)."
            )
        check_batch(len(self.train.features), recipe)
        self.accelerator = self.accelerator or accelerator_for(recipe)
        self.lengths = self.train.features.lengths
        self.steps_per_epoch = math.ceil(len(self.train.features) / recipe.batch_size)
        whole = recipe.epochs * self.steps_per_epoch
        self.total_steps = min(recipe.max_steps or whole, whole)
        self.learned = Learned(self.host)
        if not self.learned.now:
            raise ConfigError(
                "nothing to train: no parameter of the host requires a gradient. Call inlay.train(host, name) first."
            )
        self.model, self.optimizer = self.accelerator.prepare(self.host, adamw(self.learned.now, recipe))
        self.position = Position()
        self.history: list[Entry] = []
        self.seen_rows = 0
        self.best_answers: list[Answer] | None = None

    def run(self) -> Outcome:
        self._resume()
        began = time.monotonic()
        self.watch.start(self.title, self.position.step, self.total_steps)
        try:
            with Interrupts(alone=self.accelerator.num_processes == 1) as interrupts:
                for rows in self._batches():
                    self._train_step(rows)
                    self._evaluate_and_save_if_due()
                    self._leave_if_asked(interrupts)
            if self.position.loss_steps or not self.learned.best:  # max_steps may end between two evaluations
                self._evaluate()
        finally:
            self.watch.stop()
        self.learned.restore()
        self.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return self._outcome(time.monotonic() - began)

    def _resume(self) -> None:
        """The first step of a new run, or where the checkpoint left off."""
        process = self.accelerator.process_index
        torch.manual_seed(self.recipe.seed + 1_000 * process)
        if self.checkpoint is not None and self.checkpoint.exists():
            self.position = load_state(self.checkpoint, self.learned, self.optimizer.optimizer, process)
        self.position.stopped |= self.finish_now
        if self.rewind is not None and self.accelerator.is_main_process:
            self.rewind(self.position.step)

    def _batches(self) -> Iterator[list[int]]:
        """The batches still to come. The position moves on before a batch is handed out: a save after it is right."""
        at = self.position
        while at.step < self.total_steps and not at.stopped:
            batches = self._batches_of(at.epoch)
            for rows in batches[at.batch :]:
                at.step, at.batch = at.step + 1, at.batch + 1
                if at.batch == len(batches):
                    at.epoch, at.batch = at.epoch + 1, 0
                yield rows
                if at.step >= self.total_steps or at.stopped:
                    return

    def _batches_of(self, epoch: int) -> list[list[int]]:
        return training_batches(self.lengths, self.recipe.batch_size, self.recipe.seed, epoch)

    def _train_step(self, rows: list[int]) -> None:
        """One step of the optimizer over the rows of one batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        portions = self._portions(rows)
        step_loss = 0.0
        for i, (mine, row_weight) in enumerate(portions):
            last = i == len(portions) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                batch = {name: t.to(self.accelerator.device) for name, t in self.train.features.collate(mine).items()}
                loss = self.objective(self.model, self.host, self.codec, Portion(batch, row_weight, 1 / len(portions)))
                self.accelerator.backward(loss)
            step_loss += float(loss.detach())
        self._check_finite(math.isfinite(step_loss), f"the loss is {step_loss}")
        if self.recipe.clip:
            self.accelerator.clip_grad_norm_(self.learned.now.values(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen_rows += len(rows)
        self.position.loss_sum += step_loss
        self.position.loss_steps += 1
        self.watch.step(self.position.step, step_loss, self._best_so_far())

    def _check_finite(self, fine: bool, seen: str) -> None:
        """Stop before a number that is not finite gets into what is kept; all processes stop at the same step."""
        if self.accelerator.num_processes > 1:
            fine = min(gather_object([fine]))
        if not fine:
            best = self.position.best_step if self.learned.best else None
            raise Diverged(self.position.step, seen, best)

    def _portions(self, rows: list[int]) -> list[tuple[list[int], float]]:
        """This process's rows of a batch in `accumulate` portions, each with what one of its rows counts."""
        world = self.accelerator.num_processes
        mine = portion(rows, self.accelerator.process_index, world)
        if not mine:
            return [(rows[:1], 0.0)]  # fewer rows than processes: take part, and count for nothing
        weight = world / self.train.features.weights(rows)  # the processes' gradients are averaged
        parts = [portion(mine, i, self.recipe.accumulate) for i in range(self.recipe.accumulate)]
        return [(part, weight) for part in parts if part]

    def _lr(self) -> float:
        return rate_at(self.position.step - 1, self.total_steps, self.recipe)

    def _best_so_far(self) -> str:
        best, loss = self.position.best, self.position.best_loss
        if loss is not None:
            return f"validation loss {loss:.3f}"
        name = self.recipe.select or self.codec.task.main
        return f"{name} {best:.3f}" if best is not None and math.isfinite(best) else ""

    def _evaluate_and_save_if_due(self) -> None:
        if self.position.step % (self.recipe.eval_every or self.steps_per_epoch) == 0:
            self._evaluate()
            self._save()
        elif self.position.step % self.recipe.save_every == 0:
            self._save()

    def _evaluate(self) -> None:
        """Measure, log, keep the best state, and stop early where patience has run out."""
        self._check_finite(self.learned.is_finite(), "the trained weights are not finite")
        at, answers = self.position, self._answers()
        scores = self.codec.measure(self.validation, answers)
        _, value = self.recipe.selected(scores)
        silent = self.codec.says_nothing(value, answers)
        judged = loss_on(self.host, self.codec, self.validation, self.accelerator) if silent else None
        loss = torch.tensor(at.loss_sum / at.loss_steps if at.loss_steps else math.nan, device=self.accelerator.device)
        at.loss_sum, at.loss_steps = 0.0, 0
        self._log(
            {
                "step": at.step,
                "epoch": at.step / self.steps_per_epoch,
                "loss": float(self.accelerator.reduce(loss, "mean")),
                "lr": self._lr(),
                **{f"validation_{name}": score for name, score in scores.items()},
                **({"validation_loss": judged} if judged is not None else {}),
            }
        )
        if self._is_better(value, judged):
            at.best, at.best_loss, at.waited = (-math.inf if silent else value), judged, 0
            at.best_step, at.best_scores = at.step, scores
            self.learned.keep()
            self.best_answers = answers
        else:
            at.waited += 1
        at.stopped = bool(self.recipe.patience) and at.waited >= self.recipe.patience

    def _is_better(self, value: float, loss: float | None) -> bool:
        """Whether a state beats the best one: by its metric, or, while that says nothing, by its loss."""
        at = self.position
        if at.best is None or loss is None:
            return at.best is None or value > at.best
        return at.best == -math.inf and (at.best_loss is None or loss < at.best_loss)

    def _answers(self) -> list[Answer]:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # asking leaves no trace in the random numbers of training
            count = counter(self.watch, len(self.validation.examples))
            return ask(self.host, self.codec, self.validation, accelerator=self.accelerator, watch=count)

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
        padding = padding_share(self.lengths, self._batches_of(epoch=0))
        speed = self.seen_rows / max(seconds, 1e-9)
        return Outcome(at.best_scores, at.best_step, at.step, seconds, speed, padding, self.history, self.best_answers)


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


def check_batch(rows: int, recipe: Recipe) -> None:
    if rows < recipe.batch_size:
        raise ConfigError(
            f"{rows} training rows are fewer than a batch of {recipe.batch_size}; use a smaller `batch_size`."
        )


def rate_at(step: int, total: int, recipe: Recipe) -> float:
    """The schedule: the learning rate of a step, counted from 0. It rises linearly, then does as `schedule` says."""
    assert recipe.lr is not None
    rise = recipe.warmup_steps(total)
    if step < rise:
        return recipe.lr * (step + 1) / rise
    left = max(0.0, (total - step) / max(1, total - rise))  # 1 when it begins to fall, 0 at the end
    return recipe.lr * {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}[recipe.schedule]


def adamw(learned: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay for matrices only, and not for those that `no_decay` names."""
    assert recipe.lr is not None
    decay, none = list[Tensor](), list[Tensor]()
    for name, parameter in learned.items():
        free = parameter.dim() <= 1 or any(fnmatchcase(name, pattern) for pattern in recipe.no_decay)
        (none if free else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": none, "weight_decay": 0.0}]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
