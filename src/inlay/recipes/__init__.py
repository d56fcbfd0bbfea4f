"""Named recipes: what a paper's experiments were run with, as YAML beside this file, each number with its source.

settings   hold for every job
modes      … for jobs of one mode: inlay, head, full, fusion, mt-a
methods    … for one method (modes inlay and mt-a)
tasks      … for one task

Later ones win over earlier ones, and what a user says wins over all of them; a method's `options` are joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from inlay.errors import ConfigError, nearest

PARTS = ("about", "settings", "modes", "methods", "tasks")
WITH_A_METHOD = ("inlay", "mt-a")
USUAL = {"mode": "inlay", "method": "pfeiffer", "task": "own"}
"""What decides which parts of a recipe apply, where neither the user nor the recipe says it."""


@cache
def recipe_names() -> tuple[str, ...]:
    """Every recipe that ships with Inlay."""
    names = (file.name for file in files("inlay.recipes").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@cache
def read_recipe(name: str) -> Mapping[str, Any]:
    """A recipe as it is written; every part is there."""
    if name not in recipe_names():
        raise ConfigError(f"no recipe {name!r}.{nearest(name, recipe_names())}")
    found = yaml.safe_load(files("inlay.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return {part: found.get(part) or {} for part in PARTS}


def recipe_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says of a job of which `given` is known: at least its mode, method and task, where they matter."""
    recipe = read_recipe(name)
    found = dict(recipe["settings"])
    which = {what: given.get(what) or found.get(what) or usual for what, usual in USUAL.items()}
    found = overlaid(found, recipe["modes"].get(which["mode"], {}))
    if which["mode"] in WITH_A_METHOD:
        found = overlaid(found, recipe["methods"].get(which["method"], {}))
    else:
        found.pop("method", None)  # other modes have none
    return overlaid(found, recipe["tasks"].get(which["task"], {}))


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, which win where both say something; so it is with tables inside them."""
    found = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = overlaid(found[name], value) if both else value
    return found
