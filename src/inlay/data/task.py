"""A task: which columns are text, what is asked of them, which labels and metrics it has.

    kind              asks for                      what it reads
    classification    one of the labels             text, or text and pair
    regression        a number                      text, or text and pair
    choice            one of a row's own choices    text with each choice in turn
    text              a text (seq2seq hosts)        text, or text and pair

`text` and `pair` are a column's name or a template such as "{question} {answer}".
"""

from __future__ import annotations

import re
import string
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.config import Config

Kind = Literal["classification", "regression", "choice", "text"]
Metric = Literal[
    "accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman", "exact_match", "token_f1", "group_exact_match"
]  # fmt: skip
USUAL_METRICS: dict[str, tuple[Metric, ...]] = {
    "classification": ("accuracy", "macro_f1"),
    "regression": ("pearson", "spearman"),
    "choice": ("accuracy",),
    "text": ("exact_match", "token_f1"),
}


class Hub(Config):
    """Where a task is on the Hugging Face hub, and how its columns there become the task's own."""

    path: str
    """The data set's name on the hub."""
    config: str | None = None
    """Its configuration."""
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
    """What is asked: classification, regression, choice or text."""
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
    group: str | None = None
    """Template of what groups rows for group_exact_match."""
    compacter: Literal["halve", "hold_out", "mismatched"] = "halve"
    """Which of the Compacter split rules is its own."""
    hub: Hub | None = None
    """Where it is on the hub."""

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

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and not fields.get("metrics"):
            return fields | {"metrics": USUAL_METRICS.get(str(fields.get("kind", "classification")), ())}
        return fields

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Task:
        allowed: dict[str, set[str]] = {
            "classification": {"accuracy", "f1", "macro_f1", "matthews", "group_exact_match"},
            "regression": {"pearson", "spearman"},
            "choice": {"accuracy"},
            "text": {"exact_match", "token_f1"},
        }
        wrong = [metric for metric in self.metrics if metric not in allowed[self.kind]]
        if wrong:
            raise ValueError(
                f"metric {wrong[0]} does not measure {self.kind}; use {', '.join(sorted(allowed[self.kind]))}"
            )
        if self.positive is not None and self.labels and self.positive not in self.labels:
            raise ValueError(f"positive is {self.positive!r}, which is not one of {', '.join(self.labels)}")
        return self

    @property
    def main(self) -> Metric:
        """The metric that early stopping and reports go by."""
        return self.metrics[0]

    @property
    def choice_columns(self) -> list[str]:
        """The column of the choices, or one column for each."""
        return [column.strip() for column in self.choices.split(",")]

    def columns(self, labelled: bool = True) -> list[str]:
        """Every column that a row must have."""
        texts = [self.text, self.pair, self.group if labelled else None]
        found = [name for text in texts if text for name in fields_of(template(text))]
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


def template(text: str) -> str:
    """A column's name as a template."""
    return text if re.search(r"\{[^{}]+\}", text) else "{" + text + "}"


def fields_of(text: str) -> list[str]:
    """The columns a template reads."""
    return [name for _, name, _, _ in string.Formatter().parse(text) if name]
