"""What a study shows while it runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from inlay.storage.plain_text import printable
from inlay.studies.plan import View
from inlay.studies.schedule import Progress
from inlay.training.progress import clock, progress_bars

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


def in_words(progress: Progress) -> str:
    """12/40 done, 2 running, 1 failed, 3:20 left."""
    parts = [f"{progress.done}/{progress.total} done", f"{len(progress.running)} running"]
    parts += [f"{progress.elsewhere} elsewhere"] if progress.elsewhere else []
    parts += [f"{progress.failed} failed"] if progress.failed else []
    parts += [f"about {clock(progress.seconds_left)} left"] if progress.seconds_left is not None else []
    return ", ".join(parts)


class Lines:
    """A line when something has changed, and every few seconds."""

    def __init__(self, stream: TextIO | None = None, every: float = 15.0) -> None:
        self.stream, self.every = stream or sys.stderr, every
        self.began = time.monotonic()
        self.shown = 0.0
        self.done = -1

    def __call__(self, progress: Progress, view: View) -> None:
        now = time.monotonic()
        finished = progress.done + progress.failed
        if now - self.shown < (self.every / 3 if finished != self.done else self.every):
            return
        self.shown, self.done = now, finished
        names = view.names()
        running = "; ".join(
            _running(names[name].slot, moved) for name, moved in progress.running.items() if name in names
        )
        line = f"{clock(now - self.began)}  {in_words(progress)}" + (f"  [{running}]" if running else "")
        print(printable(line), file=self.stream, flush=True)

    def close(self) -> None: ...


class Board:
    """A bar for the whole study, and one for each cell that runs."""

    def __init__(self) -> None:
        from rich.console import Console

        self.bars: Bars = progress_bars(Console(stderr=True))
        self.whole = self.bars.add_task("study", total=None, note="")
        self.rows: dict[str, TaskID] = {}
        self.bars.start()

    def __call__(self, progress: Progress, view: View) -> None:
        self.bars.update(self.whole, completed=progress.done, total=progress.total, note=in_words(progress))
        names = view.names()
        for name in [name for name in self.rows if name not in progress.running]:
            self.bars.remove_task(self.rows.pop(name))
        for name, moved in progress.running.items():
            if name not in self.rows and name in names:
                self.rows[name] = self.bars.add_task(printable(str(names[name].slot)), total=None, note="")
            if moved is not None and name in self.rows:
                self.bars.update(self.rows[name], completed=moved.done, total=moved.total, note=moved.note)

    def close(self) -> None:
        self.bars.stop()


class Silent:
    def __call__(self, progress: Progress, view: View) -> None: ...

    def close(self) -> None: ...


def board(quiet: bool = False) -> Board | Lines | Silent:
    """What fits where the output goes."""
    if quiet:
        return Silent()
    return Board() if sys.stderr.isatty() else Lines()


def _running(slot: object, moved: object) -> str:
    done = getattr(moved, "done", None)
    return f"{slot} {done}/{getattr(moved, 'total', '')}" if done is not None else str(slot)
