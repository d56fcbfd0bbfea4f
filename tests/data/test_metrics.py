"""The metrics against published examples and their own definitions, written out here without the libraries they use."""

import math
import random
import statistics
from fractions import Fraction

import pytest

from inlay.data import Task, score

LABELS = ("a", "b", "c")
TASK = Task(labels=LABELS, metrics=("accuracy", "macro_f1", "matthews", "f1"), positive="b")
NUMBERS = Task(kind="regression", metrics=("pearson", "spearman"))
BINARY = Task(labels=("dog", "cat"), metrics=("accuracy", "matthews", "f1"))


def f1_of(label, targets, predictions):
    """2 TP / (2 TP + FP + FN), and 0 where the label is nowhere."""
    both = sum(t == p == label for t, p in zip(targets, predictions, strict=True))
    either = targets.count(label) + predictions.count(label)
    return Fraction(2 * both, either) if either else Fraction(0)


def matthews_of(targets, predictions):
    """Gorodkin's R_K: (c s - Σ p t) / √(s² - Σ p²)(s² - Σ t²)."""
    s, c = len(targets), sum(t == p for t, p in zip(targets, predictions, strict=True))
    true, said = ([values.count(k) for k in range(3)] for values in (targets, predictions))
    above = c * s - sum(t * p for t, p in zip(true, said, strict=True))
    return above / math.sqrt((s * s - sum(p * p for p in said)) * (s * s - sum(t * t for t in true)))


