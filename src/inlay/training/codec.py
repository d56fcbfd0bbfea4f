"""A task's examples as one host reads them, and its answers as the task means them.

form       answers with              host class
labels     the logits of a head      AutoModelForSequenceClassification, for every kind of task: the head is the inlay's
text       generated text            AutoModelForSeq2SeqLM; for decoders (GPT-2, Llama …) AutoModelForCausalLM
mask       the word at a mask        AutoModelForMaskedLM: which of the labels' words is the likeliest

kind of task      logits of the head    their loss, summed
classification    (B, labels)           cross-entropy
regression        (B, 1)                squared error
choice            (B, choices)          cross-entropy; each choice is a text with one number, absent ones get the lowest
multilabel        (B, labels)           binary cross-entropy, the mean over labels
tags              (B, T, labels)        cross-entropy over the first tokens of words
spans             (windows, T, 2)       cross-entropy over tokens, the mean of first and last

Answers in text have logits for every token of the answer, and cross-entropy over these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.data.task import Task
from inlay.data.templates import with_tokens
from inlay.errors import InlayError
from inlay.training.joined import joined_features
from inlay.training.label_words import LabelWords, cloze_features
from inlay.training.recipe import Generation, Recipe
from inlay.training.tokens import IGNORED, Features, Target, features, first_token, window_features, word_features

AnswerForm = Literal["labels", "text", "mask"]
GENERATORS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Families that answer every task in text, as they were trained."""
STRIDE = 128
"""Tokens that the windows of a long context share, where there is room for them."""
LONGEST_SPAN, N_BEST = 30, 20
"""Tokens of the longest answer, and how many spans of each window are compared."""


def answer_form(task: Task, config: PreTrainedConfig) -> AnswerForm:
    """How a host of this configuration answers a task."""
    if task.answer_with == "words":
        masked = not config.is_encoder_decoder and not is_decoder(config)
        _check_words(task, config.model_type, masked)
        return "mask" if masked else "text"
    if task.kind == "text" or config.model_type in GENERATORS:
        if not config.is_encoder_decoder and not is_decoder(config):
            raise InlayError(
                f"{task.name} asks for text, which needs a host such as T5, GPT-2 or Llama, not {config.model_type}."
            )
        if is_decoder(config) and task.template is not None and not task.template.rstrip().endswith("{target}"):
            raise InlayError(
                f"the template {task.template!r} goes on after {{target}}, where {config.model_type} stops: a decoder "
                f"answers at the end. Put {{target}} there."
            )
        if task.kind in ("multilabel", "tags", "spans"):
            raise InlayError(
                f"{config.model_type} answers in text, which has no form for {task.kind} here. "
                f"Use an encoder such as BERT, or a decoder such as GPT-2."
            )
        return "text"
    return "labels"


def _check_words(task: Task, host: str, masked: bool) -> None:
    """Refuse a task without label words, or without a template that fits the host, where words are to answer it."""
    shape = task.cloze if masked else task.template
    problems = [] if task.label_words else ["it has no label_words; give one for each label"]
    if shape is None:
        problems.append(f'it has no template for {host}, such as "{{text}} It was {{target}}"')
    elif not masked and not shape.rstrip().endswith("{target}"):
        problems.append(f"its template {shape!r} goes on after {{target}}, but {host} answers at the end; put it there")
    if problems:
        raise InlayError(f"{task.name} cannot be answered with words: {'; '.join(problems)}.")


def is_decoder(config: PreTrainedConfig) -> bool:
    """Whether hosts of this configuration only predict the next token, as GPT-2 and Llama do."""
    kind = config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


