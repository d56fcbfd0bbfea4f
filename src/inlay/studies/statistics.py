"""Means, spreads, and whether a difference is more than chance.

    spread          sd = √(Σ (x − mean)² / (n − 1)) over the seeds
    one seed        McNemar's exact test: b and c rows are right by one way alone; is b ~ Bin(b + c, ½)?
    several seeds   paired bootstrap over rows: rows are drawn anew, each with the answers of all seeds of both ways;
                    p = 2 min(P(d* ≤ 0), P(d* ≥ 0)), where d* is the difference of the mean scores. Of right and wrong
                    answers that is computed, as if there were infinitely many draws; of other scores rows are drawn
    several tests   Holm's correction: the k-th smallest of m p-values times (m − k + 1), never falling

Scores that are no mean over rows (F1, Matthews, Pearson, Spearman) are computed anew for every draw: from counts of
(right, said), or from the numbers; Spearman's ranks are those of all rows. Of text, tags and several labels the mean
of each row's own score is tested, which is not the score of all rows together that a table shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inlay.studies.answers import MEANS, unpacked
from inlay.studies.cells import Result
from inlay.training.recipe import LOSS

FIRST = 1000
"""Draws of rows with which it is often clear already that a difference is no more than chance."""
DRAWS = 4000
"""Draws where it is not; a table of many tests needs more, or nothing in it could be told from chance."""
LIKELY = 0.05
PER_TEST = 400
"""Draws for each test of a table: the smallest p after Holm's correction is then 2 / 400."""
LARGEST = 1 << 24
"""Values that the sum of all rows may have where its distribution is computed; scores may be of any size."""
LEAST = 1e-9
"""The smallest p that is told; what is computed below is rounding."""
CORRELATIONS, OF_COUNTS = ("pearson", "spearman"), ("matthews", "f1", "macro_f1")
"""Metrics that are computed anew for every draw; of others that are no mean over rows nothing is tested."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Spread:
    """Scores over seeds."""

    mean: float
    sd: float | None
    """None for one seed."""
    n: int


@dataclass(frozen=True)
class Comparison:
    """One way against another on the same judged rows."""

    difference: float
    """Of the mean scores, from 0 to 1."""
    p: float
    test: str
    """mcnemar or bootstrap."""
    rows: int
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    found = np.asarray(values, dtype=float)
    return Spread(float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else None, len(found))


def mcnemar(one: Sequence[float], other: Sequence[float]) -> float:
    """The exact two-sided p of two ways' right (1) and wrong (0) answers to the same rows."""
    b = sum(bool(x > y) for x, y in zip(one, other, strict=True))
    c = sum(bool(x < y) for x, y in zip(one, other, strict=True))
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))  # whole numbers, so that nothing is rounded before the end


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order that they came in."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def average_ranks(scores: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """The mean rank of each way over the tasks that all of them have; 1 is the best, ties share."""
    ways = list(scores)
    columns = [column for column in zip(*scores.values(), strict=True) if None not in column]
    if not columns:
        return dict.fromkeys(ways)
    # means of the same scores in another order of the seeds differ in their last digit
    ranks = np.mean([ranked([-round(v, 9) for v in column if v is not None]) for column in columns], axis=0)
    return dict(zip(ways, map(float, ranks), strict=True))


def ranked(values: Sequence[float]) -> Array:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def compare(
    one: Mapping[int, Result], other: Mapping[int, Result], metric: str, draws: int = DRAWS
) -> Comparison | None:
    """Two ways' results by seed; None where they have no seed in common or were judged on other rows."""
    seeds = sorted(one.keys() & other.keys())
    pairs = [(one[seed], other[seed]) for seed in seeds]
    if not pairs or len({result["judged_sha256"] for pair in pairs for result in pair}) != 1:
        return None
    facts = pairs[0][0]
    if metric == LOSS or ("points" in facts and metric != facts["task"]["metrics"][0]):
        return None  # each row's own score is kept of the main metric alone
    if metric in MEANS or "points" in facts:
        return _of_points(pairs, draws)
    if metric in CORRELATIONS and facts["task"]["kind"] == "regression":
        return _of_numbers(pairs, metric, draws)
    return _of_labels(pairs, metric, draws) if metric in OF_COUNTS else None


def points(result: Result) -> Array:
    """Each judged row's own score."""
    if "points" in result:
        return np.asarray(result["points"], dtype=float)
    right, said = result["right"], result["said"]
    if isinstance(right, str) and isinstance(said, str):  # one character for each row
        return np.equal(*(np.frombuffer(labels.encode(), dtype=np.uint8) for labels in (right, said))).astype(float)
    return np.equal(unpacked(right), unpacked(said)).astype(float)


def _of_points(pairs: Sequence[tuple[Result, Result]], draws: int) -> Comparison:
    """The mean over rows."""
    one, other = (np.stack([points(pair[i]) for pair in pairs]) for i in (0, 1))  # (seeds, rows)
    rows, mean = one.shape[1], (one - other).mean(0)
    if len(pairs) == 1 and set(np.unique([one, other])) <= {0.0, 1.0}:
        return Comparison(float(mean.mean()), mcnemar(one[0].tolist(), other[0].tolist()), "mcnemar", rows, 1)
    # draws of rows are draws of their differences; sums over seeds, because thirds do not add up to nothing
    values, counts = np.unique((one - other).sum(0).round(9), return_counts=True)
    if np.array_equal(values, values.round()) and rows * (values[-1] - values[0]) < LARGEST:
        p = _endless_draws(values.astype(int), counts)
    else:
        p = _bootstrap(lambda dice, size: dice.multinomial(rows, counts / rows, size=size) @ values / rows, draws)
    return Comparison(float(mean.mean()), p, "bootstrap", rows, len(pairs))


