import math
import random

import pytest
from scipy import stats
from sklearn import metrics

from inlay.data import Task, score

LABELS = ("a", "b", "c")
TASK = Task(labels=LABELS, metrics=("accuracy", "macro_f1", "matthews", "f1"), positive="b")
NUMBERS = Task(kind="regression", metrics=("pearson", "spearman"))


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_libraries_on_random_predictions(seed):
    chance = random.Random(seed)
    targets, predictions = ([chance.randrange(3) for _ in range(50)] for _ in range(2))
    found = score(TASK, targets, predictions)
    assert found == {
        "accuracy": metrics.accuracy_score(targets, predictions),
        "macro_f1": metrics.f1_score(targets, predictions, average="macro"),
        "matthews": metrics.matthews_corrcoef(targets, predictions),
        "f1": metrics.f1_score([t == 1 for t in targets], [p == 1 for p in predictions]),
    }
    floats = [chance.random() for _ in range(50)], [chance.random() for _ in range(50)]
    assert score(NUMBERS, *floats) == {
        "pearson": stats.pearsonr(*floats).statistic,
        "spearman": stats.spearmanr(*floats).statistic,
    }


@pytest.mark.parametrize(
    ("targets", "predictions"), [([0, 0, 0], [0, 0, 0]), ([0, 0, 0], [1, 1, 1]), ([0, 1, 2], [0, 0, 0]), ([1], [1])]
)
def test_degenerate_labels_are_measured_in_silence(targets, predictions):
    """Warnings are errors here."""
    found = score(TASK, targets, predictions)
    assert all(math.isfinite(value) for value in found.values())
    assert found["accuracy"] == metrics.accuracy_score(targets, predictions)


def test_no_correlation_with_a_constant_is_nan_in_silence():
    for targets, predictions in (([1.0, 2.0], [3.0, 3.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0], [1.0])):
        assert all(math.isnan(value) for value in score(NUMBERS, targets, predictions).values())


def test_multirc_counts_whole_questions():
    task = Task(labels=("0", "1"), metrics=("group_exact_match",))
    assert score(task, [1, 0, 1], [1, 0, 0], ["q1", "q1", "q2"]) == {"group_exact_match": 0.5}


def test_texts_are_compared_without_case_articles_and_punctuation():
    task = Task(kind="text")
    assert score(task, ["The cat."], ["a Cat"]) == {"exact_match": 1.0, "token_f1": 1.0}
    assert score(task, ["red cat"], ["cat sat"])["token_f1"] == 0.5
    assert score(task, ["the"], ["cat"])["token_f1"] == 0.0
