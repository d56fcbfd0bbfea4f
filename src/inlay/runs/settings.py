"""All settings of a training job, flat: the same names in Python, in YAML and as flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.config import Config
from inlay.data.sources import Data
from inlay.data.task import LABELLED
from inlay.errors import ConfigError
from inlay.recipes import recipe_settings
from inlay.runs.yaml_text import read_yaml
from inlay.training.recipe import Generation, Mode, Recipe

Tracker = Literal["tensorboard", "wandb", "mlflow"]
OTHER_NAMES = {"from": "start"}
"""Names of settings that Python keeps for itself."""
SPELT = {field: name for name, field in OTHER_NAMES.items()}
"""Fields that have another name in YAML and as flags."""

FEW, FEW_LABELS = 1_000, "few-labels"
"""Up to this many training rows are few, and then this recipe is used unless another one is named."""


class FusionOptions(Config):
    """How members are fused (mode fusion). What is left open is as in `inlay.add_fusion`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    query: Literal["normed", "output"] | None = None
    """Fusion: what the query is made from: the normed residual stream (the default), or the branch's output before
    that."""
    value: bool | None = None
    """Fusion: whether it has a value matrix V (dynamic fusion, the default) or not (static fusion)."""
    strength: float | None = Field(default=None, ge=0)
    """Fusion: the weight of the penalty that pulls V towards the identity; by default 0.01, and 0 turns it off."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Fusion: dropout on the attention scores, before the softmax; by default none."""
    temperature: float | None = Field(default=None, gt=0)
    """Fusion: the temperature that divides the attention scores; by default 1."""
    subset: int | None = Field(default=None, ge=1)
    """Fusion: how many members, chosen at random for each batch, take part in training; by default all."""
    sites: tuple[str, ...] | None = None
    """Fusion: the kinds of places where it acts, such as ffn, or single places; by default wherever a member acts."""
    leave_out: tuple[int | str, ...] | None = None
    """Fusion: layers where neither the fusion nor its members act, such as 11 or decoder.3."""

    def fusion_options(self) -> dict[str, Any]:
        """What was said of the fusion, as `inlay.add_fusion` takes it."""
        found = {name: getattr(self, name) for name in FusionOptions.model_fields}
        return {name: value for name, value in found.items() if value is not None}


