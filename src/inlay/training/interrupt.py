"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save, and leave; a second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupted(Exception):
    """The run was asked to stop, and has saved what it has."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Interrupts:
    """While this scope is open, the first signal is only noted.

    alone: whether a second signal leaves at once. Not under a launcher: its processes get the terminal's signal twice,
           once from the terminal and once more from the launcher.
    """

    CAUGHT = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
    """SIGHUP: the terminal was closed. Windows has none."""

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self.seen: int | None = None

    def __enter__(self) -> Interrupts:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # signals belong to the main thread
            closed = getattr(signal, "SIGHUP", None)  # what nohup has made the process ignore stays ignored
            heard = [n for n in self.CAUGHT if n != closed or signal.getsignal(n) != signal.SIG_IGN]
            self.before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen is not None and self.alone:
            raise KeyboardInterrupt
        self.seen = number
