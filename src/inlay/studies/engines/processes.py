"""Processes of this machine, one thread each. They stay for many cells, so that torch is imported once in each.

A process reads descriptions of cells from its stdin, one JSON line each, and writes what happens to its stdout. When
its stdin ends, the runner is gone: it saves the cell that it runs and leaves. When it dies itself, the runner counts
that as a failure of its cell and starts another.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from inlay.studies.engines.base import PATIENCE, Ended, Moved
from inlay.training.progress import Silent
from inlay.training.threads import cores

SPARE = 500.0
"""Megabytes that are left to everything else."""


class _Process:
    """A worker, and the cell that it runs."""

    def __init__(self, popen: subprocess.Popen[str], events: queue.Queue[Ended | Moved]) -> None:
        self.popen, self.events = popen, events
        self.cell: str | None = None
        self.megabytes = 0.0
        self.dead = False
        self.lock = threading.Lock()
        """Between the runner, who gives it a cell, and the thread that sees it die."""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def send(self, cell: str, description: Mapping[str, Any], megabytes: float) -> None:
        with self.lock:
            self.cell, self.megabytes = cell, megabytes
            if self.dead:
                self._tell_death()
        with suppress(OSError):  # it dies just now: its reader tells
            assert self.popen.stdin is not None
            self.popen.stdin.write(json.dumps(dict(description)) + "\n")
            self.popen.stdin.flush()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stdout:
            for line in stdout:
                with suppress(ValueError):  # a process that was killed may leave half a line
                    kind, *words = json.loads(line)
                    self.events.put(Ended(*words) if kind == "ended" else Moved(*words))
        self.popen.wait()
        with self.lock:
            self.dead = True
            if self.cell is not None:
                self._tell_death()

    def _tell_death(self) -> None:
        assert self.cell is not None
        why = _how_it_ended(self.popen.returncode)
        self.events.put(Ended(self.cell, "failed", f"the process that ran it {why}", died=True))

    def close(self) -> None:
        """Nothing more comes: a worker saves its cell and leaves."""
        with suppress(OSError):
            assert self.popen.stdin is not None
            self.popen.stdin.close()


def _how_it_ended(code: int) -> str:
    """A process's exit code in words; the signals of real time have no name."""
    if code >= 0:
        return f"left with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


class Processes:
    """As many processes as asked for; memory may allow fewer."""

    def __init__(self, count: int | None = None, log: Path | None = None) -> None:
        self.count = count or cores()
        self.log = log
        self.command = [sys.executable, "-m", "inlay.studies.engines.processes"]
        self.free_megabytes = available_megabytes()
        self.events: queue.Queue[Ended | Moved] = queue.Queue()
        self.workers: list[_Process] = []

    def room(self, megabytes: float) -> bool:
        busy = [worker for worker in self.workers if worker.cell is not None]
        used = sum(worker.megabytes for worker in busy)
        return not busy or (len(busy) < self.count and used + megabytes + SPARE <= self.free_megabytes)

    def start(self, cell: str, description: Mapping[str, Any], megabytes: float) -> None:
        for worker in [worker for worker in self.workers if worker.dead]:
            worker.close()
            self.workers.remove(worker)
        idle = [worker for worker in self.workers if worker.cell is None]
        if not idle:
            idle = [_Process(self._started(), self.events)]
            self.workers += idle
        idle[0].send(cell, description, megabytes)

    def _started(self) -> subprocess.Popen[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MKL_NUM_THREADS": "1"}
        errors: IO[bytes] | int = subprocess.DEVNULL
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            errors = self.log.open("ab")
        try:
            return subprocess.Popen(  # noqa: S603 (our own worker)
                self.command,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env,
                start_new_session=True,  # Ctrl-C is for the runner, which tells its workers
            )  # fmt: skip
        finally:
            if not isinstance(errors, int):
                errors.close()

    def wait(self, seconds: float) -> list[Ended | Moved]:
        found: list[Ended | Moved] = []
        try:
            found.append(self.events.get(timeout=seconds))
            while True:
                found.append(self.events.get_nowait())
        except queue.Empty:
            pass
        for event in found:
            if isinstance(event, Ended):
                for worker in self.workers:
                    if worker.cell == event.cell:
                        worker.cell = None
        return found

    def stop(self) -> None:
        for worker in self.workers:
            worker.close()
        until = time.monotonic() + PATIENCE
        for worker in self.workers:
            worker.reader.join(max(0.1, until - time.monotonic()))
            if not worker.dead:
                worker.popen.kill()
                worker.reader.join()
        self.workers = []


def available_megabytes() -> float:
    """Memory that new processes may have: of the machine, or of the container that this runs in."""
    found = [float("inf")]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) / 1024)
        limit, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        if limit != "max":
            found.append((int(limit) - int(used)) / 1024**2)
    except (OSError, ValueError):
        pass  # not on Linux, or no limit: then nothing is known but the number of cores
    return min(found)


# in a worker


class _Sender(Silent):
    """A watcher that tells the runner, now and then."""

    def __init__(self, cell: str, out: IO[str]) -> None:
        self.cell, self.out = cell, out
        self.sent, self.total = 0.0, 0

    def start(self, title: str, done: int, total: int) -> None:
        self.total = total

    def step(self, done: int, loss: float, score: str) -> None:
        now = time.monotonic()
        if now - self.sent > 0.5:
            self.sent = now
            with suppress(OSError):  # the runner is gone: no reason for the cell to fail
                print(json.dumps(["moved", self.cell, done, self.total, score]), file=self.out, flush=True)


def _read_until_the_runner_is_gone(jobs: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    jobs.put(None)
    os.kill(os.getpid(), signal.SIGTERM)  # a training that runs saves itself and ends


def main() -> None:
    """A worker's whole life."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message to the runner
    jobs: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_until_the_runner_is_gone, args=(jobs,), daemon=True).start()
    from inlay.studies.worker import run_cell

    while (line := jobs.get()) is not None:
        cell = json.loads(line)
        try:
            ending, error = run_cell(cell, _Sender(cell["cell"], out))
            print(json.dumps(["ended", cell["cell"], ending, error]), file=out, flush=True)
        except OSError:  # the runner is gone; what is done is done
            return


if __name__ == "__main__":
    main()