def ranks_of(values):
    """Places from 1, equal values share the mean of theirs."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_their_definitions_on_random_predictions(seed):
    chance = random.Random(seed)
    targets, predictions = ([chance.randrange(3) for _ in range(50)] for _ in range(2))
    found = score(TASK, targets, predictions)
    ones = [f1_of(label, targets, predictions) for label in range(3)]
    assert found == pytest.approx(
        {
            "accuracy": sum(t == p for t, p in zip(targets, predictions, strict=True)) / 50,
            "macro_f1": float(sum(ones) / 3),
            "matthews": matthews_of(targets, predictions),
            "f1": float(ones[1]),
        }
    )
    first, second = ([chance.randrange(20) / 4 for _ in range(50)] for _ in range(2))  # with many equal values
    assert score(NUMBERS, first, second) == pytest.approx(
        {
            "pearson": statistics.correlation(first, second),
            "spearman": statistics.correlation(ranks_of(first), ranks_of(second)),
        }
    )


def test_the_usual_example_of_matthews():
    """8 cats and 4 dogs, of which 6 and 3 are seen as such."""
    found = score(BINARY, [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [0] * 3 + [1])
    assert found == pytest.approx({"accuracy": 9 / 12, "matthews": 16 / math.sqrt(7 * 8 * 4 * 5), "f1": 12 / 15})
    assert found["matthews"] == pytest.approx(0.478, abs=5e-4)


def test_macro_f1_weighs_rare_labels_as_common_ones():
    assert score(TASK, [0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1])["macro_f1"] == pytest.approx(4 / 15)
    assert score(TASK, [0] * 98 + [1, 2], [0] * 100)["macro_f1"] == pytest.approx((196 / 198) / 3)


def test_an_answer_that_is_no_label_is_wrong_and_not_one_more_label():
    """A host that answers in text may write anything: its recall falls, but the mean is still over three labels."""
    found = score(TASK, [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, -1])
    assert found["macro_f1"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert score(TASK, [0, 1], [-1, -1])["macro_f1"] == 0


def test_f1_counts_an_answer_that_is_no_label_as_the_wrong_one():
    """Otherwise a host that has no word for the other label would have an F1 of 1."""
    found = score(BINARY, [1, 1, 0, 0], [1, 1, -1, -1])
    assert found["f1"] == score(BINARY, [1, 1, 0, 0], [1, 1, 1, 1])["f1"] == pytest.approx(2 / 3)
    assert score(BINARY, [1, 1, 0, 0], [1, -1, 0, 0])["f1"] == pytest.approx(2 / 3)


def test_f1_is_of_the_positive_label_and_without_one_of_the_last():
    targets, predictions = [0, 0, 0, 1], [0, 0, 1, 1]
    for positive, wanted in (("dog", 4 / 5), ("cat", 2 / 3), (None, 2 / 3)):
        task = Task(labels=("dog", "cat"), metrics=("f1",), positive=positive)
        assert score(task, targets, predictions)["f1"] == pytest.approx(wanted)


def test_the_usual_example_of_spearman():
    """IQ and hours of television a week: -29/165."""
    points = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert score(NUMBERS, points, hours)["spearman"] == pytest.approx(-29 / 165)


ANSCOMBE_X = [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5]


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (ANSCOMBE_X, [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68]),
        (ANSCOMBE_X, [9.14, 8.14, 8.74, 8.77, 9.26, 8.10, 6.13, 3.10, 9.13, 7.26, 4.74]),
        (ANSCOMBE_X, [7.46, 6.77, 12.74, 7.11, 7.81, 8.84, 6.08, 5.39, 8.15, 6.42, 5.73]),
        ([8] * 7 + [19] + [8] * 3, [6.58, 5.76, 7.71, 8.84, 8.47, 7.04, 5.25, 12.50, 5.56, 7.91, 6.89]),
    ],
    ids=["I", "II", "III", "IV"],
)
def test_anscombes_quartet(x, y):
    assert score(NUMBERS, x, y)["pearson"] == pytest.approx(0.816, abs=1e-3)


@pytest.mark.parametrize(
    ("targets", "predictions", "accuracy", "matthews", "f1"),
    [
        ([0, 0, 0], [0, 0, 0], 1, 0, 0),
        ([0, 0, 0], [1, 1, 1], 0, 0, 0),
        ([0, 1, 2], [0, 0, 0], 1 / 3, 0, 0),
        ([1], [1], 1, 0, 1),
    ],
)
def test_degenerate_labels_are_measured_in_silence(targets, predictions, accuracy, matthews, f1):
    """Warnings are errors here."""
    found = score(TASK, targets, predictions)
    assert all(math.isfinite(value) for value in found.values())
    assert (found["accuracy"], found["matthews"], found["f1"]) == pytest.approx((accuracy, matthews, f1))


def test_no_correlation_with_a_constant_is_nan_in_silence():
    for targets, predictions in (([1.0, 2.0], [3.0, 3.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0], [1.0])):
        assert all(math.isnan(value) for value in score(NUMBERS, targets, predictions).values())


def test_no_rows_have_no_score():
    assert all(math.isnan(value) for value in score(TASK, [], []).values())


def test_multirc_counts_whole_questions():
    task = Task(labels=("0", "1"), metrics=("group_exact_match",))
    assert score(task, [1, 0, 1], [1, 0, 0], ["q1", "q1", "q2"]) == {"group_exact_match": 0.5}


def test_texts_are_compared_without_case_articles_and_punctuation():
    task = Task(kind="text")
    assert score(task, ["The cat."], ["a Cat"]) == {"exact_match": 1.0, "token_f1": 1.0}
    assert score(task, ["red cat"], ["cat sat"])["token_f1"] == 0.5
    assert score(task, ["the"], ["cat"])["token_f1"] == 0.0


@pytest.mark.parametrize(
    ("target", "prediction", "exact", "f1"),
    [
        ("Denver Broncos", "The Denver Broncos!", 1, 1),
        ("Santa Clara, California", "Santa Clara", 0, 4 / 5),  # all of 2 words said are right, 2 of 3 are said
        ("gold gold", "gold", 0, 2 / 3),  # a word counts as often as it stands
        ("the", "a", 1, 1),  # nothing but articles: equal
        ("theatre", "atre", 0, 0),  # an article is a word, not a beginning
    ],
)
def test_texts_as_squad_compares_them(target, prediction, exact, f1):
    found = score(Task(kind="text"), [target], [prediction])
    assert (found["exact_match"], found["token_f1"]) == pytest.approx((exact, f1))
