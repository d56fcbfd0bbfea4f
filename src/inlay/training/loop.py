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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.errors import ConfigError
from inlay.training.batching import padding_share, portion, training_batches
from inlay.training.codec import Language, Split
from inlay.training.evaluate import ask
from inlay.training.interrupt import Interrupted, Interrupts
from inlay.training.objectives import Objective, plain_loss
from inlay.training.progress import Silent, Watcher
from inlay.training.recipe import Recipe
from inlay.training.state import Learned, Position, load_state, random_state, save_state, set_random_state

Log = Callable[[dict[str, Any]], None]


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
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation."""


def accelerator_for(recipe: Recipe, trackers: tuple[str, ...] = (), folder: Path | None = None) -> Accelerator:
    """accelerate, set up for small parts of a large model: some parameters get no gradient in some steps."""
    if recipe.precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("precision fp16 needs a GPU; use bf16 or no.")
    AcceleratorState._reset_state()  # accelerate keeps the first precision of a process; each run has its own
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it processes on CPUs do not find each other
        mixed_precision=recipe.precision,
        log_with=list(trackers) or None,
        project_dir=folder,
        kwargs_handlers=[unused],
    )


def fit(
    host: PreTrainedModel,
    language: Language,
    train: Split,
    validation: Split,
    recipe: Recipe,
    *,
    objective: Objective = plain_loss,
    accelerator: Accelerator | None = None,
    checkpoint: Path | None = None,
    log: Log | None = None,
    rewind: Callable[[int], None] | None = None,
    watch: Watcher | None = None,
    title: str = "train",
) -> Outcome:
    """Train whatever requires gradients; at the end the host holds the state that was best on the validation rows.

    checkpoint: the run is saved there as it goes, and goes on from there if the file exists.
    log:        is given one entry per evaluation.
    rewind:     is told the step that training goes on from, before the first one.
    """
    loop = _Loop(
        host, language, train, validation, recipe, objective, accelerator, checkpoint, log, watch or Silent(), title
    )
    loop.start()
    if rewind is not None and loop.accelerator.is_main_process:
        rewind(loop.position.step)
    return loop.run()


class _Loop:
    def __init__(
        self,
        host: PreTrainedModel,
        language: Language,
        train: Split,
        validation: Split,
        recipe: Recipe,
        objective: Objective,
        accelerator: Accelerator | None,
        checkpoint: Path | None,
        log: Log | None,
        watch: Watcher,
        title: str,
    ) -> None:
        if recipe.lr is None or recipe.epochs is None:
            raise ConfigError(
                "this recipe is not complete: lr and epochs are open. Use inlay.training.recipe.filled(recipe, kind)."
            )
        check_batch(len(train.features), recipe)
        self.accelerator = accelerator or accelerator_for(recipe)
        self.host, self.language, self.train, self.validation = host, language, train, validation
        self.recipe, self.objective, self.checkpoint, self.watch, self.title = (
            recipe,
            objective,
            checkpoint,
            watch,
            title,
        )
        self.log = log if log is not None and self.accelerator.is_main_process else lambda entry: None
        self.lengths = train.features.lengths
        self.per_epoch = math.ceil(len(train.features) / recipe.batch_size)
        self.total = min(recipe.max_steps or math.inf, recipe.epochs * self.per_epoch)
        self.learned = Learned(host)
        if not self.learned.now:
            raise ConfigError(
                "nothing to train: no parameter of the host requires a gradient. Call inlay.train(host, name) first."
            )
        self.model, self.optimizer = self.accelerator.prepare(host, _adamw(self.learned.now, recipe))
        self.position = Position()
        self.history: list[dict[str, Any]] = []
        self.seen_rows = 0

    def start(self) -> None:
        """The first step of a new run, or where the checkpoint left off."""
        torch.manual_seed(self.recipe.seed + 1_000 * self.accelerator.process_index)
        if self.checkpoint is not None and self.checkpoint.exists():
            self.position = load_state(
                self.checkpoint, self.learned, self.optimizer.optimizer, self.accelerator.process_index
            )

    def run(self) -> Outcome:
        began = time.monotonic()
        self.watch.start(self.title, self.position.step, int(self.total))
        try:
            with Interrupts(alone=self.accelerator.num_processes == 1) as interrupts:
                for rows in self._batches():
                    self._step(rows)
                    self._leave_if_asked(interrupts)
            if self.position.loss_steps or not self.learned.best:  # max_steps may end between two evaluations
                self._evaluate()
        finally:
            self.watch.stop()
        self.learned.restore()
        self.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        seconds = time.monotonic() - began
        padding = padding_share(
            self.lengths, training_batches(self.lengths, self.recipe.batch_size, self.recipe.seed, 0)
        )
        return Outcome(
            self.position.best_scores,
            self.position.best_step,
            self.position.step,
            seconds,
            self.seen_rows / max(seconds, 1e-9),
            padding,
            self.history,
        )

    def _batches(self) -> Iterator[list[int]]:
        """The batches still to come. The position moves on before a batch is handed out: a save after it is right."""
        at = self.position
        while at.step < self.total and not at.stopped:
            batches = training_batches(self.lengths, self.recipe.batch_size, self.recipe.seed, at.epoch)
            for rows in batches[at.batch :]:
                at.step, at.batch = at.step + 1, at.batch + 1
                if at.batch == len(batches):
                    at.epoch, at.batch = at.epoch + 1, 0
                yield rows
                if at.step >= self.total or at.stopped:
                    return

    def _step(self, rows: list[int]) -> None:
        recipe, world = self.recipe, self.accelerator.num_processes
        mine = portion(rows, self.accelerator.process_index, world)
        weight = world / self.train.features.weights(rows)  # the processes' gradients are averaged
        parts = [part for i in range(recipe.accumulate) if (part := portion(mine, i, recipe.accumulate))] or [rows[:1]]
        if not mine:
            weight = 0.0  # fewer rows than processes: take part, and count for nothing
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.position.step - 1, int(self.total), recipe)
        summed = 0.0
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                batch = {
                    name: tensor.to(self.accelerator.device) for name, tensor in self.train.features.batch(part).items()
                }
                loss = self.objective(self.model, self.host, self.language, batch, weight, 1 / len(parts))
                self.accelerator.backward(loss)
            summed += float(loss.detach())
        if recipe.clip:
            self.accelerator.clip_grad_norm_(self.learned.now.values(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen_rows += len(rows)
        self.position.loss_sum += summed
        self.position.loss_steps += 1
        best = self.position.best
        known = best is not None and math.isfinite(best)
        self.watch.step(self.position.step, summed, f"{self.language.task.main} {best:.3f}" if known else "")
        every = recipe.eval_every or self.per_epoch
        if self.position.step % every == 0:
            self._evaluate()
            self._save()
        elif self.position.step % recipe.save_every == 0:
            self._save()

    def _evaluate(self) -> None:
        at = self.position
        scores = self.language.measure(self.validation, self._answers())
        loss = torch.tensor(at.loss_sum / at.loss_steps if at.loss_steps else math.nan, device=self.accelerator.device)
        entry = {
            "step": at.step,
            "epoch": at.step / self.per_epoch,
            "loss": float(self.accelerator.reduce(loss, "mean")),
            "lr": rate_at(at.step - 1, int(self.total), self.recipe),
            **{f"validation_{name}": value for name, value in scores.items()},
        }
        at.loss_sum, at.loss_steps = 0.0, 0
        self.history.append(entry)
        self.log(entry)
        if self.accelerator.trackers:
            self.accelerator.log({name: value for name, value in entry.items() if name != "step"}, step=at.step)
        main = scores[self.language.task.main]
        if at.best is None or main > at.best:
            at.best, at.waited = (main if math.isfinite(main) else -math.inf), 0
            at.best_step, at.best_scores = at.step, scores
            self.learned.keep()
        else:
            at.waited += 1
        at.stopped = bool(self.recipe.patience) and at.waited >= self.recipe.patience

    def _answers(self) -> list[Any]:
        before = random_state()  # asking leaves no trace in the random numbers of training
        answers = ask(self.host, self.language, self.validation, accelerator=self.accelerator)
        set_random_state(before)
        return answers

    def _save(self) -> None:
        if self.checkpoint is None:
            return
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


def check_batch(rows: int, recipe: Recipe) -> None:
    if rows < recipe.batch_size:
        raise ConfigError(
            f"{rows} training rows are fewer than a batch of {recipe.batch_size}; use a smaller batch_size."
        )


def rate_at(step: int, total: int, recipe: Recipe) -> float:
    """Learning rate of a step, counted from 0: a linear rise, then linear decay to zero."""
    assert recipe.lr is not None
    rise = round(recipe.warmup * total)
    if step < rise:
        return recipe.lr * (step + 1) / rise
    return recipe.lr * max(0.0, (total - step) / max(1, total - rise))


def _adamw(learned: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    assert recipe.lr is not None
    matrices: list[Tensor] = [p for p in learned.values() if p.dim() > 1]
    vectors: list[Tensor] = [p for p in learned.values() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.lr)
