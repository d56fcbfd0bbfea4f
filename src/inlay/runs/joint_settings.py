"""Settings of a joint run: those of a single one for all tasks together, what each task has of its own, and the draws.

host: bert-base-uncased            tasks: [rte, mnli, sst2] is enough where all of them are alike
tasks:
  rte: {max_length: 256}
  mnli: {cap: 20000}
  mine: {train_file: mine.csv, text: review, label: stars, head_layers: 2}
out: runs/joint
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.data.sources import Data
from inlay.errors import ConfigError, InlayError, nearest
from inlay.recipes import read_recipe
from inlay.runs.settings import FusionOptions, Settings, as_table, given_to, said_with_recipe, shown
from inlay.training.recipe import Generation

if TYPE_CHECKING:
    from inlay.data.mixing import Sampling

Tasks = tuple[tuple[str, dict[str, Any]], ...]
JointMode = Literal["inlay", "head", "full", "fusion", "mt-a"]
"""Every mode that a run may have; one of several tasks is no fusion."""
OF_ONE_TASK = (
    "task", "train_file", "validation_file", "test_file", "hub", "kind", "text", "pair", "choices", "label", "labels",
    "prompt", "class_weights",
)  # fmt: skip
"""Settings that have a meaning for one task only."""
OF_ONE_RUN = ("name", "start", "members", *FusionOptions.model_fields)
"""Settings of single runs."""
OWN = (
    *Data.model_fields, "cap", "weight", "max_length", "stride", "label_smoothing", "class_weights", "select",
    "answering", *Generation.model_fields, "method", "options", "norms", "pooling", "head_layers",
    "head_dropout", "eval_rows", "consistency", "consistency_detach",
)  # fmt: skip
"""What a task may have of its own."""


class JointSettings(Settings):
    """What to train together, on what, how, and where to."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    tasks: Tasks
    """Several tasks, trained together on one host; in YAML each can have its own settings."""
    mode: JointMode = "mt-a"  # type: ignore[assignment]
    """What to train: inlay, head (only a head), full (everything) or fusion (over members). For several tasks: mt-a
    (the default: the host and an inlay per task), inlay (the host stays frozen), full (no inlays) or head."""
    alpha: float | Literal["annealed"] = "annealed"
    """Several tasks: each is sampled in proportion to (its number of rows)^alpha, from 0 (evenly) to 1 (by size); by
    default annealed from 1 to 0.2 over the epochs."""
    task_temperature: float | None = None
    """Several tasks: sample them with alpha = 1 / temperature."""
    weights: dict[str, float] | None = None
    """Several tasks: sample them in proportion to these numbers instead, such as rte=1."""
    cap: int | None = None
    """Several tasks: count each task as at most this many rows when sampling."""
    mixed: bool = False
    """Several tasks: mix rows of several tasks in a step, instead of one task per step."""
    steps_per_epoch: int | None = Field(default=None, ge=1)
    """Several tasks: steps per epoch; by default the number of rows (as many as the cap leaves) over the batch size."""
    stop_on: str = "mean"
    """Several tasks: whose score chooses the best state and decides on early stopping: mean (of all), or one task's
    name."""
    host_lr: float | None = Field(default=None, gt=0, le=1e30)
    """Mode mt-a: the host's own learning rate; by default that of full fine-tuning."""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: Any) -> Any:
        return said_with_recipe({"mode": "mt-a"} | given if isinstance(given, dict) else given)

    @field_validator("mode")
    @classmethod
    def _of_several(cls, mode: str) -> str:
        if mode == "fusion":
            raise ValueError("a fusion is trained for one task: inlay fuse, over what several tasks learned")
        return mode

    @field_validator("tasks", mode="before")
    @classmethod
    def _entries(cls, given: Any) -> Any:
        """From names, from a table of settings by name, or as this class has it."""
        if isinstance(given, str):
            given = [part.strip() for part in given.split(",") if part.strip()]
        if isinstance(given, dict):
            given = list(given.items())
        if not isinstance(given, list | tuple):
            return given
        pairs = [(each, {}) if isinstance(each, str) else each for each in given]
        return tuple((pair[0], {} if pair[1] is None else pair[1]) if _is_pair(pair) else pair for pair in pairs)

    @field_validator("weights", mode="before")
    @classmethod
    def _weight_pairs(cls, given: Any) -> Any:
        return as_table(given)

    @model_validator(mode="after")
    def _one_source(self) -> JointSettings:
        """Each task says by itself where its rows are."""
        return self

    def drawing(self) -> Sampling:
        """How tasks are drawn."""
        from inlay.data.mixing import Sampling

        own_caps = {name: own["cap"] for name, own in self.tasks if own.get("cap") is not None}
        caps: Any = self.cap
        if own_caps:
            caps = (dict.fromkeys(dict(self.tasks), self.cap) if self.cap is not None else {}) | own_caps
        weights = dict(self.weights or {})
        for name, own in self.tasks:
            if own.get("weight") is not None:
                weights[name] = own["weight"]
        try:
            found = Sampling(alpha=self.alpha, temperature=self.task_temperature, cap=caps, weights=weights or None)
        except ConfigError as error:  # under the names that they have here
            told = str(error).replace("Sampling.temperature", "`task_temperature`")
            raise ConfigError(re.sub(r"\bSampling\.(\w+)", r"`\1`", told)) from None
        found.check(dict(self.tasks))
        return found

    def task_settings(self, name: str, own: Mapping[str, Any]) -> Settings:
        """What a run of this task alone would be told, on the same host."""
        odd = [word for word in own if word not in (*OWN, "host")]
        if odd:
            raise ConfigError("\n".join(f"tasks.{name} has no setting {word!r}.{nearest(word, OWN)}" for word in odd))
        if own.get("host", self.host) != self.host:
            raise ConfigError(
                f"tasks.{name} names the host {own['host']}, but all tasks of a joint run share one, here {self.host}."
            )
        fields = {n for n in Settings.model_fields if n not in (*OF_ONE_TASK, *OF_ONE_RUN)}
        common = self.model_dump(include=fields | {"out"}) | {"recipe": None, "mode": single_mode(self.mode)}
        if own.get("train_file") is not None or own.get("hub") is not None:
            common.pop("data_dir", None)
        if self.mode in ("full", "head"):
            common = {n: value for n, value in common.items() if n not in ("method", "options", "norms")}
        said = {n: value for n, value in own.items() if n not in ("cap", "weight", "host")}
        try:
            return Settings(**common | {"task": name} | said)
        except InlayError as error:
            raise ConfigError(str(error).replace("Settings", f"tasks.{name}")) from None

    def of_no_use(self) -> list[str]:
        """A sentence for each setting that was given to the whole run and that nothing in it uses."""
        said = given_to_all(self)
        found = [
            f"`{name}` is {shown(said[name])}, but it belongs to one task: say it there, as tasks.<task>.{name}."
            for name in OF_ONE_TASK if name in said
        ]  # fmt: skip
        found += [
            f"{name} is {shown(said[name])}, but a joint run has no use for it." for name in OF_ONE_RUN if name in said
        ]
        if self.mode != "mt-a" and self.host_lr is not None:
            found.append(f"`host_lr` is {self.host_lr}, but only mode mt-a has one beside `lr`.")
        return found


def single_mode(mode: str) -> str:
    """The mode of a single run whose inlay is like that of a task in a joint run."""
    return "inlay" if mode == "mt-a" else mode


def given_to_all(settings: JointSettings) -> dict[str, Any]:
    """What was said of all tasks together; the mode is the run's own."""
    return {name: value for name, value in given_to(settings).items() if name != "mode"}


def settings_from(said: Mapping[str, Any]) -> Settings:
    """Settings of a single run, or of a joint one where tasks are named."""
    if said.get("tasks") is not None:
        return JointSettings(**said)
    if said.get("recipe") is not None and JOINT_ONLY & read_recipe(str(said["recipe"]))["settings"].keys():
        raise ConfigError(f"the recipe {said['recipe']} is for several tasks: name them with `tasks`.")
    only = [name for name in JOINT_ONLY if said.get(name) is not None]
    if only or said.get("mode") == "mt-a":
        named = ", ".join(f"`{name}`" for name in only) or "mode mt-a"
        raise ConfigError(f"{named} needs several tasks: name them with `tasks`.")
    return Settings(**said)


JOINT_ONLY = {name: None for name in JointSettings.model_fields if name not in Settings.model_fields}.keys()
"""Settings that only joint runs have."""


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2
