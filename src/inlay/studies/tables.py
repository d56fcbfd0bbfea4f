"""The tables of a study: ways × tasks for each host and number of rows, with what each difference is worth."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inlay.errors import ConfigError, nearest
from inlay.studies.cells import Result
from inlay.studies.plan import View
from inlay.studies.statistics import DRAWS, PER_TEST, Comparison, Spread, average_ranks, compare, holm, spread
from inlay.studies.ways import Slot
from inlay.training.recipe import LOSS, LOWER_IS_BETTER, mean_of

GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte")
"""As most papers average it: without WNLI."""
SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
NOTEWORTHY = 0.3
"""Points from which AdapterFusion draws an arrow up or down."""
SIGNIFICANT = 0.05
LOWER = (*LOWER_IS_BETTER, LOSS)
"""What is better where it is less."""
Place = tuple[str, str]
"""A way and a task."""


@dataclass(frozen=True)
class Entry:
    """One way on one task: the scores of its seeds, from 0 to 100."""

    scores: Mapping[int, float]
    """By seed; those that are done."""
    wanted: tuple[int, ...]
    """Every seed that there should be."""
    state: str
    """done, partly, failed, or waiting."""
    failed: tuple[int, ...] = ()
    against: Comparison | None = None
    """Compared with the reference, p after Holm's correction."""
    metric: str = ""
    cells: Mapping[int, str] = field(default_factory=dict)
    """The cell of each seed."""
    points: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What the grid chose for each seed."""

    @property
    def spread(self) -> Spread | None:
        return spread(list(self.scores.values())) if self.scores else None

    @property
    def arrow(self) -> str:
        """Better, worse or much the same as the reference, as AdapterFusion prints it."""
        if self.against is None:
            return ""
        points = round(100 * self.better, 6)  # 0.3 is 0.3, however it was summed
        return "↗" if points >= NOTEWORTHY else "↘" if points <= -NOTEWORTHY else "→"

    @property
    def better(self) -> float:
        """How much better than the reference, from -1 to 1."""
        if self.against is None:
            return 0.0
        return -self.against.difference if self.metric in LOWER else self.against.difference

    @property
    def significant(self) -> bool:
        return self.against is not None and self.against.p < SIGNIFICANT


@dataclass(frozen=True)
class Line:
    """One way over all tasks."""

    way: str
    title: str
    entries: Mapping[str, Entry]
    """By task; a task that the way does not learn is not there."""
    averages: Mapping[str, float | None]
    """Name of an average → its value; None where a task of it is missing."""
    rank: float | None
    wins: tuple[int, int, int] | None
    """Tasks on which it is better than the reference, not to be told from it, and worse, by the tests."""
    trained: float | None
    """Percent of the host's parameters."""
    seconds: float | None
    """Mean over cells that ran without a break."""
    megabytes: float | None
    """The highest peak."""


