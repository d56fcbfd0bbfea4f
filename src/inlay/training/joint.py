"""Several tasks in one training: which rows make up a step, and what such a step learns.

    min over Θ, Φ_1 … Φ_N of Σ_n L_n(D_n; Θ, Φ_n)          Θ the host, Φ_n the inlay and head of task n

A step has the rows of one task, drawn with p_n (see `inlay.data.mixing`), or rows of several:

    one task     the next batch of that task; the others' Φ, which get no gradient, stay as they are
    mixed        every row's task is drawn; each row runs with its own Φ in one pass (`Rows`), and
                 loss = Σ_n (rows of n / all rows) · mean loss of n's rows

Where Θ is frozen tasks share nothing, and each is trained as it would be alone with the same rows: its loss is its own
mean, its gradients are clipped by themselves, and its best state is its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from inlay.anatomy.modules import ATTRIBUTE
from inlay.compose.fuse import penalty
from inlay.data.mixing import Sampling, TaskDraws
from inlay.errors import ConfigError, SetupError
from inlay.host.registry import key_of
from inlay.host.setup import Rows, Setup
from inlay.host.verbs import activate, activator
from inlay.training.batching import Batch, padding_share, training_batches
from inlay.training.codec import Codec
from inlay.training.evaluate import by_choice
from inlay.training.lesson import Lesson
from inlay.training.loop import Entry, Loop, check_complete
from inlay.training.objectives import plain_loss
from inlay.training.optimizer import adamw
from inlay.training.recipe import LOSS, Recipe
from inlay.training.state import Standing
from inlay.training.tokens import IGNORED, Features, on_device

T = TypeVar("T")
MEAN = "mean"
"""Chooses the best state by the mean of all tasks."""


class Stream:
    """The rows of one task, pass after pass, each in an order of its own."""

    def __init__(self, lengths: Tensor, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.passes, self.at = 0, 0

    def _batches(self) -> list[list[int]]:
        return training_batches(self.lengths, self.batch_size, self.seed, self.passes)

    def batches(self, count: int) -> list[list[int]]:
        """The next batches."""
        return self._next(count, self._batches)

    def rows(self, count: int) -> list[int]:
        """The next rows."""
        return self._next(count, lambda: [row for batch in self._batches() for row in batch])

    def _next(self, count: int, make: Callable[[], list[T]]) -> list[T]:
        found: list[T] = []
        while len(found) < count:
            here = make()
            taken = here[self.at : self.at + count - len(found)]
            found += taken
            self.at += len(taken)
            if self.at >= len(here):
                self.passes, self.at = self.passes + 1, 0
        return found


class JointBatches:
    """Batches of several tasks. An epoch is drawn as a whole when it begins, so that p_n is constant within it."""

    def __init__(
        self, lengths: Mapping[str, Tensor], recipe: Recipe, sampling: Sampling, *,
        mixed: bool = False, steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        assert recipe.epochs is not None
        self.names, self.lengths, self.mixed = list(lengths), list(lengths.values()), mixed
        self.batch_size, self.seed = recipe.batch_size, recipe.seed
        self.draws = TaskDraws(
            {name: len(each) for name, each in lengths.items()}, sampling, epochs=recipe.epochs, seed=recipe.seed
        )
        counted = sum(sampling.sizes(self.draws.rows).values())
        self.steps = steps_per_epoch or math.ceil(counted / recipe.batch_size)
        self.streams = [Stream(each, recipe.batch_size, recipe.seed) for each in self.lengths]
        self.before = self._now()
        self.padded: float | None = None

    def epoch(self, number: int) -> list[Batch]:
        self.before = self._now()
        made = self._mixed(number) if self.mixed else self._one_by_one(number)
        if self.padded is None:
            self.padded = self._padding_of(made)
        return made

    def _one_by_one(self, epoch: int) -> list[Batch]:
        drawn = [self.names.index(name) for name in self.draws.draw(self.steps, epoch + 1)]
        counts = Counter(drawn)
        coming = [iter(stream.batches(counts[task])) for task, stream in enumerate(self.streams)]
        return [[(task, row) for row in next(coming[task])] for task in drawn]

    def _mixed(self, epoch: int) -> list[Batch]:
        """Rows of like length together, whatever their tasks are."""
        counts = Counter(self.draws.draw(self.steps * self.batch_size, epoch + 1))
        named = zip(self.names, self.streams, strict=True)
        picks = [(task, row) for task, (name, stream) in enumerate(named) for row in stream.rows(counts[name])]
        lengths = torch.stack([self.lengths[task][row] for task, row in picks])
        batches = training_batches(lengths, self.batch_size, self.seed, epoch)
        return [[picks[i] for i in batch] for batch in batches]

    def _now(self) -> tuple[dict[str, Any], Tensor]:
        streams = {name: [s.passes, s.at] for name, s in zip(self.names, self.streams, strict=True)}
        return streams, self.draws.state

    def state(self, *, begun: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        streams, draws = self.before if begun else self._now()
        return streams, {"tasks": draws}

    def restore(self, streams: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        for name, stream in zip(self.names, self.streams, strict=True):
            stream.passes, stream.at = streams[name]
        self.draws.state = tensors["tasks"]

    def _padding_of(self, batches: Sequence[Batch]) -> float:
        starts = torch.tensor([0, *map(len, self.lengths)]).cumsum(0).tolist()
        return padding_share(torch.cat(self.lengths), [[starts[task] + row for task, row in b] for b in batches])

    def padding(self) -> float:
        return self.padded or 0.0


@dataclass(eq=False, repr=False)
class JointLoop(Loop):
    """Trains several tasks on one host; after `run` the host and its inlays are in their best state."""

    tasks: Sequence[Lesson]
    """Each with its setup, as a rule the inlay of its own name."""
    recipe: Recipe
    _: KW_ONLY
    sampling: Sampling = field(default_factory=Sampling)
    mixed: bool = False
    """Rows of several tasks in a step."""
    steps_per_epoch: int | None = None
    """By default as many as there are batches in all rows, or in as many as the cap leaves."""
    stop_on: str = MEAN
    """Whose score chooses the best state and stops early: the mean of all tasks, or one task."""
    host_lr: float | None = None
    """The host's own peak learning rate; by default that of everything else."""

    def __post_init__(self) -> None:
        check_complete(self.recipe)
        names = [lesson.name for lesson in self.tasks]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(
                f"every task of a joint training needs a name of its own, got {', '.join(names) or 'none'}."
            )
        if self.stop_on not in (MEAN, *names):
            raise ConfigError(f"`stop_on` is {self.stop_on!r}; it is {MEAN} or one of the tasks {', '.join(names)}.")
        trained = [name for name, p in self.host.named_parameters() if p.requires_grad]
        self.apart = all(name.startswith(f"{ATTRIBUTE}.") for name in trained)
        """Whether the tasks share nothing."""
        by_loss = [lesson.name for lesson in self.tasks if lesson.recipe.select == LOSS]
        if by_loss and not self.apart and self.stop_on == MEAN and len(by_loss) < len(names):
            raise ConfigError(
                f"`select` is {LOSS} for {', '.join(by_loss)} and a metric for the others: these have no mean. "
                f"Use {LOSS} for all tasks or for none, or let one task decide (`stop_on`)."
            )
        self.together: bool | None = None
        """Whether rows of several tasks can share one pass; None: not known yet."""
        lengths = {lesson.name: lesson.train.features.lengths for lesson in self.tasks}
        batches = JointBatches(
            lengths, self.recipe, self.sampling, mixed=self.mixed, steps_per_epoch=self.steps_per_epoch
        )
        self.prepare(self.recipe, [self._entered(lesson) for lesson in self.tasks], batches)

    def _entered(self, lesson: Lesson) -> Lesson:
        enter = lesson.enter if lesson.setup is None else activator(self.host, lesson.setup)
        return replace(lesson, enter=enter, prefix=f"{lesson.name}/")

    # the step

    def make_optimizer(self) -> torch.optim.AdamW:
        if self.host_lr is None or self.apart:
            return super().make_optimizer()
        assert self.recipe.lr is not None
        ours = {name: p for name, p in self.learned.now.items() if name.startswith(f"{ATTRIBUTE}.")}
        theirs = {name: p for name, p in self.learned.now.items() if name not in ours}
        made = adamw(ours, self.recipe) if ours else adamw(theirs, self.recipe)
        if ours:
            for group in adamw(theirs, self.recipe).param_groups:
                made.add_param_group(group)
        hosts = set(theirs.values())
        for group in made.param_groups:
            group["share"] = self.host_lr / self.recipe.lr if group["params"][0] in hosts else 1.0
        return made

    def shares_of(self, rows: Mapping[int, Sequence[int]]) -> dict[int, float]:
        if self.apart:
            return dict.fromkeys(rows, 1.0)
        whole = sum(map(len, rows.values()))
        return {task: len(mine) / whole for task, mine in rows.items()}

    def passes(self, rows: dict[int, list[int]]) -> list[dict[int, list[int]]]:
        if len(rows) == 1 or self._all_together():
            return [rows]
        return [{task: mine} for task, mine in rows.items()]

    def _all_together(self) -> bool:
        """Whether all tasks can act in one pass; otherwise the rows of each are run by themselves."""
        if self.together is None:
            self.together = all(
                lesson.objective is plain_loss and lesson.codec.words is None and not lesson.codec.decoder
                for lesson in self.lessons
            )
            try:
                self._enter_rows([lesson.setup for lesson in self.lessons])
            except SetupError:
                self.together = False
        return self.together

    def _enter_rows(self, setups: Sequence[Setup]) -> None:
        if any(setup is not None for setup in setups):  # otherwise the host alone is all there is
            activate(self.host, Rows(*setups))

    def loss_of(self, rows: Mapping[int, list[int]], weights: Mapping[int, float], step_share: float) -> Tensor:
        if len(rows) == 1:
            ((task, mine),) = rows.items()
            losses = {task: self.lesson_loss(self.lessons[task], mine, weights[task], step_share)}
            whole = losses[task]
        else:
            losses = self._mixed_losses(rows, weights)
            whole = torch.stack(list(losses.values())).sum() + penalty(self.host) * step_share
        self._note_losses(rows, weights, losses)
        return whole

    def _mixed_losses(self, rows: Mapping[int, list[int]], weights: Mapping[int, float]) -> dict[int, Tensor]:
        """One pass over rows of several tasks, each with its own inlay; the loss of each task."""
        lessons = [self.lessons[task] for task in rows]
        device, features = self.accelerator.device, lessons[0].train.features
        batches = [
            lesson.train.features.collate(mine) for lesson, mine in zip(lessons, rows.values(), strict=True)
        ]  # fmt: skip
        counts = [len(batch["input_ids"]) for batch in batches]
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        has_choice = [batch.pop("has_choice", None) for batch in batches]
        labels = [batch.pop("labels") for batch in batches]
        if lessons[0].codec.form == "text":  # the decoder's inputs are made from the labels
            labels = _alike(labels, IGNORED, left=False)
            batches = [batch | {"labels": each} for batch, each in zip(batches, labels, strict=True)]
        setups = [lesson.setup for lesson, count in zip(lessons, counts, strict=True) for _ in range(count)]
        self._enter_rows(setups)
        logits = self.model(**on_device(joined(batches, features), device)).logits
        found = {}
        for i, (task, part) in enumerate(zip(rows, logits.split(counts), strict=True)):
            codec, choices = lessons[i].codec, has_choice[i]
            mine = part if codec.form == "text" else own_logits(part, codec, lengths[i], left=features.left)
            mine = mine if choices is None else by_choice(mine, choices.to(device))
            found[task] = codec.loss(mine, labels[i].to(device)) * weights[task]
        return found

    def clip(self) -> None:
        if not self.apart:
            super().clip()
            return
        self.accelerator.unscale_gradients()
        for lesson in self.lessons:
            torch.nn.utils.clip_grad_norm_([self.learned.now[n] for n in self._own(lesson)], self.recipe.clip)

    def _own(self, lesson: Lesson) -> list[str]:
        """The parameters of one task's inlay."""
        return [name for name in self.learned.now if name.startswith(f"{ATTRIBUTE}.all.{key_of(lesson.name)}.")]

    # evaluation

    def deciding(self) -> list[Lesson]:
        return [lesson for lesson in self.lessons if self.stop_on in (MEAN, lesson.name)]

    def judged_by_loss(self, quiet: Sequence[Lesson]) -> Sequence[Lesson]:
        return quiet if self.apart else super().judged_by_loss(quiet)

    def keep_best(self, standings: Mapping[str, Standing], better: bool) -> list[Lesson]:
        if not self.apart:
            return super().keep_best(standings, better)
        at, kept = self.position, []
        for lesson in self.lessons:
            best, now = at.best_of.get(lesson.name), standings[lesson.name]
            if now.beats(None if best is None else Standing(best, at.best_losses.get(lesson.name))):
                at.best_of[lesson.name], at.best_losses[lesson.name] = now.value, now.loss
                at.best_steps[lesson.name] = at.step
                self.learned.keep(self._own(lesson))
                kept.append(lesson)
        return kept

    def _note_losses(
        self, rows: Mapping[int, Sequence[int]], weights: Mapping[int, float], losses: Mapping[int, Tensor]
    ) -> None:
        """For the curve of each task: its summed loss, and what its rows counted."""
        for task, loss in losses.items():
            lesson = self.lessons[task]
            noted = self.position.task_losses.setdefault(lesson.name, [0.0, 0.0])
            noted[0] += float(loss.detach())
            noted[1] += weights[task] * lesson.train.features.weights(rows[task])

    def _entry(self, scores: Mapping[str, Mapping[str, float]], values: Mapping[str, float]) -> Entry:
        at, epochs = self.position, self.recipe.epochs or 1
        entry = super()._entry(scores, values)
        if values:
            said = [value if math.isfinite(value) else 0.0 for value in values.values()]  # as when the best is chosen
            entry["validation_mean"] = sum(said) / len(said)
        for lesson in self.lessons:
            noted = torch.tensor(at.task_losses.get(lesson.name, [0.0, 0.0]), device=self.accelerator.device)
            summed, counted = self.accelerator.reduce(noted, "sum").tolist()
            if counted:
                entry[f"{lesson.prefix}loss"] = summed / counted
        if self.sampling.weights is None:
            entry["alpha"] = self.sampling.alpha_at(max(1, math.ceil(at.step / self.batches.steps)), epochs)
        at.task_losses.clear()
        return entry


