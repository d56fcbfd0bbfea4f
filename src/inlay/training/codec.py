"""A task's examples as one host reads them, and its answers as the task means them.

form       answers with                        host class
labels     a label or a number                 AutoModelForSequenceClassification
choice     one of the row's choices            AutoModelForMultipleChoice
text       generated text                      AutoModelForSeq2SeqLM
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.data.task import Task
from inlay.errors import InlayError
from inlay.training.recipe import Recipe
from inlay.training.tokens import Features, Target, features

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
    answering: Literal["generation", "ranking"] = "generation"
    """Form text: whether the host writes its answer, or the labels are ranked by their likelihood."""
    writing: Mapping[str, Any] = field(default_factory=dict)
    """Form text: further settings of `generate`."""
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

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
        if self.task.prompt is not None and example.prompt is not None:
            return example.prompt
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
        candidates = self.candidates(example)
        if candidates is not None:
            return candidates[int(example.target)]  # type: ignore[arg-type]
        if self.task.kind == "regression":
            return f"{round(float(example.target) * 5) / 5:.1f}"  # type: ignore[arg-type]
        return str(example.target)

    def candidates(self, example: Example) -> Sequence[str] | None:
        """Every answer that the host may give, in words or as an index; None where there is no list of them."""
        if self.task.kind == "classification":
            return _indices(len(self.task.labels)) if self.task.answers == "index" else self.task.labels
        if self.task.kind != "choice":
            return None
        if self.task.answers == "text":
            return example.choices
        return [f"{'choice' if self.task.answers == 'words' else ''}{i}" for i in range(len(example.texts))]

    def decode(self, said: str, example: Example) -> Answer:
        """A generated text as an answer to an example; what is none of its labels, or no number, is -1."""
        said = said.strip()
        candidates = self.candidates(example)
        if candidates is not None:
            known = said in candidates
            if not known and self.task.answers == "text":
                return Answer(said)  # a part of the right words is worth something
            return Answer(list(candidates).index(said) if known else -1)
        if self.task.kind == "regression":
            try:
                return Answer(float(said) if math.isfinite(float(said)) else -1.0)
            except ValueError:
                return Answer(-1.0)
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
        weights = None if self.class_weights is None else torch.tensor(self.class_weights, device=logits.device)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), weight=weights, reduction="sum",
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def measure(self, split: EncodedSplit, answers: Sequence[Answer]) -> dict[str, float]:
        """The task's metrics of answers to a split's examples."""
        examples = split.examples
        targets = [e.answers or e.target for e in examples]
        said = [self._in_words(e, a) if e.answers else a.prediction for e, a in zip(examples, answers, strict=True)]
        return score(self.task, targets, said, [e.group for e in examples])

    def _in_words(self, example: Example, answer: Answer) -> str:
        """A choice as its text; none of them is no text at all."""
        said = answer.prediction
        return said if isinstance(said, str) else example.choices[int(said)] if said >= 0 else ""


def asking(codec: Codec, recipe: Recipe) -> Codec:
    """A codec that asks hosts which answer in text as a recipe says."""
    writing: dict[str, Any] = {"num_beams": recipe.beams}
    if recipe.beams > 1:
        writing["length_penalty"] = recipe.length_penalty
    if recipe.no_repeat_ngram:
        writing["no_repeat_ngram_size"] = recipe.no_repeat_ngram
    return replace(codec, answering=recipe.answering, writing=writing)


def _indices(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
