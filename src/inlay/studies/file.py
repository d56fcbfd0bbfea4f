"""A study's file: hosts × tasks × ways × row counts × seeds, as YAML.

    hosts: {minilm: path/or/name}
    data_dir: data
    tasks: {mnli: , rte: {max_length: 128}}          what `inlay train` takes, for this task alone
    groups: {sources: [mnli], targets: [rte]}
    settings: {batch_size: 16}                       … for every cell
    seeds: [0, 1, 2]
    rows: [100, all]
    ways:
      full:   {kind: full, grid: {lr: [2e-5, 5e-5]}}
      source: {method: pfeiffer, tasks: sources, rows: [all], seeds: [0]}
      single: {method: pfeiffer}
      fused:  {kind: fusion, members: [{way: source, tasks: sources}, {way: single}]}

A way's own words are the fields of `Way`; every other word in it is a setting of `inlay train`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inlay.config import Config
from inlay.data.task import METRICS
from inlay.errors import ConfigError, InlayError, nearest
from inlay.runs.joint_settings import JOINT_ONLY
from inlay.runs.settings import PATHS, Settings
from inlay.runs.yaml_text import read_yaml
from inlay.training.recipe import LOSS, MEAN

ALL = "all"
"""Every training row, every task."""
Rows = int | Literal["all"]
Kind = Literal["inlay", "head", "full", "fusion", "sequential", "joint", "embeddings", "setfit", "routing"]
DECIDED = ("host", "out", "task", "mode", "members", "start", "from", "rows", "seed", "name", "trackers", "threads")
"""Settings that the study itself says."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,47}")


class Member(Config):
    """Cells of another way that this one is made of."""

    way: str
    """The way that trains them."""
    tasks: str | tuple[str, ...] | None = None
    """For these tasks, or this group, without the target itself; none: for the target itself."""


