"""Statistics against scipy, statsmodels and scikit-learn."""

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics
from statsmodels.stats.contingency_tables import mcnemar as their_mcnemar
from statsmodels.stats.multitest import multipletests

from inlay.studies.answers import packed, unpacked
from inlay.studies.statistics import (
    _of_counts,
    average_ranks,
    compare,
    holm,
    mcnemar,
    points,
    spread,
)
from inlay.studies.tables import Entry, _compared
from inlay.training.recipe import mean_of

CHANCE = np.random.default_rng(0)


def result(right, said, kind="classification", labels=2):
    """A cell's result with these answers."""
    facts = {"task": {"name": "t", "kind": kind, "labels": labels, "positive_index": labels - 1}, "judged_sha256": "x"}
    if kind == "regression":
        return facts | {"right": list(right), "said": list(said), "scores": {}}
    return facts | {"right": packed(list(right)), "said": packed(list(said)), "scores": {}}


def answers(rows=200, share=0.8, labels=2, right=None):
    right = CHANCE.integers(0, labels, rows) if right is None else right
    wrong = (right + CHANCE.integers(1, max(2, labels), rows)) % labels
    return right, np.where(CHANCE.random(rows) < share, right, wrong)


def test_mean_and_standard_deviation():
    values = [71.2, 73.9, 70.4, 75.5]
    found = spread(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.sd == pytest.approx(np.std(values, ddof=1))
    assert spread([3.0]).sd is None


@pytest.mark.parametrize("share", [0.5, 0.75, 0.95])
def test_mcnemar_is_that_of_statsmodels(share):
    one, other = ((CHANCE.random(120) < p).astype(int) for p in (0.75, share))
    table = [[np.sum((one == i) & (other == j)) for j in (1, 0)] for i in (1, 0)]
    assert mcnemar(one, other) == pytest.approx(their_mcnemar(table, exact=True).pvalue)


def test_mcnemar_of_the_same_answers_is_one():
    assert mcnemar([1, 0, 1], [1, 0, 1]) == 1.0


def test_holm_is_that_of_statsmodels():
    for count in (1, 2, 7, 30):
        ps = CHANCE.random(count) ** 3
        assert holm(ps.tolist()) == pytest.approx(multipletests(ps, method="holm")[1])
    assert holm([]) == []


def test_average_ranks_are_those_of_scipy():
    table = CHANCE.random((4, 9)).round(1)
    found = average_ranks({str(i): row.tolist() for i, row in enumerate(table)})
    expected = scipy.stats.rankdata(-table, axis=0).mean(1)
    assert list(found.values()) == pytest.approx(expected)


def test_a_task_that_a_way_has_not_counts_in_no_rank():
    assert average_ranks({"a": [1.0, None], "b": [2.0, 9.0]}) == {"a": 2.0, "b": 1.0}


def test_means_of_the_same_scores_are_ties_whatever_the_order_of_the_seeds():
    one, other = (0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3
    assert one != other  # in the last digit
    assert average_ranks({"a": [one], "b": [other]}) == {"a": 1.5, "b": 1.5}


def test_the_bootstrap_over_rows_agrees_with_scipys():
    """The same p, up to the draws, as from the distribution that scipy.stats.bootstrap draws."""
    right = CHANCE.integers(0, 2, 300)
    one = [result(right, answers(300, 0.80, right=right)[1]) for _ in range(3)]
    other = [result(right, answers(300, 0.76, right=right)[1]) for _ in range(3)]
    found = compare(dict(enumerate(one)), dict(enumerate(other)), "accuracy")
    mean = np.mean([points(a) - points(b) for a, b in zip(one, other, strict=True)], axis=0)
    drawn = scipy.stats.bootstrap((mean,), np.mean, n_resamples=4000, random_state=1).bootstrap_distribution
    expected = 2 * min(np.mean(drawn <= 0), np.mean(drawn >= 0))
    assert found.difference == pytest.approx(mean.mean())
    assert found.p == pytest.approx(expected, abs=0.03)
    assert (found.test, found.rows, found.seeds) == ("bootstrap", 300, 3)


def test_one_seed_is_tested_by_mcnemar():
    right, said = answers()
    other = answers(right=right)[1]
    found = compare({0: result(right, said)}, {0: result(right, other)}, "accuracy")
    assert found.test == "mcnemar"
    assert found.p == pytest.approx(mcnemar(right == said, right == other))


@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews"])
def test_metrics_of_counts_are_those_of_scikit_learn(metric, labels):
    right, said = answers(150, 0.6, labels)
    counts = metrics.confusion_matrix(right, said, labels=range(labels))[None].astype(float)
    task = {"positive_index": labels - 1}
    expected = {
        "accuracy": lambda: metrics.accuracy_score(right, said),
        "f1": lambda: metrics.f1_score(right == labels - 1, said == labels - 1),
        "macro_f1": lambda: metrics.f1_score(right, said, average="macro"),
        "matthews": lambda: metrics.matthews_corrcoef(right, said),
    }[metric]()
    assert _of_counts(counts, metric, task)[0] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["f1", "macro_f1", "matthews"])
def test_a_difference_of_another_metric(metric):
    right = CHANCE.integers(0, 2, 400)
    better = {s: result(right, answers(400, 0.95, right=right)[1]) for s in range(2)}
    worse = {s: result(right, answers(400, 0.60, right=right)[1]) for s in range(2)}
    found, back, same = compare(better, worse, metric), compare(worse, better, metric), compare(worse, worse, metric)
    assert found.difference > 0.2
    assert back.difference == pytest.approx(-found.difference)
    assert found.p < 0.01
    assert same.p == 1.0
    assert same.difference == 0


def test_of_two_labels_no_label_is_the_wrong_one():
    right, said = answers(150, 0.8)
    unsaid = np.where(CHANCE.random(150) < 0.2, -1, said)
    found = compare({0: result(right, said)}, {0: result(right, unsaid)}, "f1")
    scores = [metrics.f1_score(right, each) for each in (said, np.where(unsaid == -1, 1 - right, unsaid))]
    assert found.difference == pytest.approx(scores[0] - scores[1])


def test_an_answer_that_is_no_label_is_not_one_more_label():
    right, said = answers(150, 0.8, 3)
    unsaid = np.where(CHANCE.random(150) < 0.1, -1, said)
    found = compare({0: result(right, said, labels=3)}, {0: result(right, unsaid, labels=3)}, "macro_f1")
    scores = [metrics.f1_score(right, each, labels=[0, 1, 2], average="macro") for each in (said, unsaid)]
    assert found.difference == pytest.approx(scores[0] - scores[1])


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_difference_of_correlations(metric):
    right = CHANCE.random(300)
    near, far = right + 0.1 * CHANCE.random(300), CHANCE.random(300)
    one, other = {0: result(right, near, "regression")}, {0: result(right, far, "regression")}
    found = compare(one, other, metric)
    their = scipy.stats.pearsonr if metric == "pearson" else scipy.stats.spearmanr
    assert found.difference == pytest.approx(their(right, near).statistic - their(right, far).statistic)
    assert found.p < 0.01


def test_other_rows_or_other_seeds_are_not_compared():
    right, said = answers()
    one, other = result(right, said), result(right, said) | {"judged_sha256": "y"}
    assert compare({0: one}, {0: other}, "accuracy") is None
    assert compare({0: one}, {1: one}, "accuracy") is None


def test_a_metric_that_counts_cannot_give_is_not_tested():
    """MultiRC's exact match is of groups of rows; a test of accuracy beside it would say something else."""
    one, other = ({0: result(*answers(share=share))} for share in (0.9, 0.6))
    assert compare(one, other, "group_exact_match") is None
    assert compare(one, other, "accuracy") is not None


def test_a_table_shows_the_difference_of_the_scores_that_it_shows():
    """Rows without entities count 0 in the mean over rows, and not in the score of all."""

    def tagged(score, points):
        facts = {"task": {"kind": "tags", "metrics": ["entity_f1"], "labels": 3}, "judged_sha256": "x"}
        return facts | {"scores": {"entity_f1": score}, "points": points}

    place = {name: (name, "ner") for name in ("mine", "base", "odd")}
    results = {
        place["mine"]: {seed: tagged(0.60, [1.0] * 20 + [0.0] * 80) for seed in (0, 1)},
        place["base"]: {seed: tagged(0.56, [0.9] * 20 + [0.0] * 80) for seed in (0, 1)},
        place["odd"]: {seed: tagged(0.50, [1.0] * 20 + [0.0] * 80) for seed in (0, 1)},
    }
    entries = {
        at: Entry(
            {seed: 100 * one["scores"]["entity_f1"] for seed, one in seeds.items()}, (0, 1), "done", metric="entity_f1"
        )
        for at, seeds in results.items()
    }
    found = _compared(entries, results, "base")
    assert found[place["mine"]].against.difference == pytest.approx(0.04)
    assert found[place["mine"]].significant
    assert found[place["odd"]].against.difference == pytest.approx(-0.06)
    assert not found[place["odd"]].significant, "rows say better, the score says worse: nothing is told"


def test_the_mean_of_a_tasks_metrics_counts_mistakes_as_such_and_parts_not_at_all():
    assert mean_of({"bleu": 0.5, "ter": 0.9}) < mean_of({"bleu": 0.5, "ter": 0.4})
    assert mean_of({"bleu": 0.5, "bleu_seen": 0.9, "chrf": 0.3}) == pytest.approx(0.4)
    assert mean_of({"accuracy": 0.8, "macro_f1": 0.6}) == pytest.approx(0.7)


def test_labels_are_packed_and_unpacked():
    for labels in ([0, 1, 2, -1, 9], [11, 0, -1], []):
        assert unpacked(packed(labels)) == labels
    assert packed([0, -1, 2]) == "0x2"


def test_rows_on_which_three_seeds_cancel_out_are_in_both_tails():
    """Thirds are rounded, their sums are not: a draw without a difference must count against both ways."""
    right = np.zeros(40, dtype=int)
    for seed in range(20):
        said, one, other = two_ways(seed, right, (0.25, 0.35))
        expected = 2 * min(tails(*said))
        assert compare(one, other, "accuracy").p == pytest.approx(min(1.0, expected))


def two_ways(seed, right, shares):
    """The answers of two ways with three seeds, and their results."""
    dice = np.random.default_rng(seed)
    said = [[(dice.random(len(right)) < share).astype(int) for _ in range(3)] for share in shares]
    return said, *({i: result(right, each) for i, each in enumerate(way)} for way in said)


def tails(one, other):
    """P(d* ≤ 0) and P(d* ≥ 0) of rows that are drawn anew, added up row after row."""
    sums = np.add.reduce([np.subtract(b, a) for a, b in zip(one, other, strict=True)])
    each = np.bincount(sums + 3, minlength=7) / len(sums)  # from -3 to 3
    whole = np.ones(1)
    for _ in sums:
        whole = np.convolve(whole, each)
    middle = 3 * len(sums)
    return whole[: middle + 1].sum(), whole[middle:].sum()


def test_the_p_of_right_and_wrong_answers_has_no_noise_of_drawing():
    """With forty tests in a table 0.05 is 0.00125 before the correction, of which 4,000 draws know little."""
    right = np.zeros(600, dtype=int)
    for seed in range(8):
        said, one, other = two_ways(seed, right, (0.25, 0.29))
        expected = min(1.0, 2 * min(tails(*said)))
        assert compare(one, other, "accuracy").p == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_whole_numbers_of_any_size_take_little_memory():
    """A record may be anybody's: the sums of such scores have too many values to compute the chance of each."""
    rows = np.arange(50.0)
    facts = {"task": {"name": "t", "kind": "text", "metrics": ["m"]}, "judged_sha256": "x"}
    one, other = ({i: facts | {"points": (rows * size).tolist()} for i in range(2)} for size in (1e10, 1e9))
    assert compare(one, other, "m").p == pytest.approx(2 / 4001)


@pytest.mark.parametrize(("share", "p"), [(0.0, 1e-9), (1.0, 1.0)])
def test_a_way_that_is_never_or_always_the_same(share, p):
    """Every row better in every seed, and no row different: the ends of what can be."""
    right = np.zeros(50, dtype=int)
    one, other = ({i: result(right, each) for i in range(3)} for each in (right, right if share else 1 - right))
    assert compare(one, other, "accuracy").p == pytest.approx(p)
    assert compare(other, one, "accuracy").p == pytest.approx(p)
