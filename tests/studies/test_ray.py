"""Studies on a real Ray, started here: one machine, two nodes, and a worker that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from inlay import InlayError
from inlay.studies.cells import StudyFolder
from inlay.studies.engines.ray import RayTasks, check_answers
from inlay.studies.formats import as_csv
from inlay.studies.plan import Plan, View
from inlay.studies.schedule import Schedule
from inlay.studies.tables import tables
from tests.studies.tiny import FILE, study_in

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'inlay[study]'")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(  # of Ray's own processes
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    node = {"num_cpus": 1, "object_store_memory": 80 * 1024**2, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node | {"include_dashboard": None})
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


def run(study, out, engine):
    plan, folder = Plan.of(study), StudyFolder(out)
    folder.claim(plan.facts())
    return Schedule(View(plan, folder), engine).run()


def scores(view):
    lines = [line.split(",") for line in as_csv(tables(view), view).splitlines()]
    return [[*line[:14], line[-1]] for line in lines]


def test_ray_gives_the_same_table_on_two_nodes(cluster, here, finished, tmp_path):
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    engine = RayTasks()
    assert engine.count == 2
    view = run(study_in(here), tmp_path / "out", engine)
    assert scores(view) == scores(finished[1])
    assert ray.is_initialized(), "a cluster that was there before stays"


def test_a_worker_that_is_killed_is_retried(cluster, here, tmp_path):
    ways = {"single": FILE["ways"]["single"] | {"grid": {}, "epochs": 60, "patience": 0}}
    study, out = study_in(here, ways=ways, against=None, seeds=[0], groups={"targets": ["c"]}), tmp_path / "out"
    killed = []

    def kill():
        """The process of the first cell that is begun, when it has a checkpoint."""
        for _ in range(1200):
            if list(out.glob("cells/*/checkpoint.safetensors")):
                begun = (out / "log.jsonl").read_text()
                killed.append(int(begun.split('"process": ')[1].split("}")[0].split(",")[0]))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    view = run(study, out, RayTasks())
    thread.join()
    assert killed
    assert len(view.filled) == 1
    assert '"failed"' in (out / "log.jsonl").read_text()
    assert next(iter(view.results.values()))["resumed"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_that_does_not_answer(address):
    with pytest.raises(InlayError, match="nothing answers at|--address is HOST:PORT"):
        check_answers(address)


def test_ray_on_this_machine_by_command(here, tmp_path):
    """A Ray of its own, started and ended by the command."""
    said = FILE | {"hosts": {"bert": str(here / "bert")}, "data_dir": str(here / "data"), "against": None, "seeds": [0]}
    file = tmp_path / "ray.yaml"
    file.write_text(yaml.safe_dump(said | {"ways": {"logreg": {"kind": "embeddings"}}}, sort_keys=False))
    words = [
        "study",
        "run",
        str(file),
        "--out",
        str(tmp_path / "out"),
        "--engine",
        "ray",
        "--processes",
        "1",
        "--quiet",
    ]
    run = [sys.executable, "-c", "from inlay.cli import main; main()"]
    done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "logreg" in done.stdout
    wrong = subprocess.run([*run, *words, "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2
    assert "nothing answers at 127.0.0.1:1" in wrong.stderr