class Settings(Data, Recipe, FusionOptions):
    """What to train, on what, how, and where to."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str
    """The pretrained host: a folder, a model's name on the hub, or a run to continue from."""
    out: Path
    """The run folder to write to; it must be new or empty."""
    recipe: str | None = None
    """A named recipe (see `inlay ls recipes`), for every setting that you do not give yourself."""
    name: str | None = None
    """The inlay's name; by default the name of the run folder."""
    mode: Mode = "inlay"
    """What to train: inlay, head (only a head), full (everything) or fusion (over members)."""
    method: str = "pfeiffer"
    """The inlay's method (see `inlay ls methods`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings, as in reduction=16."""
    start: Path | None = None
    """Start from this trained inlay, or a run's: with its method and weights, and its head if the labels are the
    same."""
    members: tuple[Path, ...] = ()
    """Runs or inlays to fuse (mode fusion)."""
    norms: bool | None = None
    """Whether the inlay or fusion has its own copy of the host's norms; by default as in the method's paper."""
    pooling: Literal["mean", "first", "last", "host"] | None = None
    """How the head pools tokens: mean, first, last, or host (a copy of the host's head); by default mean, or last for
    decoders."""
    head_layers: int = Field(default=1, ge=1, le=64)
    """How many linear layers the head has."""
    head_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout before each layer of the head."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Number of threads for torch; by default half of the cores."""
    eval_rows: int | None = Field(default=None, ge=1)
    """Use at most this many validation rows in each evaluation; by default all."""
    trackers: tuple[Tracker, ...] = ()
    """Also log to these, if they are installed: tensorboard, wandb, mlflow."""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: Any) -> Any:
        return said_with_recipe(given)

    @field_validator("options", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        return as_table(given)

    def by_recipe(self) -> dict[str, Any]:
        """The settings that the recipe says of this job."""
        return recipe_settings(self.recipe, self.model_dump()) if self.recipe is not None else {}


def said_with_recipe(given: Any) -> Any:
    """What a recipe says, and over it what was said; a method's options are joined."""
    if not isinstance(given, dict):
        return given
    said = {OTHER_NAMES.get(str(name), str(name)): value for name, value in given.items()}
    if said.get("recipe") is None:
        return said
    found = recipe_settings(str(said["recipe"]), said)
    options = found.get("options", {}) | as_table(said.get("options", {}))
    return found | said | ({"options": options} if options else {})


def as_table(given: Any) -> Any:
    """From the command line options come as name=value, the values in YAML."""
    return named_values(given) if isinstance(given, list | tuple) else given


def named_values(pairs: Iterable[str]) -> dict[str, Any]:
    """name=value pairs; the values are YAML, so that numbers, lists and maps can be given."""
    found = {}
    for pair in pairs:
        name, equals, value = str(pair).partition("=")
        if not equals:
            raise ConfigError(f"an option is name=value, got {pair!r}")
        found[name.strip()] = read_yaml(value, f"the value of the option {name.strip()!r}")
    return found


def as_few(settings: Settings) -> Settings:
    """The settings where training rows are few: what was said, and the rest by the recipe for it."""
    said = settings.model_dump(include=settings.model_fields_set)
    return Settings(**said | {"recipe": FEW_LABELS, "host": settings.host, "out": settings.out})


# what nothing uses


OF_A_HEAD = ("pooling", "head_layers", "head_dropout", "pairs")
OF_WRITING = tuple(Generation.model_fields)
OF_TEXT = ("prompt", "answers", "answering", "packing", *OF_WRITING)
OF_WORDS = ("label_words", "label_tokens", "demonstrations")
PATHS = ("data_dir", "train_file", "validation_file", "test_file")
"""Settings that say where rows are, and not which."""
OWN_JUDGES = ("validation_file", "test_file")
OF_VALIDATION = ("patience", "select", "eval_every", "eval_rows", "validation_file")
OF_SAMPLING = ("top_k", "top_p", "sampling_seed")


def unused(settings: Settings) -> list[str]:
    """A sentence for each setting that was given and that nothing in this job uses."""
    return list(useless(settings).values())


def unused_here(settings: Settings, kind: str, form: str, decoder: bool = False) -> list[str]:
    """The same for what depends on the task's kind, and on how the host answers: with labels, in text, at a mask."""
    return list(useless_here(settings, kind, form, decoder).values())


def useless(settings: Settings) -> dict[str, str]:
    """Settings that nothing in a job uses, each with a sentence that says so."""
    mode = settings.mode
    needs = {
        "mode fusion": ("members", *FusionOptions.model_fields) if mode != "fusion" else (),
        "mode inlay": ("method", "options", "start") if mode != "inlay" else (),
        "mode inlay or fusion": ("norms",) if mode not in ("inlay", "fusion") else (),
        "method mixture": ("consistency", "consistency_detach") if (mode, settings.method) != MIXTURE else (),
        "rows or per_class": ("rows_seed",) if settings.rows is None and settings.per_class is None else (),
        "`train_file`": OWN_JUDGES if settings.train_file is None else (),
        "answering generation": OF_WRITING if settings.answering != "generation" else (),
        "more than one beam": ("length_penalty",) if settings.beams == 1 else (),
        "validation rows that choose the best state": OF_VALIDATION if not settings.validation else (),
        "answer_with words": OF_WORDS if settings.answer_with != "words" else (),
        "sampling": OF_SAMPLING if not settings.sampling else (),
        "a head that pools": ("head_layers", "head_dropout") if settings.pooling == "host" else (),
    }
    return _refusals(settings, needs)


def useless_here(settings: Settings, kind: str, form: str, decoder: bool = False) -> dict[str, str]:
    """The same for what depends on the task's kind, and on how the host answers: with labels, in text, at a mask."""
    text = form == "text"
    needs = {
        "a host that answers in text, such as T5 or GPT-2": () if text else OF_TEXT,
        "a decoder that answers in text, such as GPT-2": () if decoder or not text else ("packing",),
        "a decoder that answers in text, or answer_with words": ("template",) if form == "labels" else (),
        "a head, and this host answers without one": OF_A_HEAD if form != "labels" else (),
        "labels and a head that chooses one": (
            () if kind == "classification" and not text else ("class_weights", "pairs")
        ),
        "labels or words to choose from": () if text or kind in ("classification", "tags") else ("label_smoothing",),
        "contexts to read in windows (kind spans)": () if kind == "spans" else ("stride",),
        "labels or choices to rank": () if kind in ("classification", "choice") else ("answering",),
        f"a kind that has labels ({', '.join(LABELLED)})": () if kind in LABELLED else ("labels",),
        "kind choice": () if kind == "choice" else ("choices",),
        "a kind other than choice, whose second texts are the choices": () if kind != "choice" else ("pair",),
    }
    return _refusals(settings, needs)


def _refusals(settings: Settings, needs: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    said = given_to(settings)
    return {n: _refusal(n, need, said[n]) for need, names in needs.items() for n in names if n in said}


MIXTURE = ("inlay", "mixture")


def given_to(settings: Settings) -> Mapping[str, Any]:
    """Settings that differ both from their defaults and from what the recipe says; of a joint run those of all."""
    fields = Settings.model_fields
    usual = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    asked = Settings.model_construct(**usual | settings.by_recipe()).model_dump(warnings=False)
    found = settings.model_dump(include=set(fields))
    return {name: value for name, value in found.items() if value not in (usual[name], asked[name])}


def _refusal(name: str, need: str, value: Any) -> str:
    return f"`{name}` is {shown(value)}, but nothing would use it: it needs {need}. Leave it out."


def shown(value: Any) -> str:
    """A setting's value for people; a path as it was given."""
    return repr(str(value) if isinstance(value, Path) else value)
