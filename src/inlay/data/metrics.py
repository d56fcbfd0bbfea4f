"""The official metrics, by scikit-learn and scipy, silent where a metric is not defined.

One class only or constant predictions: f1 and matthews are 0, pearson and spearman nan, as in those libraries.
Entities are counted as seqeval does by default, answers in a context as SQuAD does: the best of the right ones counts.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from inlay.data.task import GENERATED, Task
from inlay.data.text_metrics import score_texts


def score(
    task: Task, targets: Sequence[Any], predictions: Sequence[Any], groups: Sequence[Any] = ()
) -> dict[str, float]:
    """Every metric of a task, the main one first."""
    if not len(targets):
        return dict.fromkeys(task.metrics, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = score_texts(task, [_right(target) for target in targets], list(predictions)) if task.generates else {}
        for metric in task.metrics:
            if metric not in GENERATED:
                found[metric] = float(_one(metric, task, list(targets), list(predictions), list(groups)))
        return {metric: found[metric] for metric in task.metrics if metric in found}


def _one(metric: str, task: Task, targets: list[Any], predictions: list[Any], groups: list[Any]) -> float:
    from sklearn import metrics

    if metric == "accuracy" and isinstance(targets[0], tuple):  # several right answers
        metric = "exact_match"
    if metric == "accuracy":
        return metrics.accuracy_score(targets, predictions)
    if metric == "matthews":
        return metrics.matthews_corrcoef(targets, predictions)
    if metric == "macro_f1" and task.kind == "multilabel":
        return _several_labels(metric, task, targets, predictions)
    if metric == "macro_f1":
        labels = sorted({*targets, *predictions} - {-1})  # no label at all is wrong, but not one more label
        return metrics.f1_score(targets, predictions, labels=labels, average="macro", zero_division=0)
    if metric == "f1":
        positive = task.labels.index(task.positive) if task.positive else len(task.labels) - 1
        if len(task.labels) == 2:  # no label at all is wrong: of two it counts as the other one
            pairs = zip(targets, predictions, strict=True)
            predictions = [1 - target if said == -1 else said for target, said in pairs]
        hits = [[value == positive for value in values] for values in (targets, predictions)]
        return metrics.f1_score(*hits, zero_division=0)
    if metric == "group_exact_match":
        return _group_exact_match(targets, predictions, groups)
    if metric in ("pearson", "spearman"):
        return _correlation(metric, targets, predictions)
    if metric in ("micro_f1", "subset_accuracy"):
        return _several_labels(metric, task, targets, predictions)
    if metric == "token_accuracy":
        return metrics.accuracy_score([i for row in targets for i in row], [i for row in predictions for i in row])
    if metric == "entity_f1":
        return _entity_f1(*([[task.labels[i] for i in row] for row in rows] for rows in (targets, predictions)))
    one = _exact_match if metric == "exact_match" else _token_f1
    return sum(max(one(r, p) for r in _right(t)) for t, p in zip(targets, predictions, strict=True)) / len(targets)


def _right(target: Any) -> list[str]:
    """The right answers: one text, several, or several with their positions; none: the empty one is right."""
    if isinstance(target, str):
        return [target]
    return [each if isinstance(each, str) else each[0] for each in target] or [""]


def _several_labels(metric: str, task: Task, targets: list[Any], predictions: list[Any]) -> float:
    """Rows of label indices as (rows, labels) of 0 and 1, and their metric."""
    from sklearn import metrics

    wanted, got = ([[i in row for i in range(len(task.labels))] for row in rows] for rows in (targets, predictions))
    if metric == "subset_accuracy":
        return metrics.accuracy_score(wanted, got)
    return metrics.f1_score(wanted, got, average=metric.removesuffix("_f1"), zero_division=0)


def _entity_f1(targets: list[list[str]], predictions: list[list[str]]) -> float:
    """F1 of whole entities, over all types; an entity is right if its type and both ends are."""
    wanted, got = (
        {(row, *entity) for row, tags in enumerate(rows) for entity in entities(tags)}
        for rows in (targets, predictions)
    )
    return 2 * len(wanted & got) / (len(wanted) + len(got)) if wanted or got else 0.0


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, last word) of every entity in IOB2 tags.

    As conlleval and seqeval by default: I- begins an entity, too, where none of its type goes on.
    """
    found: list[tuple[str, int, int]] = []
    before: str | None = None  # the type of the entity that the word before belongs to
    for at, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if mark in ("B", "I"):
            if mark == "I" and before == kind:
                found[-1] = (kind, found[-1][1], at)
            else:
                found.append((kind, at, at))
        before = kind if mark in ("B", "I") else None
    return found


def _correlation(metric: str, targets: list[float], predictions: list[float]) -> float:
    from scipy import stats

    if len(targets) < 2:
        return math.nan
    return (stats.pearsonr if metric == "pearson" else stats.spearmanr)(targets, predictions).statistic


def _group_exact_match(targets: list[int], predictions: list[int], groups: list[Any]) -> float:
    """MultiRC: the share of questions with every answer judged right."""
    right: dict[Any, bool] = {}
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