def _endless_draws(values: Array, counts: Array) -> float:
    """The bootstrap's p of whole numbers, of which `counts` rows have each, without the noise of drawing.

    The sum of n rows that are drawn has the distribution of one row, convolved n times with itself.
    """
    rows, lowest = int(counts.sum()), int(values.min())
    one = np.zeros(int(values.max()) - lowest + 1)
    one[values - lowest] = counts / rows
    size = rows * (len(one) - 1) + 1
    length = 1 << (size - 1).bit_length()
    sums = np.fft.irfft(np.fft.rfft(one, length) ** rows, length)[:size] if size > 1 else one
    nothing = -rows * lowest  # where a sum of 0 stands
    low, high = sums[: max(0, nothing + 1)].sum(), sums[max(0, nothing) :].sum()
    return float(min(1.0, max(LEAST, 2 * min(low, high))))


def _of_labels(pairs: Sequence[tuple[Result, Result]], metric: str, draws: int) -> Comparison:
    """A metric of the counts of (right, said)."""
    right = np.asarray(unpacked(pairs[0][0]["right"]))
    said = [np.asarray(unpacked(result["said"])) for pair in pairs for result in pair]
    labels = int(max(right.max(), *(s.max() for s in said))) + 2  # the last one stands for no label
    patterns, counts = np.unique(np.stack([right, *said]), axis=1, return_counts=True)
    rows = int(counts.sum())
    task = pairs[0][0]["task"]

    def difference(whole: Array) -> Array:
        """(draws, patterns) → (draws,)."""
        scores = []
        for each in patterns[1:]:
            index = patterns[0] * labels + each % labels
            confusion = np.zeros((len(whole), labels * labels))
            for at in np.unique(index):
                confusion[:, at] = whole[:, index == at].sum(1)
            scores.append(_of_counts(confusion.reshape(-1, labels, labels), metric, task, none=True))
        return _pairwise(scores)

    p = _bootstrap(lambda dice, size: difference(dice.multinomial(rows, counts / rows, size=size)), draws)
    return Comparison(float(difference(counts[None])[0]), p, "bootstrap", rows, len(pairs))


def _of_counts(counts: Array, metric: str, task: Mapping[str, Any], *, none: bool = False) -> Array:
    """(draws, right, said) → (draws,). none: the last label stands for no label, which is wrong and has no F1."""
    hits = np.einsum("bii->bi", counts)
    right, said, total = counts.sum(2), counts.sum(1), counts.sum((1, 2))
    if metric == "matthews":
        top = hits.sum(1) * total - (right * said).sum(1)
        below = np.sqrt((total**2 - (said**2).sum(1)) * (total**2 - (right**2).sum(1)))
        return np.divide(top, below, out=np.zeros_like(top), where=below > 0)
    f1 = np.divide(2 * hits, right + said, out=np.zeros_like(hits), where=right + said > 0)
    if metric == "f1":
        at = int(task["positive_index"])
        if none and task["labels"] == 2:  # of two labels, none at all counts as the wrong one
            whole = right + said + (counts[:, :, -1].sum(1) - counts[:, at, -1])[:, None]
            f1 = np.divide(2 * hits, whole, out=np.zeros_like(hits), where=whole > 0)
        return f1[:, at]
    if metric == "macro_f1":
        there = (right + said) > 0
        f1, there = (f1[:, :-1], there[:, :-1]) if none else (f1, there)
        return f1.sum(1) / np.maximum(there.sum(1), 1)
    return hits.sum(1) / total  # accuracy


def _of_numbers(pairs: Sequence[tuple[Result, Result]], metric: str, draws: int) -> Comparison:
    """Correlations."""

    def values(found: Sequence[float]) -> Array:
        return ranked(found) if metric == "spearman" else np.asarray(found, dtype=float)

    right = values(pairs[0][0]["right"])
    said = [values(result["said"]) for pair in pairs for result in pair]

    def difference(index: Array) -> Array:
        """(draws, rows) → (draws,)."""
        return _pairwise([_correlation(right[index], each[index]) for each in said])

    rows = len(right)
    p = _bootstrap(lambda dice, size: difference(dice.integers(0, rows, size=(size, rows))), draws)
    return Comparison(float(difference(np.arange(rows)[None])[0]), p, "bootstrap", rows, len(pairs))


def _pairwise(scores: Sequence[Array]) -> Array:
    """The mean difference of one way and the other, which alternate."""
    found: Array = np.mean([scores[i] - scores[i + 1] for i in range(0, len(scores), 2)], axis=0)
    return found


def _bootstrap(draw: Callable[[np.random.Generator, int], Array], draws: int) -> float:
    """The p of differences that are drawn; more are drawn where the first ones leave it open."""
    dice = _generator()
    drawn = draw(dice, FIRST)
    if _two_sided(drawn) < 2 * LIKELY:
        sizes = [FIRST] * (max(0, draws - FIRST) // FIRST)
        drawn = np.concatenate([drawn, *(draw(dice, size) for size in sizes)])
    return _two_sided(drawn)


def _correlation(x: Array, y: Array) -> Array:
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    below = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    top = (x * y).sum(1)
    return np.divide(top, below, out=np.zeros_like(top), where=below > 0)


def _two_sided(drawn: Array) -> float:
    """Twice the smaller tail; one draw is the sample itself, so that p is never 0, and no difference is in both."""
    drawn = drawn.round(7)
    low, high = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    return min(1.0, 2 * (min(low, high) + 1) / (len(drawn) + 1))


def _generator() -> np.random.Generator:
    """The same draws every time: a table made again is the same table."""
    return np.random.default_rng(0)
