"""A request on its way through the engine: rows wait, run in whatever batches, and come together again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inlay.host.plan import Plan
from inlay.serve.answers import as_json
from inlay.serve.errors import DeadlineExceeded
from inlay.serve.shelf import Model
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.evaluate import by_choice
from inlay.training.generation import WrittenText, asked

if TYPE_CHECKING:
    from inlay.serve.explain import Look


@dataclass(eq=False)
class Request:
    """Some inputs for one model."""

    model: Model
    codec: Codec
    """The model's own, or one that writes as the request says."""
    split: EncodedSplit
    client: str
    deadline: float
    """On the clock of `time.monotonic`."""
    off: tuple[str, ...] = ()
    pin: dict[str, float] = field(default_factory=dict)
    looks_inside: bool = False
    looks: list[Look] = field(default_factory=list)
    """What was seen of a fusion so far: as usual, and with members off or pinned."""
    writes: bool = False
    """Whether prompts are to be gone on with."""
    on_text: Callable[[str], None] | None = None
    """Is given each piece of a text as it is written."""
    future: Future[Any] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    found: list[Tensor | None] = field(default_factory=list)
    """The logits of each sequence: (labels,), or (T, labels) without padding."""
    written: dict[int, Answer] = field(default_factory=dict)
    """The answers of a host that gives them in words."""
    texts: dict[int, WrittenText] = field(default_factory=dict)
    """What it made of prompts."""
    left: int = 0
    """Rows that have not run yet."""

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it; one that is past its deadline gets its error here."""
        if self.future.done():
            return False
        if time.monotonic() > self.deadline:
            self.fail(DeadlineExceeded("the answer did not come before the deadline. Ask for less, or later."))
            return False
        return True

    def rows(self) -> list[Row]:
        """What the host has to read; nothing has run yet."""
        features, cut = asked(self.split), dict[str, Sequence[Tensor]]()
        lengths = features.lengths.tolist()
        if self.codec.form == "labels":  # a choice, or a window of a context, is a row by itself
            lengths = features.inputs.lengths.tolist()
            cut = {name: column.split(lengths) for name, column in features.inputs.columns.items()}
        group = ("by itself", id(self)) if self.looks_inside or self.writes else self.model.group
        self.found = [None] * len(lengths)
        self.left = len(self.found)
        return [
            Row(self, i, length, group, {name: parts[i] for name, parts in cut.items()})
            for i, length in enumerate(lengths)
        ]

    def finish(self, result: Any) -> None:
        with suppress(InvalidStateError):  # nobody waits for it any more
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def result(self) -> Any:
        """What is answered when all rows have run."""
        if self.writes:
            return [self.texts[i] for i in range(len(self.split.examples))]
        return self.said(self.answers())

    def answers(self) -> list[Answer]:
        """The logits of all rows, as answers."""
        codec, features = self.codec, self.split.features
        if self.written:
            return [self.written[i] for i in range(len(self.split.examples))]
        found = [logits for logits in self.found if logits is not None]
        logits = _padded(found, features.left) if codec.per_token else torch.stack(found)
        if features.kind == "choices":
            logits = by_choice(logits, features.choices_of(range(len(features))))
        return codec.answers(logits, self.split, range(len(self.split.examples)))

    def said(self, answers: Sequence[Answer]) -> list[Any]:
        """Answers as JSON."""
        task = self.codec.task
        return [as_json(task, *pair) for pair in zip(self.split.examples, answers, strict=True)]


@dataclass(eq=False)
class Row:
    """One sequence that the host reads; where it answers in words, one input."""

    request: Request
    at: int
    length: int
    group: Hashable
    columns: dict[str, Tensor]
    """Its tokens and whatever else a host with a head reads, cut out before it came into the queue."""

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def wanted(self) -> bool:
        return self.request.wanted

    @property
    def plan(self) -> Plan:
        return self.request.model.plan


def _padded(found: Sequence[Tensor], left: bool) -> Tensor:
    """(T_i, labels) each -> (B, longest, labels), as `Features.real` finds them again."""
    longest = max(len(logits) for logits in found)
    whole = found[0].new_zeros(len(found), longest, found[0].shape[-1])
    for row, logits in enumerate(found):
        whole[row, longest - len(logits) if left else 0 :][: len(logits)] = logits
    return whole