def own_logits(logits: Tensor, codec: Codec, length: int, *, left: bool) -> Tensor:
    """One task's part of the logits of a mixed batch, which have the widest task's outputs and the longest's tokens.

    (B, labels), or (B, T, labels) where some task has logits for every token; `length` is the longest of this
    task's own rows.
    """
    if logits.dim() == 3 and codec.per_token:
        logits = logits[:, -length:] if left else logits[:, :length]
    elif logits.dim() == 3:
        logits = logits[:, 0]  # the same at every token
    return logits[..., : codec.outputs]


def joined(batches: Sequence[dict[str, Tensor]], features: Features) -> dict[str, Tensor]:
    """Batches of one host as one batch, padded to its longest row."""
    found = {}
    for name in batches[0]:
        if name == "labels":
            found[name] = torch.cat([batch[name] for batch in batches])
            continue
        pad = features.pads.get(name, 0)
        found[name] = torch.cat(_alike([batch[name] for batch in batches], pad, features.left))
    return found


def _alike(parts: Sequence[Tensor], pad: int, left: bool) -> list[Tensor]:
    """(B, T) tensors of one length."""
    longest = max(part.shape[1] for part in parts)
    missing = [longest - part.shape[1] for part in parts]
    return [F.pad(part, (n, 0) if left else (0, n), value=pad) for part, n in zip(parts, missing, strict=True)]
