"""All settings of a training job, flat: the same names in YAML and as flags."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, field_validator

from inlay.data.sources import Data
from inlay.errors import ConfigError
from inlay.training.recipe import Mode, Recipe

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Settings(Data, Recipe):
    """What to train, on what, how, and where to."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str
    """The pretrained host: a folder, or a model's name on the hub."""
    out: Path
    """The run folder to write to; it must be new or empty."""
    name: str | None = None
    """The inlay's name; by default that of the run folder."""
    mode: Mode = "inlay"
    """What to train: inlay, head (only a head), full (everything) or fusion (over members)."""
    method: str = "pfeiffer"
    """The inlay's method (see `inlay ls methods`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings, as in reduction=16."""
    members: tuple[Path, ...] = ()
    """Runs or inlays to fuse (mode fusion)."""
    head_layers: int = Field(default=1, ge=1)
    """How many linear layers the head has."""
    head_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout before each layer of the head."""
    threads: int | None = Field(default=None, ge=1)
    """Threads that torch uses; by default half of the cores."""
    trackers: tuple[Tracker, ...] = ()
    """Log to these as well, if they are installed: tensorboard, wandb, mlflow."""

    @field_validator("options", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        """From the command line options come as name=value, the values in YAML."""
        return named_values(given) if isinstance(given, list | tuple) else given


def named_values(pairs: Iterable[str]) -> dict[str, Any]:
    """name=value pairs; the values are YAML, so that numbers, lists and maps can be given."""
    found = {}
    for pair in pairs:
        name, equals, value = str(pair).partition("=")
        if not equals:
            raise ConfigError(f"an option is name=value, got {pair!r}")
        found[name.strip()] = yaml.safe_load(value)
    return found
