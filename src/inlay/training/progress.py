"""What a run shows while it works: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from inlay.storage.plain_text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class Watcher(Protocol):
    """Told about every step."""

    def start(self, title: str, done: int, total: int) -> None: ...

    def step(self, done: int, loss: float, score: str) -> None: ...

    def asked(self, done: int, total: int) -> None:
        """This many of the rows of an evaluation are answered."""

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Shows nothing."""

    def start(self, title: str, done: int, total: int) -> None: ...

    def step(self, done: int, loss: float, score: str) -> None: ...

    def asked(self, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Lines:
    """One line every few seconds, for logs."""

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.stream, self.every = stream or sys.stderr, every

    def start(self, title: str, done: int, total: int) -> None:
        self.title, self.total, self.first = title, total, done
        self.began = self.shown = time.monotonic()

    def step(self, done: int, loss: float, score: str) -> None:
        now = time.monotonic()
        if now - self.shown < self.every and done < self.total:
            return
        self.shown = now
        left = (now - self.began) / max(1, done - self.first) * (self.total - done)
        parts = (self.title, f"{done}/{self.total}", f"loss {loss:.3f}", score, f"{clock(left)} left")
        self.say("  ".join(part for part in parts if part))

    def asked(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.shown >= self.every and done < total:
            self.shown = now
            self.say(f"{self.title}  evaluating {done:,}/{total:,}")

    def say(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)

    def stop(self) -> None: ...


class Bar:
    """A progress bar with the loss, the metric and the time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars: Progress | None = None

    def start(self, title: str, done: int, total: int) -> None:
        self.bars = progress_bars(self.console)
        self.total = total
        self.task = self.bars.add_task(printable(title), total=total, completed=done, note="")
        self.bars.start()

    def step(self, done: int, loss: float, score: str) -> None:
        assert self.bars is not None
        self.bars.update(self.task, completed=done, note=f"loss {loss:.3f}  {score}")

    def asked(self, done: int, total: int) -> None:
        assert self.bars is not None
        if total == self.total:
            self.bars.update(self.task, completed=done, note="")
        else:
            self.bars.update(self.task, note=f"evaluating {done:,}/{total:,}")

    def say(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, emoji=False)

    def stop(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def progress_bars(console: Console) -> Progress:
    """Bars that vanish when they are done; each task has a `note` that stands beside its bar."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = ("{task.description:<12}", BarColumn(), MofNCompleteColumn(), "{task.fields[note]}")
    shown = [TextColumn(column, markup=False) if isinstance(column, str) else column for column in columns]
    return Progress(
        *shown, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=3600
    )


def counter(watch: Watcher, total: int) -> Callable[[int], None]:
    """What `ask` calls with the number of rows that it has just answered."""
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        watch.asked(done, total)

    return count


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def watcher(quiet: bool = False) -> Watcher:
    """What fits where the output goes."""
    if quiet:
        return Silent()
    if sys.stderr.isatty():
        from rich.console import Console

        return Bar(Console(stderr=True))
    return Lines()
