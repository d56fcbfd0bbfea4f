"""A task's examples in the form in which one host reads and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.data.task import Task
from inlay.training.tokens import Features, features
from inlay.training.workbench import Form


@dataclass(frozen=True)
class Answer:
    """What a host said about one example."""

    prediction: int | float | str
    """Index of the label or choice (-1: no label at all), a number, or a text."""
    probabilities: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Split:
    """One split: examples and their tokens."""

    examples: Sequence[Example]
    features: Features


@dataclass(frozen=True)
class Language:
    """How a task and a host talk to each other: tokens in, answers out."""

    task: Task
    form: Form
    tokenizer: Any
    max_length: int

    def split(self, examples: Sequence[Example], *, labelled: bool = True) -> Split:
        if self.form == "text":
            asked = [Example(((self._question(example), None),), None) for example in examples]
            wanted: list[Any] | None = [self._answer(example) for example in examples] if labelled else None
            return Split(examples, features(asked, self.tokenizer, self.max_length, wanted))
        wanted = [example.target for example in examples] if labelled else None
        return Split(examples, features(examples, self.tokenizer, self.max_length, wanted))

    def _question(self, example: Example) -> str:
        """The example as one text, in the manner T5 was trained with."""
        text, pair = example.texts[0]
        if self.task.kind == "text" and pair is None:
            return text
        if self.task.kind == "choice":
            choices = [b if b is not None else a for a, b in example.texts]
            context = text if pair is not None else ""
            return " ".join([self.task.name, context, *(f"choice{i}: {choice}" for i, choice in enumerate(choices))])
        return (
            f"{self.task.name} sentence1: {text} sentence2: {pair}"
            if pair is not None
            else f"{self.task.name} sentence: {text}"
        )

    def _answer(self, example: Example) -> str:
        """What the host should say; numbers in steps of 0.2, as T5 has them."""
        target = example.target
        if self.task.kind == "classification":
            return self.task.labels[int(target)]  # type: ignore[arg-type]
        if self.task.kind == "regression":
            return f"{round(float(target) * 5) / 5:.1f}"  # type: ignore[arg-type]
        return f"choice{target}" if self.task.kind == "choice" else str(target)

    def understood(self, said: str) -> Answer:
        """A generated text as an answer."""
        said = said.strip()
        if self.task.kind == "classification":
            return Answer(self.task.labels.index(said) if said in self.task.labels else -1)
        if self.task.kind == "regression":
            try:
                return Answer(float(said))
            except ValueError:
                return Answer(0.0)
        if self.task.kind == "choice":
            number = said.removeprefix("choice")
            return Answer(int(number) if number.isdigit() else -1)
        return Answer(said)

    def answers(self, logits: Tensor) -> list[Answer]:
        """Logits (B, outputs) as answers."""
        if self.task.kind == "regression":
            return [Answer(float(value)) for value in logits.flatten().tolist()]
        shares = logits.double().softmax(-1)
        best = shares.argmax(-1).tolist()
        return [Answer(i, tuple(row)) for i, row in zip(best, shares.tolist(), strict=True)]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss summed over a batch's rows, or target tokens; the step divides it by `Features.weights`."""
        if self.task.kind == "regression" and self.form != "text":
            return torch.nn.functional.mse_loss(logits.flatten().float(), labels.float(), reduction="sum")
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")

    def measure(self, split: Split, answers: Sequence[Answer]) -> dict[str, float]:
        examples = split.examples
        return score(
            self.task, [e.target for e in examples], [a.prediction for a in answers], [e.group for e in examples]
        )