@dataclass(frozen=True)
class Answer:
    """What a host said about one example."""

    prediction: int | float | str | tuple[int, ...]
    """Index of the label or choice (-1: no label at all), a number, a text, or the indices of several labels."""
    probabilities: tuple[float, ...] | None = None
    """Of every label or choice; of the label of each word; of the span among the best ones."""
    said: str | None = None
    """What a host that answers in text wrote, where that is no label."""


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
    stride: int = STRIDE
    answering: Literal["generation", "ranking"] = "generation"
    """Form text: whether the host writes its answer, or the labels are ranked by their likelihood."""
    generation: Generation = field(default_factory=Generation)
    """Form text: how the host writes."""
    decoder: bool = False
    """Form text: whether the host reads a prompt and its own answer as one sequence."""
    verbatim: bool = False
    """Decoders: whether prompts are continued as they stand; otherwise spaces at their end become the answer's."""
    words: LabelWords | None = None
    """Answering with words: those of the labels."""
    packing: bool = False
    """Decoders: whether short rows share a sequence in training."""
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    @property
    def per_token(self) -> bool:
        """Form labels: whether a head has logits for every token."""
        return self.task.kind in ("tags", "spans")

    @property
    def outputs(self) -> int:
        """Form labels: how many numbers a head gives for a text, or for a token."""
        return {"regression": 1, "choice": 1, "spans": 2}.get(self.task.kind, len(self.task.labels))

    def encode(self, examples: Sequence[Example], *, labelled: bool = True, cache: bool = True) -> EncodedSplit:
        """Examples with their tokens, and with their targets where they have some.

        cache: whether tokens are kept on disk for the next time; not worth it for what is asked once.
        """
        targets: list[Target] | None
        if self.form == "mask":
            assert self.words is not None
            around = [self._around(example) for example in examples]
            right = [int(example.target) for example in examples] if labelled else None  # type: ignore[arg-type]
            return EncodedSplit(examples, cloze_features(around, right, self.tokenizer, self.max_length, self.words))
        if self.decoder:
            prompts = [self._prompt(example) for example in examples]
            wanted = [self._answer(example) for example in examples] if labelled else None
            return EncodedSplit(examples, self._joined(prompts, wanted, cache))
        if self.form == "text":
            asked = [Example(((self._question(example), None),), None) for example in examples]
            targets = [self._answer(example) for example in examples] if labelled else None
            return EncodedSplit(examples, features(asked, self.tokenizer, self.max_length, targets, cache))
        return EncodedSplit(examples, self._features(examples, labelled, cache))

    def _features(self, examples: Sequence[Example], labelled: bool, cache: bool) -> Features:
        if self.task.kind == "tags":
            return word_features(examples, self.tokenizer, self.max_length, labelled, cache)
        if self.task.kind == "spans":
            return window_features(examples, self.tokenizer, self.max_length, self.stride, labelled, cache)
        targets: list[Target] | None = None
        if labelled and self.task.kind == "multilabel":
            all_labels = range(len(self.task.labels))
            targets = [tuple(float(i in cast(tuple[int, ...], e.target)) for i in all_labels) for e in examples]
        elif labelled:
            targets = [cast(Target, example.target) for example in examples]
        return features(examples, self.tokenizer, self.max_length, targets, cache)

    def _joined(self, prompts: Sequence[str], answers: Sequence[str] | None, cache: bool) -> Features:
        """Prompts with their answers. Spaces between the two go with the answer's first word, as tokenizers expect."""
        ends = [prompt if self.verbatim else prompt.rstrip(" ") for prompt in prompts]
        if answers is not None:
            answers = [p[len(e) :] + answer for p, e, answer in zip(prompts, ends, answers, strict=True)]
        return joined_features(ends, answers, self.tokenizer, self.max_length, packed=self.packing, cache=cache)

    def _token(self, name: str) -> str | None:
        """The tokenizer's token that a template names."""
        return getattr(self.tokenizer, f"{name}_token")

    def _around(self, example: Example) -> tuple[str, str]:
        """What stands before and after the masks."""
        before, after = example.cloze or ("", "")
        return with_tokens(before, self._token), with_tokens(after, self._token)

    def _prompt(self, example: Example) -> str:
        """What a decoder goes on from."""
        if example.before is None:
            return self._question(example) + "\n"
        return with_tokens(example.before, self._token)

    def _question(self, example: Example) -> str:
        """The example as one text, in the manner T5 was trained with."""
        if self.task.prompt is not None and example.prompt is not None and self.words is None:
            return example.prompt
        if example.before is not None:
            return with_tokens(example.before, lambda name: "").strip()
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
        if self.words is not None:
            return self.task.label_words
        if self.task.kind == "classification":
            return _indices(len(self.task.labels)) if self.task.answers == "index" else self.task.labels
        if self.task.kind != "choice":
            return None
        if self.task.answers == "text":
            return example.choices
        return [f"{'choice' if self.task.answers == 'words' else ''}{i}" for i in range(len(example.texts))]

    def unwritable(self) -> list[str]:
        """Labels that the host cannot write, because its tokenizer gives back another text: T5 has no < and no 日."""
        words = self.form == "text" and self.words is None and self.task.kind == "classification"
        if not words or self.task.answers == "index" or self.answering == "ranking":
            return []
        back = self.tokenizer.batch_decode(self.tokenizer(list(self.task.labels)).input_ids, skip_special_tokens=True)
        return [label for label, text in zip(self.task.labels, back, strict=True) if text.strip() != label]

    def decode(self, said: str, example: Example) -> Answer:
        """A generated text as an answer to an example; what is none of its labels, or no number, is -1."""
        said = said.strip()
        candidates = self.candidates(example)
        if candidates is not None:
            known = said in candidates
            if not known and example.answers:
                return Answer(said)  # a part of the right words is worth something
            return Answer(list(candidates).index(said)) if known else Answer(-1, said=said)
        if self.task.kind == "regression":
            try:
                return Answer(float(said) if math.isfinite(float(said)) else -1.0)
            except ValueError:
                return Answer(-1.0)
        return Answer(said)

    def answers(self, logits: Tensor, split: EncodedSplit | None = None, rows: Sequence[int] = ()) -> list[Answer]:
        """Logits as answers. Tags and spans need the split and its rows, which say what each token stands for."""
        if self.task.kind == "regression":
            return [Answer(float(value)) for value in logits.flatten().tolist()]
        if self.task.kind == "multilabel":
            each = logits.double().sigmoid().tolist()
            return [Answer(tuple(i for i, p in enumerate(row) if p > 0.5), tuple(row)) for row in each]
        if self.per_token:
            assert split is not None, "tags and spans are read off tokens"
            logits = logits.double().cpu()
            return self._tags(logits, split, rows) if self.task.kind == "tags" else self._spans(logits, split, rows)
        shares = logits.double().softmax(-1)
        best = shares.argmax(-1).tolist()
        return [Answer(i, tuple(row)) for i, row in zip(best, shares.tolist(), strict=True)]

    def _tags(self, logits: Tensor, split: EncodedSplit, rows: Sequence[int]) -> list[Answer]:
        """The label of every word, read off its first token. Words that were cut off get O, or the first label."""
        shares, labels = logits.softmax(-1).max(-1)  # (B, T)
        outside = self.task.labels.index("O") if "O" in self.task.labels else 0
        found = []
        for i, row in enumerate(rows):
            word = split.features.stands_for(row)["word"].long()
            first, here = word >= 0, split.features.real(len(word), logits.shape[1])
            words = len(split.examples[row].words)
            said, sure = torch.full((words,), outside), torch.zeros(words, dtype=shares.dtype)
            said[word[first]] = labels[i, here][first]
            sure[word[first]] = shares[i, here][first]
            found.append(Answer(tuple(said.tolist()), tuple(sure.tolist())))
        return found

    def _spans(self, logits: Tensor, split: EncodedSplit, rows: Sequence[int]) -> list[Answer]:
        """The best span over all windows of a row; "no answer" where the task allows it and it scores higher."""
        found, windows, made = [], iter(logits), split.features
        for row in rows:
            spans: list[tuple[float, str]] = []
            nothing = float("inf")
            context = str(split.examples[row].texts[0][1])
            for window in made.sequences([row]).tolist():
                begin, end = (made.stands_for(window)[name] for name in ("begin", "end"))
                scores = next(windows)[made.real(len(begin), logits.shape[1])]  # (T, 2) without padding
                nothing = min(nothing, float(scores[first_token(made, window, self.tokenizer)].sum()))
                best = _best_spans(scores, begin >= 0)
                spans += [(score, context[int(begin[a]) : int(end[b])].strip()) for score, a, b in best]
            spans += [(nothing, "")] if self.task.unanswerable or not spans else []
            spans.sort(key=lambda span: -span[0])
            shares = torch.tensor([score for score, _ in spans[:N_BEST]]).softmax(0)
            found.append(Answer(spans[0][1], (float(shares[0]),)))
        return found

    def counted(self, labels: Tensor) -> int:
        """What the loss of a batch is a sum over: rows, windows, labelled words, or target tokens."""
        return int((labels != IGNORED).sum()) if self.form == "text" or self.task.kind == "tags" else len(labels)

    def problem(self) -> str:
        """transformers' problem type for this task."""
        if self.form == "text":
            return "single_label_classification"
        names = {"regression": "regression", "multilabel": "multi_label_classification"}
        return names.get(self.task.kind, "single_label_classification")

    def aligned(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Decoders: the logits (B, W, words) that predict the labels (B, W): each token's are for the next token."""
        done = not self.decoder or logits.shape[1] == labels.shape[1]
        return logits if done else logits[:, -labels.shape[1] - 1 : -1]

    def compared(self, logits: Tensor) -> Tensor:
        """Logits with the choices in the last dimension: for spans these are the tokens, (windows, 2, T)."""
        return logits.transpose(1, 2) if self.task.kind == "spans" else logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss summed over a batch's rows, or target tokens; the step divides it by `Features.weights`."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.task.kind == "regression" and self.form != "text":
            return torch.nn.functional.mse_loss(logits.flatten(), labels.to(logits.dtype), reduction="sum")
        if self.task.kind == "multilabel":
            wanted = labels.to(logits.dtype)
            each = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            return each.mean(-1).sum()
        if self.task.kind == "spans":
            first_and_last = self.compared(logits).flatten(0, 1)  # (windows · 2, T)
            return torch.nn.functional.cross_entropy(first_and_last, labels.flatten(), reduction="sum") / 2
        logits = self.aligned(logits, labels)
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), weight=weights, reduction="sum",
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def measure(self, split: EncodedSplit, answers: Sequence[Answer]) -> dict[str, float]:
        """The task's metrics of these answers to a split's examples."""
        examples = split.examples
        targets = [e.answers or e.target for e in examples]
        said = [self._in_words(e, a) if e.answers else a.prediction for e, a in zip(examples, answers, strict=True)]
        groups = [e.group for e in examples]
        found = score(self.task, targets, said, groups)
        parts = sorted({group for group in groups if group is not None}) if self.task.parts else []
        for part in parts if len(parts) > 1 else []:
            rows = [i for i, group in enumerate(groups) if group == part]
            own = score(self.task, [targets[i] for i in rows], [said[i] for i in rows])
            found |= {f"{metric}_{part}": value for metric, value in own.items()}
        return found

    def says_nothing(self, value: float, answers: Sequence[Answer]) -> bool:
        """Whether a metric cannot tell one state from another: it is not defined, or no answer is a valid one."""
        if self.task.kind == "text":
            return math.isnan(value) or value == 0
        return math.isnan(value) or (self.form == "text" and all(answer.prediction == -1 for answer in answers))

    def _in_words(self, example: Example, answer: Answer) -> str:
        """A choice as its text; none of them is no text at all."""
        said = answer.prediction
        if isinstance(said, str):
            return said
        return example.choices[said] if isinstance(said, int) and said >= 0 else ""


def asking(codec: Codec, recipe: Recipe) -> Codec:
    """The codec with a recipe's settings: how contexts are read, and how hosts that answer in text are asked."""
    return replace(
        codec, answering=recipe.answering, generation=recipe.generation(), stride=recipe.stride, packing=recipe.packing
    )


def _indices(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _best_spans(scores: Tensor, context: Tensor) -> list[tuple[float, int, int]]:
    """The best (score, first, last) among a window's spans in the context; scores are (T, 2)."""
    start, end = scores.masked_fill(~context.unsqueeze(1), -torch.inf).T
    whole = start.unsqueeze(1) + end.unsqueeze(0)  # (T, T): first, last
    allowed = torch.ones_like(whole, dtype=torch.bool).triu().tril(LONGEST_SPAN - 1)
    whole = whole.masked_fill(~allowed, -torch.inf)
    score, at = whole.flatten().topk(min(N_BEST, whole.numel()))
    found = zip(score.tolist(), at.tolist(), strict=True)
    return [(value, i // len(context), i % len(context)) for value, i in found if value > -torch.inf]
