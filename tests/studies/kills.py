"""Kill runners and workers of a tiny study at random moments, and look that nothing is lost, repeated or changed.

    python -m tests.studies.kills FOLDER --kills 30 [--seed 0]

Everything is forked from this process, which has imported all that workers need: a kill costs its moment and nothing
else, and thousands of them can be had in an hour. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import sklearn.linear_model  # noqa: F401 (imported once for all workers)
import tqdm

import inlay.runs.train
import inlay.studies.efficiency
import inlay.training.evaluate  # noqa: F401
from inlay.studies.cells import LOG, RESULT, StudyFolder
from inlay.studies.engines import processes
from inlay.studies.formats import as_csv
from inlay.studies.plan import Plan, View, view_of
from inlay.studies.schedule import Schedule
from inlay.studies.tables import tables
from tests.studies.tiny import FILE, place, run_here, study_in

STUDY: dict[str, Any] = {
    "seeds": [0],
    "tries": 1000,  # a killed worker counts as a try
    "ways": {name: FILE["ways"][name] for name in ("logreg", "source", "single", "fused")},
}


class Forked:
    """A worker as `subprocess.Popen` would give it, but forked."""

    returncode: int = 0

    def __init__(self) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _live_as_a_worker(to_read[0], to_write[1])
        os.close(to_read[0])
        os.close(to_write[1])
        self.stdin: IO[str] = os.fdopen(to_read[1], "w")
        self.stdout: IO[str] = os.fdopen(to_write[0])

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _live_as_a_worker(stdin: int, stdout: int) -> None:
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, 512)  # above all the other workers' pipes: they have to end with the runner
    sys.stdin = os.fdopen(0, closefd=False)
    processes.main()
    os._exit(0)


class ForkedProcesses(processes.Processes):
    def _started(self) -> subprocess.Popen[str]:
        return Forked()  # type: ignore[return-value]


def forked_runner(plan: Plan, out: Path) -> int:
    """`inlay study run` in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            folder = StudyFolder(out)
            folder.claim(plan.facts())
            Schedule(View(plan, folder), ForkedProcesses(2)).run()
            code = 0
        finally:
            os._exit(code)
    return pid


def workers_of(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in found.split()]


def has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] != 0


def scores_of(out: Path) -> list[list[str]]:
    """The table without times and memory, which no two runs share."""
    view = view_of(out)
    lines = [line.split(",") for line in as_csv(tables(view), view).splitlines()]
    return [[*line[:14], line[-1]] for line in lines]


def runs_of_finished(out: Path) -> tuple[int, int]:
    """How many cells are finished, and how many were begun again after that.

    A cell is finished when its result is there; a kill may come before the log says so.
    """
    finished = {file.parent.name: file.stat().st_mtime for file in out.glob(f"cells/*/{RESULT}")}
    events = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    begun = [(event["cell"], event["time"]) for event in events if event["event"] == "begin"]
    rounded = 0.001  # seconds, in the log
    return len(finished), sum(cell in finished and at > finished[cell] + rounded for cell, at in begun)


def campaign(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Studies one after the other, each killed until it is done, until there were enough kills."""
    tqdm.tqdm.set_lock(threading.RLock())  # its own is shared by all forks, and goes with the one that is killed
    place(folder)
    study = study_in(folder, **STUDY)
    plan, chance = Plan.of(study), random.Random(seed)
    run_here(study, folder / "quiet")
    quiet = scores_of(folder / "quiet")
    found: dict[str, Any] = {"kills": 0, "of_workers": 0, "studies": 0, "other_tables": 0, "run_again": 0}
    while found["kills"] < kills:
        out = folder / f"killed-{found['studies']}"
        ended = False
        while not ended and found["kills"] < kills:
            runner = forked_runner(plan, out)
            time.sleep(chance.uniform(0.02, 1.0))
            workers = workers_of(runner)
            if workers and chance.random() < 0.5:
                os.kill(chance.choice(workers), signal.SIGKILL)
                found["kills"] += 1
                found["of_workers"] += 1
                time.sleep(chance.uniform(0.02, 0.5))
            ended = has_ended(runner)
            if not ended:
                os.kill(runner, signal.SIGKILL)
                os.waitpid(runner, 0)
                found["kills"] += 1
        os.waitpid(forked_runner(plan, out), 0)
        found["studies"] += 1
        found["other_tables"] += scores_of(out) != quiet
        cells, again = runs_of_finished(out)
        found["run_again"] += again
        found["cells"] = cells
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(json.dumps(campaign(asked.folder, asked.kills, asked.seed)))
