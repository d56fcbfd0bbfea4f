"""The kinds of ways: which cells each one is made of. A new kind is one function here and one in `worker.py`.

A **slot** is a place in the table: host, task, way, number of training rows, seed. It is filled by the best, on the
validation rows, of its candidates: one for each point of the way's grid. A **draft** is a candidate that has no name
yet: what it needs from other slots is not chosen yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from inlay.errors import ConfigError
from inlay.recipes import overlaid
from inlay.runs.joint_settings import OF_ONE_TASK, OWN, JointSettings, settings_from
from inlay.runs.settings import FEW, PATHS, Settings, as_few, unused
from inlay.studies.file import Member, Study, Way
from inlay.studies.identity import HEAD_FIRST
from inlay.training.recipe import Recipe

Work = Literal["train", "joint", "part", "embeddings", "setfit", "route"]
JOINT = "(joint)"
"""Stands for the task in the slot of a joint training; each task of it is a slot of its own, filled from that one."""
NOT_DECIDING = {"out", "host", "recipe", "threads", "trackers", "members", "start", "name", *PATHS}
"""Settings that do not decide a result, or that stand in the identity in another form."""
DEFAULT_C = (0.01, 0.1, 1.0, 10.0, 100.0)
USUAL = {"lr": 2e-5, "epochs": 1, "batch_size": 16}
"""What SetFit does where a way says nothing; what a study says of its trainings is not for it."""


@dataclass(frozen=True, order=True)
class Slot:
    """A place in the table."""

    host: str
    task: str
    way: str
    rows: int | None
    """Training rows, None for all."""
    seed: int

    def __str__(self) -> str:
        return f"{self.host}/{self.task}/{self.way}/{self.rows or 'all'}/{self.seed}"


@dataclass(frozen=True)
class Draft:
    """A candidate of a slot, with what it needs as slots."""

    slot: Slot
    work: Work
    settings: Mapping[str, Any]
    """As `Settings` takes them, without host, out, members and start."""
    point: Mapping[str, Any] = field(default_factory=dict)
    """What the grid says here."""
    members: tuple[Slot, ...] = ()
    start: Slot | None = None
    of: Slot | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the work needs beyond settings."""

    def needs(self) -> tuple[Slot, ...]:
        return (*self.members, *(slot for slot in (self.start, self.of) if slot is not None))

    def checked(self) -> Settings:
        """The settings as a job would have them."""
        path = Path("unnamed")
        said: dict[str, Any] = {"host": self.slot.host, "out": path} | dict(self.settings)
        if self.members:
            said["members"] = (path,) * len(self.members)
        if self.start is not None:
            said["start"] = path
        return settings_from(said)

    def check(self) -> None:
        """Refuse what no job could be run with."""
        if self.work == "part":
            return
        settings = self.checked()
        if isinstance(settings, JointSettings):
            _check_joint(settings)
            return
        problems = unused(settings)
        if settings.splits == "official" and "test_file" not in self.settings and settings.train_file is not None:
            problems.append(
                "the validation rows would choose and judge at once. Give a test_file, or splits: held_out."
            )
        fits = self.may_be_few() and "batch_size" not in self.settings  # few rows are one batch
        if self.work == "train" and not fits and settings.rows is not None and settings.rows < settings.batch_size:
            problems.append(f"{settings.rows} training rows are fewer than a batch of {settings.batch_size}.")
        if self.settings["mode"] == "fusion" and len(self.members) < 2:
            problems.append(f"a fusion needs at least two members, here it has {len(self.members)}.")
        if self.settings["mode"] == "inlay" and self.start is None and self.work == "train":
            from inlay.methods import method_from  # torch only where something is checked

            method_from({"kind": settings.method, **settings.options})
        if problems:
            raise ConfigError("\n".join(problems))

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the result: those that differ from the defaults, without paths and names."""
        if self.work == "part":  # all else is in what it is a part of
            return dict(self.settings)
        said = _frozen(dict(self.settings) | {"seed": 0})
        found = dict(_deciding(said)) | {"seed": self.settings["seed"]}
        if self.may_be_few():
            found["few"] = dict(_deciding_few(said))
        return found

    def may_be_few(self) -> bool:
        """Whether the run may take the recipe for few rows by itself, which then decides as well."""
        named = self.settings.get("recipe") is not None or self.start is not None
        return self.work == "train" and not named and (self.slot.rows or 0) <= FEW


def slots_of(study: Study, name: str) -> list[Slot]:
    """Every slot that the table has for a way."""
    tasks = study.tasks_of(study.ways[name].tasks)
    every = product(study.hosts, tasks, (name,), study.rows_of(name), study.seeds_of(name))
    return [Slot(*found) for found in every]


def drafts(study: Study, slot: Slot) -> list[Draft]:
    """The candidates of a slot, in the grid's order."""
    return KINDS[study.ways[slot.way].kind](study, study.ways[slot.way], slot)


