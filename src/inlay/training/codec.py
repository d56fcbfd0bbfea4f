"""A task's examples as one host reads them, and its answers as the task means them.

form       answers with                        host class
labels     a label or a number                 AutoModelForSequenceClassification
choice     one of the row's choices            AutoModelForMultipleChoice
text       generated text                      AutoModelForSeq2SeqLM
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from inlay.data.examples import Example, Target
from inlay.data.metrics import score
from inlay.data.task import Task
from inlay.errors import InlayError
from inlay.training.tokens import Features, features

AnswerForm = Literal["labels", "choice", "text"]
GENERATORS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Families that answer every task in text, as they were trained."""


def answer_form(task: Task, config: PretrainedConfig) -> AnswerForm:
    """How a host of this configuration answers a task."""
    if task.kind == "text" or config.model_type in GENERATORS:
        if not config.is_encoder_decoder:
            raise InlayError(f"{task.name} asks for text, which needs a host such as T5, not {config.model_type}.")
        return "text"
    return "choice" if task.kind == "choice" else "labels"


@dataclass(frozen=True)
class Answer:
    """What a host said about one example."""

    prediction: int | float | str
    """Index of the label or choice (-1: no label at all), a number, or a text."""
    probabilities: tuple[float, ...] | None = None


@dataclass(frozen=True)
class EncodedSplit:
    """One split: examples and their tokens."""

    examples: Sequence[Example]
    features: Features


@dataclass(frozen=True)
class Codec:
    """Between a task and a host: examples into tokens, logits or generated texts into answers."""

    task: Task
    form: AnswerForm
    tokenizer: PreTrainedTokenizerBase
    max_length: int

    def encode(self, examples: Sequence[Example], *, labelled: bool = True) -> EncodedSplit:
        """Examples with their tokens, and with their targets where they have some."""
        targets: list[Target] | None
        if self.form == "text":
            asked = [Example(((self._question(example), None),), None) for example in examples]
            targets = [self._answer(example) for example in examples] if labelled else None
            return EncodedSplit(examples, features(asked, self.tokenizer, self.max_length, targets))
        targets = [example.target for example in examples] if labelled else None
        return EncodedSplit(examples, features(examples, self.tokenizer, self.max_length, targets))

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

    def decode(self, said: str) -> Answer:
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

    def measure(self, split: EncodedSplit, answers: Sequence[Answer]) -> dict[str, float]:
        """The task's metrics of answers to a split's examples."""
        examples = split.examples
        return score(
            self.task, [e.target for e in examples], [a.prediction for a in answers], [e.group for e in examples]
        )