@dataclass(frozen=True)
class Table:
    """One host and number of training rows."""

    host: str
    rows: int | None
    tasks: tuple[str, ...]
    metrics: Mapping[str, str]
    judged: Mapping[str, int]
    """Judged rows of each task."""
    averages: tuple[str, ...]
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]
    reference: str | None
    tests: tuple[str, ...]
    """Which tests were used."""
    per_class: int | None = None
    """Training rows of each class, where the study says so of all ways."""
    seen_before: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → other task → how many of its judged rows are also training or validation rows of that one."""
    fewer_rows: Mapping[str, int] = field(default_factory=dict)
    """Tasks that have fewer training rows than the table, and how many."""

    @property
    def title(self) -> str:
        if self.rows is None and self.per_class is not None:
            return f"{self.host}, {self.per_class:,} training rows of each class"
        return f"{self.host}, {'all' if self.rows is None else format(self.rows, ',')} training rows"

    @property
    def ranked(self) -> tuple[str, ...]:
        """The tasks that ranks are of: those that every way with a score has one of."""
        scored = [{task for task, entry in line.entries.items() if entry.scores} for line in self.lines]
        return tuple(task for task in self.tasks if all(task in own for own in scored if own))

    @property
    def fewer_seeds(self) -> dict[str, int]:
        """Ways that are to have fewer seeds than the table, and how many."""
        planned = {line.title: max((len(e.wanted) for e in line.entries.values()), default=0) for line in self.lines}
        return {title: seeds for title, seeds in planned.items() if 0 < seeds < len(self.seeds)}

    def best(self, task: str) -> float | None:
        """The best mean of a task, as it is printed."""
        found = [entry.spread.mean for line in self.lines if (entry := line.entries.get(task)) and entry.spread]
        best = min if self.metrics.get(task) in LOWER else max
        return round(best(found), 1) if found else None


@dataclass(frozen=True)
class Asked:
    """What a table should show."""

    score: str | None = None
    """main, mean, a metric or loss (of the right labels, × 100); by default as the study says."""
    against: str | None = None
    ways: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    rows: tuple[int | None, ...] = ()
    """Numbers of training rows; None is all of them."""
    seeds: tuple[int, ...] = ()

    def wants(self, slot: Slot) -> bool:
        """Whether way, task, rows and seed are among those asked for; an empty choice is all of them."""
        of = ((self.ways, slot.way), (self.tasks, slot.task), (self.rows, slot.rows), (self.seeds, slot.seed))
        return all(not chosen or one in chosen for chosen, one in of)


WHOLE = Asked()
"""Everything that a study shows."""


def tables(view: View, asked: Asked = WHOLE) -> list[Table]:
    """Every table of a study, host by host, few rows first."""
    study = view.plan.study
    reference = asked.against or study.against
    if reference is not None and reference not in study.ways:
        raise ConfigError(f"no way {reference!r}.{nearest(reference, study.ways)}")
    score = asked.score or study.score
    _check_score(score, view.results.values())
    slots = chosen(view, asked)
    if asked.against is not None and all(slot.way != asked.against for slot in slots):
        raise ConfigError(f"the table has no way {asked.against!r} to compare with: name it in `ways`, too.")
    by_place: dict[tuple[str, int | None], list[Slot]] = {}
    for slot in slots:
        by_place.setdefault((slot.host, slot.rows), []).append(slot)
    places = sorted(by_place, key=lambda place: (list(study.hosts).index(place[0]), _all_last(place[1])))
    return [_table(view, *place, by_place[place], reference, score) for place in places]


def _check_score(score: str, results: Collection[Result]) -> None:
    """Refuse the name of a score that nothing has."""
    there = list(dict.fromkeys(["main", "mean", LOSS, *(name for result in results for name in result["scores"])]))
    if results and score not in there:
        raise ConfigError(f"no score {score!r}.{nearest(score, there)}")


def chosen(view: View, asked: Asked) -> list[Slot]:
    """The slots that were asked for; what is not there is refused."""
    study = view.plan.study
    for what, names, known in (("way", asked.ways, study.ways), ("task", asked.tasks, study.tasks)):
        wrong = [f"no {what} {name!r}.{nearest(name, known)}" for name in names if name not in known]
        if wrong:
            raise ConfigError("\n".join(wrong))
    ways = asked.ways or [name for name, way in study.ways.items() if way.show]
    visible = [slot for slot in view.plan.shown if slot.way in ways]
    for what, numbers, there in (
        ("seed", asked.seeds, {slot.seed for slot in visible}),
        ("number of rows", asked.rows, {slot.rows for slot in visible}),
    ):
        for number in numbers:
            if number not in there:
                every = ", ".join(map(_said, sorted(there, key=_all_last)))
                raise ConfigError(f"no {what} {_said(number)}; there are {every}.")
    found = [slot for slot in visible if asked.wants(slot)]
    if visible and not found:
        raise ConfigError("no cell has this way, task, number of rows and seed together.")
    return found


def _said(number: int | None) -> str:
    return "all" if number is None else str(number)


def _all_last(rows: int | None) -> float:
    """To sort by: all rows are the most."""
    return math.inf if rows is None else rows


def _table(
    view: View, host: str, rows: int | None, slots: Sequence[Slot], reference: str | None, score: str
) -> Table:  # fmt: skip
    study = view.plan.study
    there: dict[Place, list[Slot]] = {}
    for slot in slots:
        there.setdefault((slot.way, slot.task), []).append(slot)
    ways = [way for way in study.ways if any(way == of for of, _ in there)]
    tasks = tuple(task for task in study.tasks if any(task == of for _, of in there))
    results = {slot: view.results[view.filled[slot].name] for slot in slots if slot in view.filled}
    by_seed = _by_seed(results)
    entries = {
        (way, task): _entry(view, there[way, task], results, score)
        for way in ways for task in tasks if (way, task) in there
    }  # fmt: skip
    compared = _compared(entries, by_seed, reference)
    signs = [-1 if _metric(compared, task) in LOWER else 1 for task in tasks]
    means = {
        way: [_signed(_mean(compared.get((way, t))), s) for t, s in zip(tasks, signs, strict=True)] for way in ways
    }
    ranks = average_ranks({way: means[way] for way in ways if any(value is not None for value in means[way])})
    groups = _groups(tasks)
    lines = []
    for way in ways:
        mine = {task: compared[way, task] for task in tasks if (way, task) in compared}
        costs = [result for slot, result in results.items() if slot.way == way]
        averages = {name: _average([_mean(mine.get(task)) for task in members]) for name, members in groups.items()}
        lines.append(
            Line(
                way, study.ways[way].title or way, mine, averages, ranks.get(way), _wins(mine, way, reference),
                _percent(costs), *_times(costs),
            )
        )  # fmt: skip
    return Table(
        host, rows, tasks, {task: _metric(compared, task) for task in tasks}, _judged(results, tasks), tuple(groups),
        tuple(lines), tuple(sorted({slot.seed for slot in slots})), reference if reference in ways else None,
        tuple(sorted({e.against.test for e in compared.values() if e.against is not None})),
        study.settings.get("per_class"), _seen_before(results, tasks), _fewer_rows(results, tasks),
    )  # fmt: skip


def _by_seed(results: Mapping[Slot, Result]) -> dict[Place, dict[int, Result]]:
    found: dict[Place, dict[int, Result]] = {}
    for slot, result in results.items():
        found.setdefault((slot.way, slot.task), {})[slot.seed] = result
    return found


def _entry(view: View, slots: Sequence[Slot], results: Mapping[Slot, Result], score: str) -> Entry:
    scores: dict[int, float] = {}
    metric = ""
    for slot in slots:
        if slot in results:
            metric, value = score_of(results[slot], score)
            if value is not None:
                scores[slot.seed] = 100 * value
    failed = tuple(slot.seed for slot in slots if slot in view.failed)
    without = not scores and all(slot in results for slot in slots)  # of a task that has no such score
    done = len(scores) == len(slots) or without
    state = "done" if done else "failed" if failed and not scores else "partly" if scores else "waiting"
    filled = {slot.seed: view.filled[slot] for slot in slots if slot in view.filled}
    return Entry(
        scores, tuple(slot.seed for slot in slots), state, failed, None, metric,
        {seed: cell.name for seed, cell in filled.items()},
        {seed: {**cell.draft.point, **(view.results[cell.name].get("point") or {})} for seed, cell in filled.items()},
    )  # fmt: skip


def score_of(result: Result, score: str) -> tuple[str, float | None]:
    """The name and the value of what is shown of a result."""
    scores = result["scores"]
    if score == LOSS:
        return LOSS, result.get(LOSS)
    if score == "mean":
        mean = mean_of(scores)
        return "mean", mean if math.isfinite(mean) else None
    name = next(iter(scores)) if score == "main" else score
    if name not in scores:
        return name, None
    return name, scores[name]


def _compared(
    entries: Mapping[Place, Entry], results: Mapping[Place, Mapping[int, Result]], reference: str | None
) -> dict[Place, Entry]:
    """Every entry with its test against the reference; all tests of a table are corrected together."""
    found: dict[Place, Comparison] = {}
    tested = [
        (place, entry, shown) for place, entry in entries.items()
        if place[0] != reference and (standard := entries.get((str(reference), place[1]))) is not None
        and (shown := difference(entry, standard)) is not None
    ]  # fmt: skip
    for (way, task), entry, shown in tested:
        mine, other = results[way, task], results[str(reference), task]
        metric = entry.metric if entry.metric != "mean" else next(iter(next(iter(mine.values()))["scores"]))
        if (compared := compare(mine, other, metric, max(DRAWS, PER_TEST * len(tested)))) is not None:
            agrees = shown * compared.difference > 0  # a test of each row's own score may point elsewhere
            found[way, task] = replace(compared, difference=shown / 100, p=compared.p if agrees else 1.0)
    adjusted = dict(zip(found, holm([one.p for one in found.values()]), strict=True))
    return {
        place: replace(entry, against=replace(found[place], p=adjusted[place])) if place in found else entry
        for place, entry in entries.items()
    }


def difference(one: Entry, other: Entry) -> float | None:
    """In points, of the scores that are shown, in the mean over the seeds that both have; None: they have none."""
    seeds = one.scores.keys() & other.scores.keys()
    return sum(one.scores[seed] - other.scores[seed] for seed in sorted(seeds)) / len(seeds) if seeds else None


def _mean(entry: Entry | None) -> float | None:
    """Only of an entry whose seeds are all there: a mean of some would compare different things."""
    return entry.spread.mean if entry is not None and entry.state == "done" and entry.spread is not None else None


def _signed(value: float | None, sign: int) -> float | None:
    return None if value is None else sign * value


def _groups(tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The averages of a table: over all its tasks, and over those of GLUE and SuperGLUE where it has more."""
    found = {"average": tuple(tasks)} if len(tasks) > 1 else {}
    for name, members in (("GLUE", GLUE), ("SuperGLUE", SUPERGLUE)):
        there = tuple(task for task in tasks if task in members)
        if 3 <= len(there) < len(tasks):
            found[f"{name} ({len(there)})"] = there
    return found


