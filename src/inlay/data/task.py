"""A task: which columns are text, what is asked of them, which labels and metrics it has.

    kind              asks for                      what it reads
    classification    one of the labels             text, or text and pair
    regression        a number                      text, or text and pair
    choice            one of a row's own choices    text with each choice in turn
    multilabel        any number of the labels      text, or text and pair
    tags              a label for every word        text: a column with a list of words
    spans             a piece of the context        text: the question, pair: the context
    text              a text (T5, GPT-2, Llama …)   text, or text and pair; the label may be a list of right texts

`text` and `pair` are a column's name or a template such as "{question} {answer}".
"""

from __future__ import annotations

import re
import string
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.config import Config
from inlay.data.templates import columns_in, wrong_with

Kind = Literal["classification", "regression", "choice", "multilabel", "tags", "spans", "text"]
Answers = Literal["words", "index", "text"]
Metric = Literal[
    "accuracy", "f1", "macro_f1", "micro_f1", "subset_accuracy", "matthews", "pearson", "spearman", "exact_match",
    "token_f1", "group_exact_match", "entity_f1", "token_accuracy",
    "bleu", "nist", "meteor", "rouge_l", "cider", "ter", "chrf",
]  # fmt: skip
GENERATED: tuple[Metric, ...] = ("bleu", "nist", "meteor", "rouge_l", "cider", "ter", "chrf")
"""Metrics of generated texts (extra `nlg`)."""
USUAL_METRICS: dict[str, tuple[Metric, ...]] = {
    "classification": ("accuracy", "macro_f1"),
    "regression": ("pearson", "spearman"),
    "choice": ("accuracy",),
    "multilabel": ("micro_f1", "macro_f1", "subset_accuracy"),
    "tags": ("entity_f1", "token_accuracy"),
    "spans": ("token_f1", "exact_match"),
    "text": ("exact_match", "token_f1"),
}
METRICS: dict[str, tuple[Metric, ...]] = USUAL_METRICS | {
    "classification": ("accuracy", "f1", "macro_f1", "matthews", "group_exact_match"),
    "choice": ("accuracy", "token_f1", "exact_match"),
    "text": ("exact_match", "token_f1", *GENERATED),
}
"""Every metric that measures a kind."""
USUAL_COLUMNS: dict[str, dict[str, str]] = {
    "multilabel": {"label": "labels"},
    "tags": {"text": "tokens", "label": "tags"},
    "spans": {"text": "question", "pair": "context", "label": "answers"},
}
"""Columns of a kind as most data sets call them."""
PLACE = re.compile(r"[^.\[\]{}]+(\[[^\[\]{}]+\])*")
"""What a prompt may have in braces: a column, and what to take of a list or an object in it."""
LABELLED = ("classification", "multilabel", "tags")
"""Kinds that choose from labels which all rows share."""


class Hub(Config):
    """Where a task is on the Hugging Face hub, and how its columns there become the task's own."""

    path: str
    """The data set's name on the hub."""
    config: str | None = None
    """Its configuration."""
    revision: str | None = None
    """Its branch, where that is not the main one; refs/convert/parquet is the hub's copy of what a script makes."""
    splits: dict[str, str] = Field(default_factory=dict)
    """The hub's name of a split where it differs from train, validation, test."""
    rename: dict[str, str] = Field(default_factory=dict)
    """The task's column → the hub's column; 'choices.text' reads inside a column."""
    choices: tuple[str, ...] = ()
    """Columns that together are the task's `choices`."""
    labels: tuple[str, ...] = ()
    """How the hub writes the labels, in the order of the task's own; empty: as their index."""


