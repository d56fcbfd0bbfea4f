"""Which rows run together."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.serve.batcher import Batcher


@dataclass(eq=False)
class Waits:
    length: int = 1
    client: str = "a"
    group: str = "together"
    arrived: float = 0.0
    wanted: bool = True


def filled(waiting, **how) -> Batcher:
    batcher = Batcher(**{"rows": 4, "tokens": 100, "wait": 0.5} | how)
    for row in waiting:
        batcher.add(row.client, [row])
    return batcher


def test_rows_of_like_length_run_together_within_the_budget():
    batcher = filled([Waits(length) for length in (10, 50, 11, 49, 9, 10)])
    assert [row.length for row in batcher.take()] == [9, 10, 10, 11]
    assert [row.length for row in batcher.take()] == [49, 50]
    assert batcher.take() == []


def test_a_row_that_is_longer_than_the_budget_runs_alone():
    batcher = filled([Waits(500), Waits(500), Waits(1)])
    assert [[row.length for row in batcher.take()] for _ in range(3)] == [[500], [500], [1]]


def test_clients_have_turns():
    """One that sends much does not keep the others waiting."""
    batcher = filled([Waits(10, "much") for _ in range(40)] + [Waits(90, "b"), Waits(60, "c")])
    firsts = [batcher.take() for _ in range(3)]
    assert [{row.client for row in batch} for batch in firsts] == [{"much"}, {"b"}, {"c"}]


def test_a_full_batch_is_shared_among_clients():
    batcher = filled([Waits(1, "much") for _ in range(40)] + [Waits(1, "b"), Waits(1, "c")])
    assert sorted(row.client for row in batcher.take()) == ["b", "c", "much", "much"]


def test_groups_do_not_mix():
    batcher = filled([Waits(group="x"), Waits(group="y"), Waits(group="x")])
    assert {row.group for row in batcher.take()} == {"x"}
    assert {row.group for row in batcher.take()} == {"y"}


def test_rows_that_nobody_waits_for_are_dropped():
    batcher = filled([Waits(wanted=False), Waits(), Waits(wanted=False, client="gone")])
    assert len(batcher.take()) == 1
    assert not batcher.clients


def test_a_batch_begins_when_it_is_full_or_its_oldest_row_has_waited():
    assert filled([]).ready_at() is None
    assert filled([Waits(arrived=3.0), Waits(arrived=2.0, client="b")]).ready_at() == 2.5
    assert filled([Waits(arrived=3.0)] * 4).ready_at() == 0
    assert filled([Waits(100, arrived=3.0)]).ready_at() == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.sampled_from("abc"), st.sampled_from("xy")), max_size=60),
    st.integers(1, 9),
    st.integers(1, 200),
)
def test_every_row_runs_once_within_bounds_and_in_time(given_rows, most, budget):
    rows = [Waits(length, client, group) for length, client, group in given_rows]
    batcher = filled(rows, rows=most, tokens=budget)
    done, batches = [], 0
    while batch := batcher.take():
        batches += 1
        assert len(batch) <= most
        assert len(batch) == 1 or len(batch) * max(row.length for row in batch) <= budget
        assert len({row.group for row in batch}) == 1
        done += batch
    assert sorted(map(id, done)) == sorted(map(id, rows))
    assert batches <= len(rows)
