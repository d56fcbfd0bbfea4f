"""A run's page: what a reader looks for is there, and right."""

from __future__ import annotations

import re

import pytest

from inlay.data import Task
from inlay.data.examples import Example
from inlay.report.plots import confusion, curve
from inlay.report.run_page import run_page
from inlay.training.codec import Answer, EncodedSplit

RECORD = {
    "name": "own", "host": "bert", "mode": "inlay", "method": "pfeiffer", "trained_parameters": 1234, "host_parameters": 5678901,
    "rows": {"train": 96, "validation": 40, "test": 0}, "seed": 7, "steps": 18, "best_step": 12, "seconds": 3723.4,
    "examples_per_second": 51.2, "padding": 0.125, "peak_megabytes": 2048.4, "processes": 2, "notes": ["labels found: a, b"],
    "judged": "validation", "scores": {"accuracy": 0.5, "macro_f1": 0.25}, "validation": {"accuracy": 0.5, "macro_f1": 0.25},
    "versions": {"torch": "2"},
}  # fmt: skip


def page_of(task, examples, answers, record=RECORD, history=()):
    return run_page(record, history, "lr: 1", task, EncodedSplit(examples, None), answers, None)


def rows_of(page, title):
    """The cells of the table below a title."""
    below = page[page.index(f"<h2>{title}</h2>") :]
    body = below[: below.index("</table>")]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)][1:]


TWO = Task(labels=("no", "yes"))


def sure(label, share):
    return Answer(label, (1 - share, share) if label else (share, 1 - share))


def test_the_most_confident_mistakes_come_first():
    examples = [Example(((f"text {i}", "pair" if i == 3 else None),), i % 2) for i in range(6)]
    answers = [sure(0, 0.99), sure(0, 0.6), sure(1, 0.9), sure(0, 0.95), sure(0, 0.8), sure(1, 0.7)]
    found = rows_of(page_of(TWO, examples, answers), "The most confident mistakes")
    assert [row[0] for row in found] == ["text 3 / pair", "text 2", "text 1"]
    assert [row[1:] for row in found] == [["yes", "no", "0.9500"], ["no", "yes", "0.9000"], ["yes", "no", "0.6000"]]


def test_ten_mistakes_of_many_and_long_texts_are_cut():
    examples = [Example((("<b>" * 200, None),), 0)] * 30
    found = rows_of(page_of(TWO, examples, [sure(1, 0.9)] * 30), "The most confident mistakes")
    assert len(found) == 10
    assert all(row[0].count("&lt;") <= 67 for row in found)


def test_no_mistakes_no_table():
    page = page_of(TWO, [Example((("a", None),), 1)], [sure(1, 0.9)])
    assert "mistakes" not in page
    assert "True and predicted" not in page


def test_time_memory_and_cost_are_there():
    facts = dict(re.findall(r"<tr><td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td></tr>", page_of(TWO, [], []), re.S))
    assert facts["time"] == "1:02:03, 51 rows per second"
    assert facts["memory"] == "2,048 MB at most"
    assert facts["cost"] == "2.069 process hours", "3,723.4 s on two processes"
    assert facts["steps"] == "18, the best after 12"


def size(svg):
    return tuple(float(number) for number in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups())


def cells(svg):
    """The width of the coloured square of a confusion matrix."""
    return float(re.search(r'<image[^>]* width="([\d.]+)"', svg).group(1))


def test_long_labels_do_not_shrink_the_confusion_matrix():
    short = confusion(["a", "b", "c"], [0, 1, 2], [0, 1, 1])
    long = confusion([f"{name} {'very ' * 30}long" for name in "abc"], [0, 1, 2], [0, 1, 1])
    assert cells(long) == pytest.approx(cells(short), rel=0.02)
    assert "…" in long
    assert size(long)[0] < 3 * size(short)[0]


def test_numbers_that_no_axis_spans_have_no_scatter_plot():
    """Rows may have any finite number; the run is over by then, and its page must not fail."""
    examples = [Example((("w", None),), target) for target in (1e308, -1e308)]
    record = RECORD | {"scores": {"pearson": 1.0}, "validation": {"pearson": 1.0}}
    page = page_of(Task(kind="regression"), examples, [Answer(0.5)] * 2, record)
    assert "True and predicted" not in page


def test_a_number_has_a_scatter_plot_and_no_matrix():
    task = Task(kind="regression")
    examples = [Example(((f"w{i}", None),), i / 2) for i in range(5)]
    record = RECORD | {"scores": {"pearson": 1.0}, "validation": {"pearson": 1.0}}
    page = page_of(task, examples, [Answer(i / 3) for i in range(5)], record)
    assert "<h2>True and predicted</h2>" in page
    assert "Confusion matrix" not in page
    picture = page[page.index("True and predicted") :]
    points = re.findall(
        r"<use [^>]*xlink:href=\"#(?:m|C)[^\"]*\" x=\"([\d.]+)\" y=\"([\d.]+)\"[^>]*style=\"[^\"]*fill-opacity", picture
    )
    assert len(points) == 5, "a point for each row"
    broken = page_of(task, examples, [Answer(float("nan"))] * 5, record)
    assert "True and predicted" not in broken


def test_the_curve_shows_the_loss_that_chose():
    history = [{"step": i, "loss": 1.0 / i, "validation_pearson": None, "validation_loss": 2.0 / i} for i in (1, 2, 3)]
    assert "validation loss" in curve(history, "pearson")
    assert "validation loss" not in curve([{"step": 1, "loss": 1.0, "validation_f1": 0.5}], "f1")


def test_a_damaged_line_leaves_a_gap_in_the_curve():
    history = [{"step": 1, "l0ss": 1.0, "validation_fq": 0.5}, {"step": 2, "loss": 0.5, "validation_f1": 0.6}]
    assert "validation f1" in curve(history, "f1")


def test_labels_and_names_are_not_broken_to_make_room_for_texts():
    page = page_of(TWO, [Example((("a", None),), 1)], [sure(0, 0.9)])
    assert '<table class="texts">' in page[page.index("mistakes</h2>") :]
    assert '<table class="facts">' in page[: page.index("<h2>Metrics")]
    assert ".facts td:first-child, .texts td + td { overflow-wrap: break-word" in page
    assert 'name="viewport"' in page