class Way(Config):
    """One way to learn a task: a row of the table."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: Kind = "inlay"
    """inlay, head, full, fusion, sequential, joint (of all its tasks), embeddings (a logistic regression),
    setfit (by its own library), routing (of a mixture)."""
    title: str | None = None
    """What tables call it; by default its name."""
    show: bool = True
    """Whether tables have it; what only serves others need not be shown."""
    tasks: str | tuple[str, ...] | None = None
    """The tasks, or the group of tasks, that it learns; by default the group `targets`, or all."""
    rows: tuple[Rows, ...] | None = Field(default=None, min_length=1)
    """Numbers of training rows; by default those of the study."""
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Seeds; by default those of the study."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Settings to choose from by the validation rows; options.reduction reads inside options."""
    members: tuple[Member, ...] = ()
    """Kind fusion: what is fused, the target's own last."""
    start: tuple[Member, ...] = ()
    """Kind sequential: what it starts from (`from` in the file), one or several; the best by validation rows."""
    joint: Literal["mt-a", "inlay", "full", "head"] | None = None
    """Kind joint: what is trained: mt-a (the default: the host, and an inlay for each task), inlay, full or head."""
    of: str | None = None
    """Kind routing: the way whose mixtures are asked."""
    routing: Literal["merged", "random", "first", "ensemble"] | None = None
    """Kind routing: by which of their modules."""
    passes: int = Field(default=4, ge=1)
    """Kind routing: an ensemble's passes."""
    by_rows: dict[Rows, dict[str, Any]] = Field(default_factory=dict)
    """Settings that hold with one number of training rows."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of `inlay train`; in the file they stand in the way itself."""

    @model_validator(mode="before")
    @classmethod
    def _settings_apart(cls, given: Any) -> Any:
        if given is None:
            return {}
        if not isinstance(given, dict):
            return given
        said = {("start" if name == "from" else str(name)): value for name, value in given.items()}
        own = {name: value for name, value in said.items() if name in cls.model_fields}
        other = {name: value for name, value in said.items() if name not in cls.model_fields}
        given = own.get("settings", {})
        return own | {"settings": given | other if isinstance(given, dict) else given}

    @field_validator("start", mode="before")
    @classmethod
    def _one_start_is_a_list(cls, given: Any) -> Any:
        return () if given is None else given if isinstance(given, list | tuple) else [given]

    @field_validator("tasks", "rows", "seeds", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, int) or given == ALL else given

    @field_validator("rows", "seeds")
    @classmethod
    def _once(cls, given: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return given if given is None else _each_once(given)

    def needs(self) -> list[str]:
        """The ways that this one is made of."""
        found = [member.way for member in self.members]
        found += [member.way for member in self.start]
        return found + ([self.of] if self.of is not None else [])


class Study(Config):
    """Everything that a study's file says."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """The study's name; by default that of its file. A study's folder belongs to one name."""
    about: str = ""
    """A sentence for the page."""
    hosts: dict[str, str] = Field(min_length=1)
    """Hosts by the names that tables have: a folder or a model of the hub."""
    data_dir: Path | None = None
    """Where the rows of tasks are that name no place of their own."""
    tasks: dict[str, dict[str, Any]] = Field(min_length=1)
    """Tasks with their settings."""
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Names for several tasks."""
    ways: dict[str, Way] = Field(min_length=1)
    """The ways, in the table's order."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Every cell is run with each."""
    rows: tuple[Rows, ...] = Field(default=("all",), min_length=1)
    """Numbers of training rows; each seed draws its own. Validation and judged rows do not depend on them."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of `inlay train` for every cell."""
    by_rows: dict[Rows, dict[str, Any]] = Field(default_factory=dict)
    """Settings that hold with one number of training rows."""
    search: Literal["each", "first", "mean"] = "each"
    """Who chooses from a grid: each seed for itself, the first for all, or the mean of all that have not failed."""
    tries: int = Field(default=3, ge=1)
    """How often a cell that breaks is run before it is shown as failed."""
    keep: Literal["inlays", "all"] = "inlays"
    """inlays: hosts after full fine-tuning are deleted when nothing starts from them. all: they are kept."""
    against: str | None = None
    """The way that others are compared with: arrows, tests, differences."""
    score: str = "main"
    """What tables show: main (a task's main metric), mean (of all its metrics), or one metric's name."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _without_settings(cls, given: Any) -> Any:
        if isinstance(given, list):
            given = dict.fromkeys(given)
        return {name: {} if of is None else of for name, of in given.items()} if isinstance(given, dict) else given

    @field_validator("seeds", "rows", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, int) or given == ALL else given

    @field_validator("seeds", "rows")
    @classmethod
    def _once(cls, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return _each_once(given)

    def tasks_of(self, named: str | Sequence[str] | None) -> tuple[str, ...]:
        """Tasks by the name of a group, or by their own."""
        if named is None:
            named = "targets" if "targets" in self.groups else ALL
        if isinstance(named, str):
            if named == ALL:
                return tuple(self.tasks)
            return tuple(dict.fromkeys(self.groups.get(named, (named,))))
        return tuple(dict.fromkeys(task for name in named for task in self.tasks_of(name)))

    def rows_of(self, way: str) -> tuple[int | None, ...]:
        """A way's numbers of training rows, None for all."""
        return tuple(None if rows == ALL else int(rows) for rows in self.ways[way].rows or self.rows)

    def seeds_of(self, way: str) -> tuple[int, ...]:
        return self.ways[way].seeds or self.seeds


def _each_once(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same cell twice would be one cell, and its table would wait for the other for ever."""
    twice = [one for one in dict.fromkeys(given) if given.count(one) > 1]
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))} is there more than once")
    return given


def read_study(path: str | Path, *, hosts: Mapping[str, str] | None = None, data_dir: Path | None = None) -> Study:
    """A study from its file, or from the one that ships under this name; every mistake in it is told at once.

    hosts, data_dir: where they are on this machine, if not where the file says.
    """
    file = Path(path)
    if not file.is_file() and str(path) in study_names():
        text, source = files("inlay.recipes").joinpath(f"studies/{path}.yaml").read_text(encoding="utf-8"), str(path)
    else:
        if not file.is_file():
            raise ConfigError(
                f"no study {str(path)!r}: neither a file nor one that ships.{nearest(str(path), study_names())}"
            )
        try:
            text, source = file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
    return study_from(read_yaml(text, source), file.name.removesuffix(".yaml"), hosts=hosts, data_dir=data_dir)


def study_from(
    given: Any, name: str = "study", *, hosts: Mapping[str, str] | None = None, data_dir: Path | None = None
) -> Study:
    """A study from what its file holds."""
    if not isinstance(given, dict):
        raise ConfigError("a study's file has names such as hosts, tasks and ways, each with what belongs to it.")
    said = {"name": name} | {str(word): value for word, value in given.items()}
    if hosts:
        said["hosts"] = (said.get("hosts") or {}) | dict(hosts)
    if data_dir is not None:
        said["data_dir"] = data_dir
    study = Study(**said)
    problems = mistakes(study)
    if problems:
        raise ConfigError("\n".join(problems))
    return study


def study_names() -> tuple[str, ...]:
    """Every study that ships with Inlay."""
    there = (file.name for file in files("inlay.recipes").joinpath("studies").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in there if name.endswith(".yaml")))


# what is wrong in it


def mistakes(study: Study) -> list[str]:
    """A sentence for each thing in the file that has no meaning."""
    found = wrong_names(study) + _settings(study) + _row_numbers(study)
    found = found or _stages(study)  # what a cycle is made of needs names that are known
    found = found or [told for way in study.ways for told in _way(study, way)]
    return list(dict.fromkeys(found))


def wrong_names(study: Study) -> list[str]:
    """Names that cannot be names, and those of things that the study does not have."""
    found = []
    for what, names in (("host", study.hosts), ("task", study.tasks), ("way", study.ways), ("group", study.groups)):
        found += [
            f"{what} {name!r}: a name has letters, digits, spaces and . _ + -, at most 48." for name in names
            if not NAME.fullmatch(name)
        ]  # fmt: skip
    tasks, ways = (*study.tasks, *study.groups, ALL), study.ways
    for name, members in study.groups.items():
        if name in study.tasks:
            found.append(f"group {name!r} has the name of a task.")
        if name == ALL:
            found.append(f"group {name!r}: that is what all tasks are called; give it another name.")
        if not members:
            found.append(f"group {name!r} has no task.")
        found += [f"group {name!r}: no task {task!r}.{nearest(task, study.tasks)}" for task in members
                  if task not in study.tasks]  # fmt: skip
    asked: list[tuple[str, str]] = []
    for name, way in ways.items():
        for named in (way.tasks, *(m.tasks for m in (*way.members, *way.start))):
            asked += [(f"way {name!r}", t) for t in ([named] if isinstance(named, str) else named or ())]
        found += [
            f"way {name!r}: no way {other!r}.{nearest(other, ways)}" for other in way.needs() if other not in ways
        ]
    found += [
        f"{where}: no task or group {task!r}.{nearest(task, tasks)}" for where, task in asked if task not in tasks
    ]
    if study.against is not None and study.against not in ways:
        found.append(f"against: no way {study.against!r}.{nearest(study.against, ways)}")
    elif study.against is not None and not ways[study.against].show:
        found.append(f"against: tables do not have way {study.against!r} (show: false), nor what is compared with it.")
    scores = ("main", MEAN, LOSS, *dict.fromkeys(metric for of in METRICS.values() for metric in of))
    if study.score not in scores:
        found.append(f"score: no score {study.score!r}.{nearest(study.score, scores)}")
    return found


def _settings(study: Study) -> list[str]:
    """Settings that `inlay train` does not have, or that the study itself says."""
    places: list[tuple[str, Mapping[str, Any]]] = [("settings", study.settings)]
    places += [(f"task {name!r}", said) for name, said in study.tasks.items()]
    places += [(f"by_rows {rows}", said) for rows, said in study.by_rows.items()]
    for name, way in study.ways.items():
        places += [(f"way {name!r}", way.settings)]
        places += [(f"way {name!r}, by_rows {rows}", said) for rows, said in way.by_rows.items()]
        if way.kind != "embeddings":
            places += [(f"way {name!r}, grid", {key.partition(".")[0]: None for key in way.grid})]
    single = [name for name in Settings.model_fields if name not in DECIDED]
    joint = {f"way {name!r}" for name, way in study.ways.items() if way.kind == "joint"}
    found = []
    for where, said in places:
        known = [*single, *(name for name in JOINT_ONLY if name != "tasks")] if where.split(",")[0] in joint else single
        own = Way.model_fields if where.startswith("way") else Study.model_fields if where == "settings" else {}
        for name in said:
            if name in DECIDED:
                found.append(f"{where}: {name} is what the study itself says; leave it out.")
            elif name in PATHS and where.startswith(("way", "by_rows")):  # a cell is known by its task's rows
                found.append(f"{where}: {name} says where rows are, which a task does: tasks: {{name: {{{name}: …}}}}.")
            elif name in own and name not in known:
                whose = "way" if where.startswith("way") else "study"
                found.append(f"{where}: {name} is no setting, but a word of the {whose} itself.")
            elif name not in known:
                found.append(f"{where}: no setting {name!r}.{nearest(str(name), [*known, *own])}")
    return found


def _row_numbers(study: Study) -> list[str]:
    """Settings for a number of training rows that nothing has."""
    every = {name: way.rows or study.rows for name, way in study.ways.items()}
    of_all = tuple(dict.fromkeys(rows for numbers in every.values() for rows in numbers))
    places = [("by_rows", study.by_rows, of_all)]
    places += [(f"way {name!r}, by_rows", way.by_rows, every[name]) for name, way in study.ways.items()]
    return [
        f"{where} {rows}: there are only {', '.join(map(str, there))} training rows."
        for where, said, there in places for rows in said if rows not in there
    ]  # fmt: skip


def _stages(study: Study) -> list[str]:
    """Ways that need themselves."""
    done: set[str] = set()

    def cycle(way: str, path: tuple[str, ...]) -> str | None:
        if way in path:
            return " → ".join((*path[path.index(way) :], way))
        if way in done:
            return None
        found = next((c for other in study.ways[way].needs() if (c := cycle(other, (*path, way)))), None)
        done.add(way)
        return found

    cycles = [found for way in study.ways if (found := cycle(way, ()))]
    return [f"the ways {found} need each other in a circle, so that none can be first." for found in cycles[:1]]


def _way(study: Study, name: str) -> list[str]:
    """What is wrong with one way: with what the file says of it, or else with the cells that it would have."""
    way, where = study.ways[name], f"way {name!r} (kind {study.ways[name].kind})"
    found = _words_by_kind(way, where) + _foundations(study, way, where) + _joint_members(study, way, where)
    found += _routed(study, way, where) + _grid(way, where) + _without_use(way, where)
    return found or _cells(study, name, where)


def _words_by_kind(way: Way, where: str) -> list[str]:
    """What its kind needs and it lacks, and what it has that only other kinds use."""
    found = []
    for kind, field in (("fusion", "members"), ("sequential", "start"), ("routing", "of")):
        spelt = "from" if field == "start" else field
        if way.kind == kind and not getattr(way, field):
            found.append(f"{where} needs {spelt}.")
        if way.kind != kind and getattr(way, field):
            found.append(f"{where} does not use {spelt}; kind {kind} does.")
    if way.kind != "joint" and way.joint is not None:
        found.append(f"{where} does not use joint; kind joint does.")
    if way.kind != "routing" and way.routing is not None:
        found.append(f"{where} does not use routing; kind routing does, of a way that trains mixtures.")
    if way.routing != "ensemble" and "passes" in way.model_fields_set:
        found.append(f"{where} does not use passes; kind routing with routing: ensemble does.")
    return found


def _routed(study: Study, way: Way, where: str) -> list[str]:
    """Kind routing: whether it says how, and whether there is a mixture to be routed."""
    if way.kind != "routing":
        return []
    found = [f"{where} needs routing: merged, random, first or ensemble."] if way.routing is None else []
    if way.of and not _is_mixture(study, study.ways[way.of]):
        found.append(f"{where}: of is {way.of!r}, which trains no mixture.")
    return found


def _grid(way: Way, where: str) -> list[str]:
    """Grids that have nothing to choose from, or that the kind cannot choose by."""
    found = [f"{where}: the grid's {key} has nothing to choose from." for key, values in way.grid.items() if not values]
    if way.kind == "embeddings" and set(way.grid) - {"C"}:
        found.append(f"{where}: its grid can have C alone, the inverse strength of the regression's penalty.")
    elif way.kind == "embeddings" and (wrong := [c for c in way.grid.get("C", ()) if not _is_strength(c)]):
        found.append(f"{where}: the grid's C has numbers above 0, got {', '.join(map(repr, wrong))}.")
    return found


def _without_use(way: Way, where: str) -> list[str]:
    """Settings of `inlay train` in ways that do not train as it does."""
    from inlay.studies.ways import USUAL  # which reads files like this one

    found = []
    if way.kind == "setfit" and (unknown := _named(way) - {"recipe", *USUAL}):
        found.append(f"{where} has no use for {', '.join(sorted(unknown))}: SetFit's own are {', '.join(USUAL)}.")
    own = {"recipe", *(way.grid if way.kind == "embeddings" else ())}
    if way.kind in ("embeddings", "routing") and (unused := _named(way) - own):
        found.append(f"{where} does not train the host, so it has no use for {', '.join(sorted(unused))}.")
    return found


def _cells(study: Study, name: str, where: str) -> list[str]:
    """What no cell of a way could be run with, each with the tasks that it is about."""
    from inlay.studies.ways import drafts, slots_of  # which read files like this one

    problems: dict[str, list[str]] = {}
    tried: set[tuple[str, int | None]] = set()
    for slot in slots_of(study, name):
        if (alike := (slot.task, slot.rows)) in tried:  # seeds and hosts change nothing here
            continue
        tried.add(alike)
        try:
            made = drafts(study, slot)
            if len(made) > 1 and not made[0].checked().validation:
                raise ConfigError("without validation rows (validation: false) there is nothing to choose by: no grid.")
            for draft in made:
                draft.check()
                if draft.work == "part" and draft.of is not None:
                    for whole in drafts(study, draft.of):
                        whole.check()
        except InlayError as error:
            told = str(error).replace("Settings has", "there is").replace("Settings.", "")
            for line in told.split("\n"):
                problems.setdefault(line, []).append(slot.task)
    every = set(study.tasks_of(study.ways[name].tasks))
    return [f"{where}{_those(tasks, every)}: {line}" for line, tasks in problems.items()]


def _is_strength(value: Any) -> bool:
    """1e3 is a word in YAML and a number to everybody else."""
    try:
        return 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False


def _named(way: Way) -> set[str]:
    """Every setting that a way names, wherever in it."""
    return {*way.settings, *way.grid, *(name for said in way.by_rows.values() for name in said)}


def _foundations(study: Study, way: Way, where: str) -> list[str]:
    """A fusion mixes plain inlays, and an inlay goes on from one: other ways leave none, or one over others."""
    return [
        f"{where}: {name!r} (kind {study.ways[name].kind}) leaves no inlay to build on."
        for name in dict.fromkeys(member.way for member in (*way.members, *way.start))
        if study.ways[name].kind not in ("inlay", "sequential", "joint")
    ]


def _joint_members(study: Study, way: Way, where: str) -> list[str]:
    """A joint way has a host of its own, so that what is made of it is made of nothing else."""
    joint = [name for name in dict.fromkeys(way.needs()) if study.ways[name].kind == "joint"]
    found = [
        f"{where}: {name!r} trains {study.ways[name].joint} and leaves no inlays to build on." for name in joint
        if study.ways[name].joint in ("full", "head")
    ]  # fmt: skip
    if joint and len(set(way.needs())) > 1:
        others = ", ".join(repr(name) for name in dict.fromkeys(way.needs()) if name != joint[0])
        found.append(f"{where}: {joint[0]!r} trains its own host, so nothing of {others} can be beside it.")
    return found


def _those(tasks: Sequence[str], every: set[str]) -> str:
    """Which tasks a mistake is about, where it is not all of them."""
    return "" if set(tasks) == every else f", task {', '.join(dict.fromkeys(tasks))}"


def _is_mixture(study: Study, way: Way) -> bool:
    said = study.settings | way.settings
    return said.get("method", "mixture" if str(said.get("recipe", "")).startswith("adamix") else None) == "mixture"