# the kinds


def _trained(mode: str) -> Callable[[Study, Way, Slot], list[Draft]]:
    def make(study: Study, way: Way, slot: Slot) -> list[Draft]:
        return [Draft(slot, "train", settings, point) for settings, point in _points(study, way, slot, mode)]

    return make


def _fusion(study: Study, way: Way, slot: Slot) -> list[Draft]:
    members = tuple(other for member in way.members for other in _others(study, slot, member))
    return [replace(draft, members=members) for draft in _trained("fusion")(study, way, slot)]


def _sequential(study: Study, way: Way, slot: Slot) -> list[Draft]:
    starts, found = [other for member in way.start for other in _others(study, slot, member)], []
    tasks = [start.task for start in starts]
    for start in starts:
        name = start.task if tasks.count(start.task) == 1 else f"{start.task} ({start.way})"
        for draft in _trained("inlay")(study, way, slot):
            found.append(replace(draft, start=start, point={"from": name, **draft.point}))
    if not found:
        raise ConfigError("there is no task to start from but the target itself.")
    return found


def _embeddings(study: Study, way: Way, slot: Slot) -> list[Draft]:
    """One cell tries every C on the same embeddings."""
    said = _of_rows(study, way, slot)
    return [Draft(slot, "embeddings", said, more={"C": list(map(float, way.grid.get("C", DEFAULT_C)))})]


def _setfit(study: Study, way: Way, slot: Slot) -> list[Draft]:
    said, found = _of_rows(study, way, slot), []
    own = way.settings | way.by_rows.get(slot.rows if slot.rows is not None else "all", {})
    for values in product(*way.grid.values()):
        point = dict(zip(way.grid, values, strict=True))
        more = USUAL | {name: said for name, said in (own | point).items() if name in USUAL and said is not None}
        checked = Recipe(**more)  # which knows what a rate and a batch may be
        found.append(Draft(slot, "setfit", said, point, more={name: getattr(checked, name) for name in USUAL}))
    return found


def _of_rows(study: Study, way: Way, slot: Slot) -> dict[str, Any]:
    """What is said of the rows, for ways that do not train as `inlay train` does."""
    ((settings, _),) = _points(study, way.model_copy(update={"grid": {}}), slot, "head")
    return {name: value for name, value in settings.items() if name in OF_ROWS}


def _routing(study: Study, way: Way, slot: Slot) -> list[Draft]:
    assert way.of is not None
    settings = {"task": slot.task, "mode": "inlay", "seed": slot.seed} | dict(study.tasks[slot.task])
    settings |= {"data_dir": study.data_dir} if _in_data_dir(study, settings) else {}
    more = {"routing": way.routing, "passes": way.passes}
    return [Draft(slot, "route", settings, of=_alike(study, slot, way.of, slot.task), more=more)]


def _joint(study: Study, way: Way, slot: Slot) -> list[Draft]:
    """One training of all tasks, and for each task what came of it."""
    if slot.task != JOINT:
        settings = {"task": slot.task, "mode": "inlay", "seed": slot.seed}
        return [Draft(slot, "part", settings, of=replace(slot, task=JOINT))]
    tasks = study.tasks_of(way.tasks)
    found = []
    for settings, point in _points(study, way, slot, way.joint or "mt-a"):
        common = {name: value for name, value in settings.items() if name not in OF_ONE_TASK}
        own = {name: value for name, value in settings.items() if name in OF_ONE_TASK and name != "task"}
        said = {task: own | {n: v for n, v in study.tasks[task].items() if n in OWN} for task in tasks}
        found.append(Draft(slot, "joint", common | {"tasks": said}, point))
    return found


def _check_joint(settings: JointSettings) -> None:
    problems = settings.of_no_use()
    if len(settings.tasks) < 2:
        problems.append(f"a joint training needs at least two tasks, here it has {len(settings.tasks)}.")
    for name, own in settings.tasks:
        settings.task_settings(name, own)
    settings.drawing()
    if problems:
        raise ConfigError("\n".join(problems))


KINDS: dict[str, Callable[[Study, Way, Slot], list[Draft]]] = {
    "inlay": _trained("inlay"),
    "head": _trained("head"),
    "full": _trained("full"),
    "fusion": _fusion,
    "sequential": _sequential,
    "joint": _joint,
    "embeddings": _embeddings,
    "setfit": _setfit,
    "routing": _routing,
}
DATA = (
    "hub", "data_dir", "train_file", "validation_file", "test_file", "kind", "text", "pair", "choices", "label",
    "labels", "metrics",
)  # fmt: skip
OF_ROWS = (
    "recipe", "task", "mode", "rows", "rows_seed", "per_class", "validation", "seed", "splits", "max_length",
    "eval_rows", *DATA,
)  # fmt: skip
"""Settings that say which rows there are, and nothing of a training."""


