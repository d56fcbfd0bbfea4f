"""The bodies of requests and answers, as /openapi.json describes them.

A body of a megabyte can be wrong in half a million places, and to say them all would take half a minute in which nobody
else is answered. So a list is read up to the first thing that is wrong in it, and only a few unknown names are told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1, max_length=200)]
Texts = Annotated[list[str], Field(fail_fast=True)]
MEMBERS = 1000
"""That a request may name."""
MOST = 1 << 15
"""Inputs of a request, whatever limit a server has for rows."""
AT_MOST = 5
"""This many unknown names are told."""


def _not_too_many(given: Any) -> Any:
    """Pydantic counts the entries of an object when it has looked at all of them."""
    if isinstance(given, dict) and len(given) > MEMBERS:
        raise ValueError(f"it names {len(given):,} members, and {MEMBERS:,} are allowed")
    return given


class Form(BaseModel):
    """A request's body: nothing that is not known."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        """The names that are known, and as many others as are told."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        unknown = [name for name in given if name not in cls.model_fields]
        return {name: given[name] for name in (*(given.keys() & cls.model_fields.keys()), *unknown[:AT_MOST])}


class InputForm(Form):
    """One input that is more than a text."""

    text: str | None = None
    """The text; of a question in a context the question."""
    pair: str | None = None
    """The second text; of a question its context."""
    choices: Texts | None = None
    """What to choose from."""
    words: Texts | None = None
    """The words of a text, to be tagged."""
    row: dict[str, Any] | None = None
    """A row with the columns that the model was trained on, instead of all of these."""


Input = str | InputForm


class ClassifyForm(Form):
    """POST /v1/classify"""

    model: Name
    """A model of GET /v1/models."""
    inputs: Annotated[list[Input], Field(fail_fast=True)] = Field(min_length=1, max_length=MOST)
    """Texts, or objects for pairs, choices, words and rows."""


class ExplainForm(Form):
    """POST /v1/explain"""

    model: Name
    """A fusion."""
    input: Input
    """One input, as /v1/classify takes several."""
    off: Annotated[list[Name], Field(fail_fast=True)] = Field(default_factory=list, max_length=MEMBERS)
    """Members to switch off."""
    pin: Annotated[dict[str, Annotated[float, Field(ge=0, le=1)]], BeforeValidator(_not_too_many)] = Field(
        default_factory=dict, max_length=MEMBERS
    )
    """Members and the weights to pin them to; the others share the rest."""


class PredictForm(Form):
    """POST /predict, as text-embeddings-inference has it, where two texts in a list are a pair."""

    inputs: str | Texts | Annotated[list[Texts], Field(fail_fast=True)]
    """A text; a list of one text or of the two of a pair; or a list of such lists."""
    model: Name | None = None
    """Which model, where there are several."""
    raw_scores: Literal[False] = False
    """Logits instead of probabilities: not offered."""
    truncate: Literal[True] | None = True
    """Long inputs are always cut, as in training."""


class CompletionForm(Form):
    """POST /v1/completions, in OpenAI's shape."""

    model: Name
    """A model whose host writes, or the host itself."""
    prompt: str | Texts
    """What to go on from."""
    max_tokens: int = Field(default=16, ge=1)
    """The most tokens of a text."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 takes the likeliest words; above that words are drawn by chance."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sampling: only from the likeliest words that together have this probability."""
    seed: int = Field(default=0, ge=0, le=(1 << 32) - 1)
    """Sampling: the same seed gives the same text."""
    stream: bool = False
    """Send the text of a single prompt piece by piece, as server-sent events."""


class LoadForm(Form):
    """PUT /v1/inlays/{name}"""

    path: str = Field(min_length=1, max_length=1024)
    """The run's or inlay's folder, from the server's root folder down."""


# answers


class Labelled(BaseModel):
    """A label, a choice or a word's tag, and how likely it is."""

    label: str | None
    score: float | None = None
    index: int | None = None
    word: str | None = None
    said: str | None = None


class Number(BaseModel):
    """The answer of a regression."""

    value: float


class Text(BaseModel):
    """A piece of the context, or a text that was written."""

    text: str
    score: float | None = None


Answer = list[Labelled] | Number | Text


class Classified(BaseModel):
    """One answer per input, in their order."""

    model: str
    kind: str
    results: list[Answer]


class Changed(BaseModel):
    """The same with members off or pinned."""

    answer: Answer
    weights: list[list[list[list[float]]]]
    off: list[str]
    pin: dict[str, float]


class Explained(BaseModel):
    """What a fusion says, and how it weighs its members: weights[text][place][token][member]."""

    model: str
    kind: str
    members: list[str]
    places: list[str]
    texts: list[list[str]]
    answer: Answer
    weights: list[list[list[list[float]]]]
    changed: Changed | None


class ModelFacts(BaseModel):
    """What a model is asked and how it was made."""

    task: str
    kind: str
    labels: list[str]
    method: str
    members: list[str]
    pair: bool
    max_length: int
    columns: list[str]
    reads: dict[str, str | None]


class ModelEntry(BaseModel):
    """A model, in OpenAI's shape; `parent` is its host."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    inlay: ModelFacts | None


class ModelList(BaseModel):
    """GET /v1/models"""

    object: Literal["list"]
    data: list[ModelEntry]


class Choice(BaseModel):
    """One text. It stopped where the host ended it, or at the length that was allowed."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: None = None


class Usage(BaseModel):
    """Tokens that the host read and wrote, special ones included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """One text per prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Deleted(BaseModel):
    """DELETE /v1/inlays/{name}"""

    id: str
    deleted: Literal[True]


class State(BaseModel):
    """GET /health and /ready"""

    status: str
    heartbeat_age: float
    queue_rows: int
    models: int


class Failure(BaseModel):
    """Every answer that is none."""

    error: str
    error_type: str
