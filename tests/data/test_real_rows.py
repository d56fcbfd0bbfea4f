"""Every built-in task whose rows are at hand: counts as stated, tokenised, and trained for two steps."""

import os
from pathlib import Path

import pytest
import torch

import inlay
from inlay.data import Data, prepare
from inlay.data.splits import Prepared
from inlay.training.loop import TrainingLoop
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench
from tests.training.small import save_bert, save_t5

FOLDER = Path(os.environ.get("INLAY_DATA") or "nowhere")
COUNTS = {
    "rte": (2490, 277), "cb": (250, 56), "mrpc": (3668, 408), "sick": (4500, 500), "copa": (400, 100), "wic": (5428, 638),
    "cola": (8551, 1043), "stsb": (5749, 1500), "sst2": (67349, 872), "boolq": (5156, 3270), "scitail": (9311, 1304),
    "csqa": (9741, 1221), "socialiqa": (33410, 1954), "winogrande": (10234, 1267), "cosmosqa": (2388, 597), "hellaswag": (9042, 1000),
    "imdb": (19000, 1000), "mnli": (20000, 5000), "qqp": (20000, 5000), "qnli": (11803, 5463), "multirc": (19997, 4848),
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no benchmark rows: set INLAY_DATA to a folder of <task>/<split>.jsonl.gz"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    return {"bert": save_bert(folder / "bert"), "t5": save_t5(folder / "t5")}


@pytest.mark.parametrize("name", COUNTS)
def test_loads_tokenises_and_trains(name, hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path))
    read = prepare(Data(task=name, data_dir=FOLDER))
    assert (len(read.train), len(read.validation)) == COUNTS[name]
    assert read.task.kind != "classification" or {example.target for example in read.train} == set(
        range(len(read.task.labels))
    )
    few = Prepared(read.task, read.train[:16], read.validation[:8], [])
    bench = Workbench.open(str(hosts["bert"]), few.task)
    bench.set_up("x", "inlay", method=inlay.Pfeiffer(reduction=2))
    host, codec = bench.host, bench.codec(64)
    before = {key: tensor.clone() for key, tensor in host.inlays.state_dict().items()}
    outcome = TrainingLoop(
        host,
        codec,
        codec.encode(few.train),
        codec.encode(few.validation),
        Recipe(lr=1e-2, epochs=1, batch_size=8),
    ).run()
    assert outcome.steps == 2
    assert list(outcome.scores) == list(few.task.metrics)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in host.inlays.state_dict().items())


@pytest.mark.parametrize("name", ["rte", "stsb", "copa", "winogrande"])
def test_text_hosts_train_on_every_kind(name, hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path))
    read = prepare(Data(task=name, data_dir=FOLDER))
    bench = Workbench.open(str(hosts["t5"]), read.task)
    bench.set_up("x", "inlay", method=inlay.Houlsby(reduction=2))
    host, codec = bench.host, bench.codec(64)
    outcome = TrainingLoop(
        host,
        codec,
        codec.encode(read.train[:8]),
        codec.encode(read.validation[:4]),
        Recipe(lr=1e-2, epochs=2, batch_size=8),
    ).run()
    assert outcome.steps == 2
