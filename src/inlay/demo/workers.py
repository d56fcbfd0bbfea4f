"""Pieces of work over all cores, one thread each, with their progress shown all the time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol

from inlay.training.progress import Silent, Watcher, clock, progress_bars

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from rich.progress import Progress, TaskID

Result = dict[str, Any]
"""What a piece of work hands back: plain numbers and words."""
Event = tuple[str, int, int, float, str]
"""A piece's name, its steps done and in all, the loss and the score."""
_events: Queue[Event] | None = None
"""In a worker: where its progress goes."""


class Piece(Protocol):
    """One piece of work."""

    @property
    def name(self) -> str: ...

    def __call__(self, watch: Watcher) -> list[Result]: ...


class Sender(Silent):
    """A watcher that tells the parent process."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, 0.0

    def start(self, title: str, done: int, total: int) -> None:
        self.total = total

    def step(self, done: int, loss: float, score: str) -> None:
        now = time.monotonic()
        if now - self.sent > 0.5 or done == self.total:
            self.sent = now
            assert _events is not None
            _events.put((self.name, done, self.total, loss, score))


class Workers:
    """A few processes that stay for all rounds of work: torch is imported once in each."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.events = context.Queue()
        self.pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(self.events,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def run(self, pieces: Sequence[Piece]) -> list[Result]:
        """Every piece's results, in the order of the pieces."""
        board = Board(len(pieces))
        futures = [self.pool.submit(_work, piece) for piece in pieces]
        try:
            while True:
                done, waiting = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
                board.show(self.events, sum(future.done() for future in futures))
                if not waiting or any(future.exception() for future in done):
                    return [result for future in futures for result in future.result()]
        finally:
            board.close()


def _prepare(events: Queue[Event]) -> None:
    """In a new worker, before torch is imported."""
    global _events
    _events = events
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _work(piece: Piece) -> list[Result]:
    return piece(Sender(piece.name))


class Board:
    """What all workers are doing: bars on a terminal, a line every few seconds elsewhere."""

    def __init__(self, pieces: int, every: float = 5.0) -> None:
        self.pieces, self.every = pieces, every
        self.began = self.shown = time.monotonic()
        self.latest: dict[str, tuple[int, int, float, str]] = {}
        self.bars: Progress | None = None
        if sys.stderr.isatty():
            from rich.console import Console

            self.bars = progress_bars(Console(stderr=True))
            self.whole = self.bars.add_task("all", total=pieces, note="")
            self.rows: dict[str, TaskID] = {}
            self.bars.start()

    def show(self, events: Queue[Event], finished: int) -> None:
        while True:
            try:
                name, done, total, loss, score = events.get_nowait()
            except queue.Empty:
                break
            self.latest[name] = (done, total, loss, score)
        if self.bars is not None:
            self._update(self.bars, finished)
        else:
            self._line(finished)

    def _update(self, bars: Progress, finished: int) -> None:
        bars.update(self.whole, completed=finished)
        for name, (done, total, loss, score) in self.latest.items():
            if name not in self.rows:
                self.rows[name] = bars.add_task(name, total=total, note="")
            bars.update(
                self.rows[name], completed=done, total=total, visible=done < total, note=f"loss {loss:.3f}  {score}"
            )

    def _line(self, finished: int) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        running = [
            f"{name} {done}/{total} loss {loss:.3f}"
            for name, (done, total, loss, _) in self.latest.items()
            if done < total
        ]
        print(
            f"{clock(now - self.began)}  {finished}/{self.pieces} done  {'; '.join(running)}",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()
