"""Local processes: killed at any moment, shared by two runners, the same table."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml

from inlay.studies.engines.processes import _Process
from inlay.studies.formats import as_csv
from inlay.studies.plan import view_of
from inlay.studies.tables import tables
from tests.studies.tiny import FILE

RUN = [sys.executable, "-c", "from inlay.cli import main; main()", "study"]


def write(here, name="tiny", **changed):
    said = FILE | {"hosts": {"bert": str(here / "bert")}, "data_dir": str(here / "data")} | changed
    file = here / f"{name}.yaml"
    file.write_text(yaml.safe_dump(said, sort_keys=False))
    return file


def started(file, out, *more):
    words = [*RUN, "run", str(file), "--out", str(out), "--processes", "2", "--quiet", *more]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"{out}\n{err}"
    return out


def table(out):
    """Every score, without times and memory, which no two runs share."""
    view = view_of(out)
    lines = [line.split(",") for line in as_csv(tables(view), view).splitlines()]
    return [[*line[:14], line[-1]] for line in lines]


def events(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def workers_of(process):
    """The processes that a runner has started."""
    found = subprocess.run(["/bin/ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.long
def test_thirty_kills_change_nothing(tmp_path):
    """Runners and workers are killed with SIGKILL at random moments; `tests/studies/kills.py` is the longer form."""
    words = [sys.executable, "-m", "tests.studies.kills", str(tmp_path), "--kills", "30"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 30
    assert found["of_workers"] >= 1
    assert found["other_tables"] == 0, "the same table, bit for bit"
    assert found["run_again"] == 0, "no cell has run after it was finished"
    assert found["cells"] == 10, "a kill may come before the log says that a cell is finished, but its result is there"


@pytest.mark.long
def test_two_runners_share_a_folder(here, finished, tmp_path):
    """By command: each cell is run by one of them, and both end with the same table."""
    ways = {name: FILE["ways"][name] for name in ("source", "single", "fused")}
    file, out = write(here, ways=ways, seeds=[0]), tmp_path / "out"
    both = [started(file, out) for _ in range(2)]
    told = {ended(process) for process in both}
    assert len(told) == 1
    names = [event["cell"] for event in events(out) if event["event"] == "begin"]
    assert len(names) == len(set(names)) == 2 + 4 + 2
    done = {tuple(line[:10]) for line in table(finished[0])}
    assert {tuple(line[:10]) for line in table(out)} <= done


@pytest.mark.long
def test_ctrl_c_saves_and_says_how_to_go_on(here, tmp_path):
    ways = {"single": {"options": {"size": 4}, "epochs": 4000, "patience": 0}}
    file, out = write(here, "long", ways=ways, against=None, seeds=[0]), tmp_path / "out"
    process = started(file, out)
    for _ in range(2000):
        if list(out.glob("cells/*/checkpoint.safetensors")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"To go on: inlay study run {file} --out {out}" in told
    assert Counter(event["event"] for event in events(out))["interrupted"] >= 1
    assert list(out.glob("cells/*/checkpoint.safetensors"))
    assert not workers_of(process)


def test_a_study_with_a_failed_cell_shows_its_table_and_leaves_with_an_error(here, tmp_path):
    ways = {"logreg": {"kind": "embeddings"}, "far": {"options": {"size": 4}, "lr": 1e30}}
    file, out = write(here, "fails", ways=ways, against=None, seeds=[0], tasks={"a": None}, groups={}), tmp_path / "out"
    process = started(file, out)
    shown, told = process.communicate(timeout=300)
    assert process.returncode == 2, told
    assert "1 of 2 cells have failed" in told
    assert "logreg" in shown


def test_a_worker_that_keeps_dying_makes_its_cell_fail(here, tmp_path, monkeypatch):
    """Its cell is tried as often as the study says, then it is shown."""
    from inlay.studies.cells import StudyFolder
    from inlay.studies.engines.processes import Processes
    from inlay.studies.plan import Plan, View
    from inlay.studies.schedule import Schedule
    from tests.studies.tiny import study_in

    study = study_in(here, ways={"head": {"kind": "head"}}, against=None, seeds=[0], tries=2, groups={"targets": ["c"]})
    engine = Processes(1)
    engine.command = [
        sys.executable,
        "-c",
        "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)",
    ]
    plan, folder = Plan.of(study), StudyFolder(tmp_path / "out")
    folder.claim(plan.facts())
    view = Schedule(View(plan, folder), engine).run()
    (failure,) = view.failures.values()
    assert failure.tries == 2
    assert "killed by SIGKILL" in failure.error
    assert len(view.failed) == 1


@pytest.mark.parametrize("megabytes", [100.0, 1e9])
def test_memory_decides_how_many_run(megabytes):
    from inlay.studies.engines.processes import Processes, _Process

    engine = Processes(4)
    engine.free_megabytes = 10_000.0
    assert engine.room(1e9), "one may always run"
    busy = _Process.__new__(_Process)  # no process is started for this
    busy.cell, busy.megabytes = "one", 1000.0
    engine.workers = [busy]
    assert engine.room(megabytes) is (megabytes < 1e6)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="signals of real time are Linux's")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGRTMIN"])
def test_a_worker_that_dies_of_any_signal_is_told_of(number):
    """Those of real time have numbers and no names: without an event the study would wait for the cell for ever."""
    dies = getattr(signal, number) + (number == "SIGRTMIN")
    words = [sys.executable, "-c", f"import os; input(); os.kill(os.getpid(), {int(dies)})"]
    events = queue.Queue()
    worker = _Process(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), events)
    worker.send("cell", {}, 0.0)
    event = events.get(timeout=60)
    assert (event.cell, event.ending, event.died) == ("cell", "failed", True)
    assert number in event.error or f"signal {int(dies)}" in event.error
    worker.close()
