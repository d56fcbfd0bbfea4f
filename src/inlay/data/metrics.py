"""The official metrics, by scikit-learn and scipy, silent where a metric is not defined.

One class only or constant predictions: f1 and matthews are 0, pearson and spearman nan, as in those libraries.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence

from inlay.data.examples import Target
from inlay.data.task import Task


def score(
    task: Task, targets: Sequence[Target], predictions: Sequence[Target], groups: Sequence[str | None] = ()
) -> dict[str, float]:
    """Every metric of a task, the main one first."""
    if not len(targets):
        return dict.fromkeys(task.metrics, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            metric: float(_one(metric, task, list(targets), list(predictions), list(groups))) for metric in task.metrics
        }


def _one(metric: str, task: Task, targets: list[Target], predictions: list[Target], groups: list[str | None]) -> float:
    from sklearn import metrics

    if metric == "accuracy":
        return metrics.accuracy_score(targets, predictions)
    if metric == "matthews":
        return metrics.matthews_corrcoef(targets, predictions)
    if metric == "macro_f1":
        return metrics.f1_score(targets, predictions, average="macro", zero_division=0)
    if metric == "f1":
        positive = task.labels.index(task.positive) if task.positive else len(task.labels) - 1
        hits = [[value == positive for value in values] for values in (targets, predictions)]
        return metrics.f1_score(*hits, zero_division=0)
    if metric == "group_exact_match":
        return _group_exact_match(targets, predictions, groups)
    if metric in ("pearson", "spearman"):
        return _correlation(metric, targets, predictions)
    one = _exact_match if metric == "exact_match" else _token_f1
    return sum(one(str(t), str(p)) for t, p in zip(targets, predictions, strict=True)) / len(targets)


def _correlation(metric: str, targets: list[Target], predictions: list[Target]) -> float:
    from scipy import stats

    if len(targets) < 2:
        return math.nan
    return (stats.pearsonr if metric == "pearson" else stats.spearmanr)(targets, predictions).statistic


def _group_exact_match(targets: list[Target], predictions: list[Target], groups: list[str | None]) -> float:
    """MultiRC: the share of questions with every answer judged right."""
    right: dict[str | None, bool] = {}
    for target, prediction, group in zip(targets, predictions, groups, strict=True):
        right[group] = right.get(group, True) and target == prediction
    return sum(right.values()) / len(right)


def _words(text: str) -> list[str]:
    """SQuAD's normal form: lower case, no articles, no punctuation."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _exact_match(target: str, prediction: str) -> float:
    return float(_words(target) == _words(prediction))


def _token_f1(target: str, prediction: str) -> float:
    wanted, got = Counter(_words(target)), Counter(_words(prediction))
    common = sum((wanted & got).values())
    if not wanted or not got:
        return float(wanted == got)
    return 2 * common / (sum(wanted.values()) + sum(got.values()))
