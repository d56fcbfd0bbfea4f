"""One host, several threads: each runs the setup it activated itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import inlay
from tests.hosts import batch, classifier, logits, shake


@pytest.fixture
def host() -> torch.nn.Module:
    host = classifier()
    for seed, name in enumerate("abc"):
        inlay.add(host, name, inlay.Parallel(size=4), head=inlay.Head(labels=2, pooling="mean"))
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"])
    return host


def test_each_thread_has_what_it_activated(host: torch.nn.Module) -> None:
    setups = ["a", "b", None, "f", inlay.Stack("a", "b"), inlay.Average("a", "c"), inlay.Rows("a", "b", None)]
    wanted = []
    for setup in setups:
        inlay.activate(host, setup)
        wanted.append(logits(host))
    start = threading.Barrier(len(setups))

    def run(setup: inlay.Setup) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        inlay.activate(host, setup)
        start.wait()  # all have activated before the first one runs
        found = [logits(host) for _ in range(5)]
        assert inlay.active(host) == setup
        return found

    with ThreadPoolExecutor(len(setups)) as pool:
        for setup, mine, found in zip(setups, wanted, pool.map(run, setups), strict=True):
            assert all(torch.equal(mine, one) for one in found), setup
    assert inlay.active(host) == setups[-1]  # this thread's own is what it was


def test_activated_is_for_this_thread(host: torch.nn.Module) -> None:
    inlay.activate(host, "a")
    of_a = logits(host)
    with ThreadPoolExecutor(1) as pool:

        def other() -> torch.Tensor:
            with inlay.activated(host, "b"):
                inside.set()
                go_on.wait(60)
                return logits(host)

        inside, go_on = threading.Event(), threading.Event()
        waiting = pool.submit(other)
        inside.wait(60)
        assert torch.equal(logits(host), of_a)
        go_on.set()
        of_b = waiting.result()
    inlay.activate(host, "b")
    assert torch.equal(logits(host), of_b)


def test_a_thread_that_never_activated_follows_the_others(host: torch.nn.Module) -> None:
    inlay.activate(host, "a")
    wanted = logits(host)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(logits, host).result(), wanted)
        inlay.activate(host, "b")
        wanted = logits(host)
        assert torch.equal(pool.submit(logits, host).result(), wanted)


def test_one_thread_adds_while_another_runs(host: torch.nn.Module) -> None:
    inlay.activate(host, "a")
    wanted = logits(host)
    stop, seen = threading.Event(), []

    def serve() -> None:
        inlay.activate(host, "a")
        while not stop.is_set():
            seen.append(logits(host, batch()))

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(5):
        inlay.add(host, f"new{number}", inlay.Houlsby(size=2))
        inlay.remove(host, f"new{number}")
    stop.set()
    thread.join()
    assert seen
    assert all(torch.equal(one, wanted) for one in seen)


def test_folding_reaches_every_thread() -> None:
    host = classifier()
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.LoRA(rank=2))
        shake(host, name, seed)
    inlay.activate(host, "a")
    wanted = logits(host)
    with ThreadPoolExecutor(2) as pool:
        start = threading.Barrier(2)

        def begin(setup: inlay.Setup) -> None:
            inlay.activate(host, setup)
            start.wait(60)  # one setup in each thread

        def now(_: int) -> torch.Tensor:
            start.wait(60)
            return logits(host)

        def everywhere() -> list[torch.Tensor]:
            return [logits(host), *pool.map(now, range(2))]

        list(pool.map(begin, ["a", "b"]))
        inlay.fold(host, "a")
        for found in everywhere():
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        list(pool.map(begin, ["a", "a"]))
        inlay.unfold(host)
        assert all(torch.equal(found, wanted) for found in everywhere())