class Task(Config):
    """What to read in a row and what to predict from it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str = "own"
    """The task's name."""
    kind: Kind = "classification"
    """What is asked: classification, regression, choice, multilabel, tags, spans or text."""
    text: str = "text"
    """Column or template of the text."""
    pair: str | None = None
    """Column or template of the second text of a pair."""
    choices: str = "choices"
    """Column with a list of the row's choices, or several columns with one each: "a,b,c" (kind choice)."""
    blank: str | None = None
    """Kind choice: the mark in `text` that each choice fills in; without it a choice is the second text."""
    label: str = "label"
    """Column of what is to be predicted."""
    labels: tuple[str, ...] = ()
    """The labels in order; empty: found in the training rows, in alphabetical order."""
    positive: str | None = None
    """The label that f1 is about; none: the last of two."""
    metrics: tuple[Metric, ...] = ()
    """Metrics, the main one first; empty: the usual ones of the kind."""
    unanswerable: bool = False
    """Kind spans: whether a question may have no answer; found in the training rows."""
    group: str | None = None
    """Template of what groups rows for group_exact_match."""
    prompt: str | None = None
    """What hosts that answer in text read: a template of columns, {choices[0]} for one of a list; none: the usual."""
    answers: Answers = "words"
    """How such hosts say a label or choice: in words, as its index, or a choice by its own text."""
    template: str | None = None
    """What decoders read, with {target} at its end, where they answer: columns, {bos} and {eos}; none: the usual."""
    answer_with: Literal["head", "words"] = "head"
    """Kind classification: a new head chooses the label, or the host's own words in a template do."""
    cloze: str | None = None
    """The template of masked language models, which fill {target} in anywhere."""
    label_words: tuple[str, ...] = ()
    """The word that stands for each label, in the labels' order."""
    label_tokens: Literal["one", "sum", "mean"] = "sum"
    """Label words of several tokens: refused (one), or their log-probabilities are summed or averaged."""
    shown: dict[str, str] = Field(default_factory=dict)
    """Demonstrations: rows with their answers that stand before every text, for `template` and for `cloze`."""
    markup: bool = False
    """Whether the marks <br> and <b> are taken out of what such hosts read."""
    compacter: Literal["halve", "hold_out", "mismatched"] = "halve"
    """Which of the Compacter split rules is its own."""
    linearise: Literal["slots", "triples", "triples_lower"] | None = None
    """How the text's column, which holds data, becomes a text: E2E's slots, or triples, as LoRA's code writes them."""
    scoring: Literal["e2e", "webnlg"] = "webnlg"
    """Whose scripts the metrics of generated texts follow: the E2E challenge's (lower case), or WebNLG's."""
    parts: dict[str, str] = Field(default_factory=dict)
    """Rows that are scored by themselves too: {"column": its name, value: what to call the rows that have it}."""
    skip_empty: bool = False
    """Kind text: whether an empty text among a row's right ones is left out, instead of refused."""
    folder: str | None = None
    """Its folder in `data_dir`, where that is not the task's name."""
    hub: Hub | None = None
    """Where it is on the hub."""

    @field_validator("template", "cloze")
    @classmethod
    def _with_target(cls, text: str | None) -> str | None:
        if text is not None and (wrong := wrong_with(text)):
            raise ValueError(wrong)
        return text

    @field_validator("labels")
    @classmethod
    def _different(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) != len(labels):
            raise ValueError("labels must differ from each other")
        return labels

    @field_validator("text", "pair", "group")
    @classmethod
    def _a_template(cls, text: str | None) -> str | None:
        if text is not None and (not text.strip() or _broken(text)):
            raise ValueError('it must be a column\'s name, or a template such as "{title}. {body}"')
        return text

    @field_validator("prompt")
    @classmethod
    def _columns_alone(cls, prompt: str | None) -> str | None:
        if prompt and (wrong := _wrong_with_prompt(prompt)):
            raise ValueError(wrong)
        return prompt

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kind = str(fields.get("kind", "classification"))
        fields = USUAL_COLUMNS.get(kind, {}) | fields
        return fields if fields.get("metrics") else fields | {"metrics": USUAL_METRICS.get(kind, ())}

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Task:
        allowed = METRICS[self.kind]
        wrong = [metric for metric in self.metrics if metric not in allowed]
        if wrong:
            raise ValueError(f"metric {wrong[0]} does not measure {self.kind}; use {', '.join(sorted(allowed))}")
        if self.kind == "tags" and (self.pair is not None or self.text != template(self.text)[1:-1]):
            raise ValueError("tags belong to the words of one column: give its name as text, and no pair")
        if self.kind == "spans" and self.pair is None:
            raise ValueError("a span is a piece of the context: name its column as pair")
        if self.answer_with == "words":
            if self.kind != "classification":
                raise ValueError(f"label words are for classification, not for {self.kind}")
            if len(set(self.label_words)) < len(self.label_words):
                raise ValueError(f"label_words must differ from each other, got {', '.join(self.label_words)}")
            if self.labels and len(self.label_words) != len(self.labels):
                raise ValueError(
                    f"label_words has {len(self.label_words)} words for {len(self.labels)} labels "
                    f"({', '.join(self.labels)}); give one for each, in this order"
                )
        if self.linearise is not None and self.text != template(self.text)[1:-1]:
            raise ValueError("linearise reads one column: give its name as text")
        if self.positive is not None and self.labels and self.positive not in self.labels:
            raise ValueError(f"positive is {self.positive!r}, which is not one of {', '.join(self.labels)}")
        return self

    def reading(self, text: str | None = None, pair: str | None = None, label: str | None = None) -> Task:
        """The same for rows whose columns have other names, which prompts and templates then have too."""
        given = {"text": text, "pair": pair, "label": label}
        said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        columns = {name: getattr(self, name) for name in ("text", "pair") if name in said and getattr(self, name)}
        new = {template(column): template(said[name]) for name, column in columns.items()}
        for form in ("prompt", "template", "cloze") if new else ():
            if (shape := getattr(self, form)) is not None:
                said[form] = re.sub("|".join(map(re.escape, new)), lambda found: new[found[0]], shape)
        return Task(**self.model_dump() | said)

    @property
    def main(self) -> Metric:
        """The metric that early stopping and reports go by."""
        return self.metrics[0]

    @property
    def asked(self) -> list[str]:
        """The templates that rows are put into."""
        shapes = [self.template, self.cloze] if self.answer_with == "words" else [self.template]
        used = self.kind == "text" or self.answer_with == "words"
        return [shape for shape in shapes if shape is not None] if used else []

    @property
    def generates(self) -> bool:
        """Whether texts are measured as such."""
        return any(metric in GENERATED for metric in self.metrics)

    @property
    def choice_columns(self) -> list[str]:
        """The column of the choices, or one column for each."""
        return [column.strip() for column in self.choices.split(",")]

    def columns(self, labelled: bool = True) -> list[str]:
        """Every column that a row must have."""
        texts = [self.text, self.pair, self.group if labelled else None]
        found = [name for text in texts if text for name in fields_of(template(text))]
        found += [name for name in fields_of(self.prompt or "") if name not in self.choice_columns]
        for shape in self.asked:
            found += columns_in(shape)
        if self.kind == "choice":
            found += self.choice_columns
        return list(dict.fromkeys([*found, self.label] if labelled else found))


def _broken(text: str) -> bool:
    """Whether a template cannot be read, or would do more than put columns in."""
    try:
        parts = list(string.Formatter().parse(template(text)))
    except ValueError:
        return True
    return any(name == "" or spec or conversion for _, name, spec, conversion in parts)


def _wrong_with_prompt(prompt: str) -> str | None:
    """What is wrong with a prompt, in words; None where it is fine.

    A task may come from anyone: an attribute would lead from a column's value to all that this process holds, and a
    width would ask for as much memory as it says.
    """
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        return f"the prompt {prompt!r:.200} cannot be read: {error}"
    if any(name is not None and (not PLACE.fullmatch(name) or spec or conv) for _, name, spec, conv in parts):
        return (
            f"the prompt {prompt!r:.200} must name its columns in braces, as {{text}}, or {{choices[0]}} for one of a "
            f"list, and nothing else"
        )
    return None


def template(text: str) -> str:
    """A column's name as a template."""
    return text if re.search(r"\{[^{}]+\}", text) else "{" + text + "}"


def fields_of(text: str) -> list[str]:
    """The columns a template reads; of "choices[0]" it is choices."""
    return [re.split(r"[.\[]", name)[0] for _, name, _, _ in string.Formatter().parse(text) if name]