# their parts


def _points(study: Study, way: Way, slot: Slot, mode: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and grid point of each candidate."""
    rows: Any = slot.rows if slot.rows is not None else "all"
    layers = (
        {"splits": "held_out"}, study.settings, study.by_rows.get(rows, {}), study.tasks.get(slot.task, {}),
        way.settings, way.by_rows.get(rows, {}),
    )  # fmt: skip
    said: dict[str, Any] = {}
    for layer in layers:
        said = overlaid(said, layer)
    if mode not in ("inlay", "mt-a"):  # what a study says of every inlay's method is not for the others
        said = {
            name: value for name, value in said.items() if name not in ("method", "options") or name in way.settings
        }
    said |= {"task": slot.task, "mode": mode, "seed": slot.seed}
    if _in_data_dir(study, said):
        said["data_dir"] = study.data_dir
    if slot.rows is not None:
        said |= {"rows": slot.rows}
    if slot.rows is not None or said.get("per_class") is not None:  # each seed draws its own
        said.setdefault("rows_seed", slot.seed)
    for values in product(*way.grid.values()):
        point = dict(zip(way.grid, values, strict=True))
        whole = said
        for key, value in point.items():
            whole = overlaid(whole, _nested(key.split("."), value))
        yield whole, point


def _in_data_dir(study: Study, said: Mapping[str, Any]) -> bool:
    return study.data_dir is not None and not any(said.get(name) for name in ("hub", "train_file", "data_dir"))


def _others(study: Study, slot: Slot, member: Member) -> list[Slot]:
    """The slots that a member stands for; the target's own only where no tasks are named."""
    if member.tasks is None:
        return [_alike(study, slot, member.way, slot.task)]
    tasks = [task for task in study.tasks_of(member.tasks) if task != slot.task]
    return [_alike(study, slot, member.way, task) for task in tasks]


def _alike(study: Study, slot: Slot, way: str, task: str) -> Slot:
    """A slot of another way with the same rows and seed; or with the only ones that the other way has."""
    if task not in study.tasks_of(study.ways[way].tasks):
        raise ConfigError(f"it needs way {way!r} for the task {task!r}, which that way does not learn.")
    found: dict[str, Any] = {}
    for what, wanted, there in (("rows", slot.rows, study.rows_of(way)), ("seed", slot.seed, study.seeds_of(way))):
        if wanted not in there and len(there) != 1:
            listed = ", ".join("all" if one is None else str(one) for one in there)
            raise ConfigError(f"it needs way {way!r} with {what} {wanted or 'all'}, but that way only has {listed}.")
        found[what] = wanted if wanted in there else there[0]
    return Slot(slot.host, task, way, **found)


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nested(keys[1:], value) if len(keys) > 1 else value}


def _frozen(value: Any) -> Any:
    """As something that can be a key."""
    if isinstance(value, dict | Mapping):
        return ("{}", *((key, _frozen(inner)) for key, inner in value.items()))
    return ("[]", *map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple):
        return (
            {key: _thawed(inner) for key, inner in value[1:]} if value[0] == "{}" else [_thawed(v) for v in value[1:]]
        )
    return value


@cache
def _deciding(frozen: Any) -> dict[str, Any]:
    """Cells that differ by their seed alone are read once: a plan of thousands is made in a moment."""
    settings = settings_from({"host": "host", "out": Path("unnamed")} | _thawed(frozen))
    found = settings.model_dump(mode="json", exclude_defaults=True, exclude=NOT_DECIDING)
    if isinstance(settings, JointSettings):
        found["tasks"] = {task: {n: v for n, v in own.items() if n not in PATHS} for task, own in found["tasks"]}
    return _of_this_code(found)


@cache
def _deciding_few(frozen: Any) -> dict[str, Any]:
    """The same by the recipe for few rows. A setting that is said as its default differs from one that is not said."""
    settings = as_few(settings_from({"host": "host", "out": Path("unnamed")} | _thawed(frozen)))
    return _of_this_code(settings.model_dump(mode="json", exclude_defaults=True, exclude=NOT_DECIDING | {"seed"}))


def _of_this_code(found: dict[str, Any]) -> dict[str, Any]:
    """With the number of what `head_first` does here, where it is on."""
    return found | ({"head_first": HEAD_FIRST} if found.get("head_first") else {})