def _average(values: Sequence[float | None]) -> float | None:
    """Of all of them; None where one is missing or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _wins(entries: Mapping[str, Entry], way: str, reference: str | None) -> tuple[int, int, int] | None:
    if reference is None or way == reference:
        return None
    known = [entry for entry in entries.values() if entry.against is not None]
    better = sum(e.significant and e.better > 0 for e in known)
    worse = sum(e.significant and e.better < 0 for e in known)
    return better, len(known) - better - worse, worse


def _percent(results: Sequence[Result]) -> float | None:
    shares = [100 * r["trained_parameters"] / r["host_parameters"] for r in results if r.get("host_parameters")]
    return sum(shares) / len(shares) if shares else None


def _times(results: Sequence[Result]) -> tuple[float | None, float | None]:
    seconds = [float(r["seconds"]) for r in results if r.get("seconds") and not r.get("resumed")]
    peaks = [float(r["peak_megabytes"]) for r in results if r.get("peak_megabytes")]
    return (sum(seconds) / len(seconds) if seconds else None), (max(peaks) if peaks else None)


def _metric(entries: Mapping[Place, Entry], task: str) -> str:
    return next((entry.metric for (_, of), entry in entries.items() if of == task and entry.metric), "")


def _judged(results: Mapping[Slot, Result], tasks: Sequence[str]) -> dict[str, int]:
    found = {}
    for slot, result in results.items():
        if slot.task in tasks:
            found[slot.task] = int(result["rows"][result["judged"]])
    return found


def _fewer_rows(results: Mapping[Slot, Result], tasks: Sequence[str]) -> dict[str, int]:
    there = {slot: int(result["rows"]["train"]) for slot, result in results.items() if slot.task in tasks}
    return {slot.task: rows for slot, rows in there.items() if slot.rows is not None and rows < slot.rows}


def _seen_before(results: Mapping[Slot, Result], tasks: Sequence[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for slot, result in results.items():
        for other, rows in (result.get("seen_before") or {}).items():
            if slot.task in tasks:
                mine = found.setdefault(slot.task, {})
                mine[other] = max(rows, mine.get(other, 0))
    return found
