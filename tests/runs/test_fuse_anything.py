"""Members of any kind of task fuse for a target of any other: one host, heads left behind, norms agreed on."""

from __future__ import annotations

import gzip
import json
import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import inlay
from inlay.cli import main
from inlay.data import Task, builtin_tasks
from inlay.data.task import fields_of, template
from inlay.runs.settings import Settings
from inlay.runs.train import train_run
from inlay.runs.use import open_for_use
from inlay.training.workbench import Workbench
from tests.training.small import BAD, GOOD, KINDS, OTHER, rows_of, save_bert, write_rows

FIVE = ("mnli", "sst2", "stsb", "csqa", "cb")
SIXTEEN = (
    "mnli", "qqp", "sst2", "winogrande", "imdb", "hellaswag", "socialiqa", "cosmosqa", "scitail", "argument", "csqa",
    "boolq", "mrpc", "sick", "rte", "cb",
)  # fmt: skip
FEW: dict[str, Any] = {"batch_size": 8, "max_steps": 2, "max_length": 32, "lr": 0.01, "threads": 1}
REAL = os.environ.get("INLAY_DATA")


def toy_rows(task: Task, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows in the columns of a built-in task, with one word that decides."""
    chance, made = random.Random(f"{task.name} {seed}"), []
    for i in range(count):
        columns = [name for text in (task.text, task.pair) if text for name in fields_of(template(text))]
        row: dict[str, Any] = {name: " ".join(chance.choices(OTHER, k=4)) for name in columns}
        if task.kind == "choice":
            row["choices"] = [chance.choice(BAD) for _ in range(2 + i % 3)]
            row[task.label] = i % len(row["choices"])
            row["choices"][row[task.label]] = chance.choice(GOOD)
            row[columns[0]] += f" {task.blank}" if task.blank else ""
        else:
            at = i % max(2, len(task.labels))
            row[columns[-1]] += f" {(*GOOD, *BAD)[at]}"
            row[task.label] = task.labels[at] if task.labels else float(at)
        made.append(row)
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host, toy rows of the sixteen tasks and STS-B in data/, and real ones in real/, where they are given."""
    folder = tmp_path_factory.mktemp("anything")
    save_bert(folder / "bert")
    for name in (*SIXTEEN, "stsb"):
        for seed, split in enumerate(("train", "validation")):
            write_rows(folder / "data" / name / f"{split}.jsonl", toy_rows(builtin_tasks()[name], 24, seed))
        for split in ("train", "validation") if REAL else ():
            source = Path(str(REAL)) / name / f"{split}.jsonl.gz"
            if source.is_file():
                with gzip.open(source, "rt", encoding="utf-8") as stream:
                    write_rows(folder / "real" / name / f"{split}.jsonl", list(map(json.loads, islice(stream, 80))))
    return folder


@pytest.fixture(autouse=True)
def own_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)


def train(place: Path, name: str, data: str) -> Path:
    out = place / "runs" / data / name
    if not out.exists():
        settings = FEW | {"task": name, "data_dir": place / data, "host": str(place / "bert"), "out": out}
        train_run(Settings(**settings, options={"reduction": 4}))
    return out


def fuse(members: list[Path], out: str, *words: str) -> dict[str, Any]:
    few = [word for key, value in FEW.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    main(["fuse", *map(str, members), "--host", "bert", *words, *few, "--quiet", "--out", out])
    return json.loads((Path(out) / "run.json").read_text())


@pytest.mark.parametrize("target", ["cb", "csqa", "stsb"])
@pytest.mark.parametrize(
    "data", ["data", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="INLAY_DATA is not set"))]
)
def test_five_kinds_of_members_fuse_for_a_label_a_choice_and_a_number(place, data, target):
    others = [name for name in FIVE if name != target]
    members = [train(place, name, data) for name in (*others, target)]
    record = fuse(members, f"fused/{data}/{target}", "--task", target, "--data-dir", data)
    assert record["status"] == "finished"
    assert set(record["scores"]) == set(builtin_tasks()[target].metrics)
    opened = open_for_use(Path(f"fused/{data}/{target}"))
    inlays = opened.host.inlays
    assert [inlays[name].head for name in others] == [None] * 4, "members leave their heads behind"
    assert opened.codec.measure is not None
    head = load_file(f"fused/{data}/{target}/inlay/weights.safetensors")["head.classifier.layers.1.weight"]
    assert len(head) == {"cb": 3, "csqa": 1, "stsb": 1}[target]
    told = list(opened.predict(_table(place / data / target / "validation.jsonl")))
    assert len(told) > 10


def _table(file: Path) -> Any:
    from inlay.data.rows import read_table

    return read_table(file)


def test_sixteen_tasks_one_host_one_fusion_over_all(place):
    """The paper's fusion, on toy rows: for a label target and for a choice target."""
    members = [train(place, name, "data") for name in SIXTEEN]
    for target in ("rte", "csqa"):
        ordered = sorted(members, key=lambda run: run.name == target)
        record = fuse(ordered, f"all/{target}", "--task", target, "--data-dir", "data")
        assert record["status"] == "finished"
        assert len(list((Path("all") / target / "members").iterdir())) == 16


def test_every_kind_is_a_target_and_a_member(place):
    """Toy rows of each kind; every run can be measured, predicts, and is opened by its inlay alone."""
    runs = {}
    for kind in KINDS:
        files = {
            f"{split}_file": write_rows(place / kind / f"{split}.jsonl", rows_of(kind, 24, seed))
            for seed, split in enumerate(("train", "validation"))
        }
        runs[kind] = place / "runs" / "kinds" / kind
        train_run(Settings(**FEW, kind=kind, task=f"toy-{kind}", **files, host=str(place / "bert"), out=runs[kind]))
    for kind in KINDS:
        ordered = [*(run for other, run in runs.items() if other != kind), runs[kind]]
        words = (
            "--kind",
            kind,
            "--task",
            f"toy-{kind}",
            "--train-file",
            f"{kind}/train.jsonl",
            "--validation-file",
            f"{kind}/validation.jsonl",
        )
        assert fuse(ordered, f"kinds/{kind}", *words)["status"] == "finished"
        rows = _table(place / kind / "validation.jsonl")
        for opened in (open_for_use(place / "kinds" / kind), open_for_use(runs[kind] / "inlay", str(place / "bert"))):
            assert opened.codec.task.kind == kind
            assert len(list(opened.predict(rows))) == 24
        main(["eval", str(runs[kind] / "inlay"), "--host", "bert", "--file", f"{kind}/validation.jsonl", "--json"])


def test_a_member_keeps_its_identity_without_its_head(place, tmp_path):
    run = train(place, "cb", "data")
    bench = Workbench.open(str(place / "bert"), builtin_tasks()["sst2"])
    name = inlay.load(bench.host, run / "inlay", head=False)
    assert bench.host.inlays[name].head is None
    assert not any(key.startswith("head") for key in bench.host.inlays[name].parts)
    inlay.load(bench.host, train(place, "csqa", "data") / "inlay", head=False)
    inlay.add_fusion(bench.host, "f", ["cb", "csqa"], head=bench.head())
    inlay.save(bench.host, "f", tmp_path / "f")
    other = Workbench.open(str(place / "bert"), builtin_tasks()["cb"])
    inlay.load(other.host, run / "inlay")  # with its head this time
    inlay.load(other.host, place / "runs" / "data" / "csqa" / "inlay", head=False)
    assert inlay.load(other.host, tmp_path / "f") == "f"
    main(
        [
            "train",
            "--host",
            "bert",
            "--mode",
            "head",
            "--task",
            "cb",
            "--data-dir",
            "data",
            "--batch-size",
            "8",
            "--max-steps",
            "1",
            "--quiet",
            "--out",
            str(tmp_path / "head"),
        ]
    )
    with pytest.raises(inlay.CheckpointError, match="nothing but a head"):
        inlay.load(other.host, tmp_path / "head" / "inlay", head=False)


def member(place: Path, out: Path, name: str, norm: float | None) -> Path:
    bench = Workbench.open(str(place / "bert"), builtin_tasks()["cb"])
    inlay.add(bench.host, name, inlay.Pfeiffer(size=4), head=bench.head(), norms=norm is not None)
    for key, part in bench.host.inlays[name].parts.items():
        if key.startswith("norm"):
            torch.nn.init.constant_(part.weight, norm)
    return inlay.save(bench.host, name, out / name)


def test_norms_of_members_come_along_or_are_refused(place, tmp_path):
    task = builtin_tasks()["rte"]
    same = [member(place, tmp_path, "a", 1.5), member(place, tmp_path, "b", 1.5)]
    bench = Workbench.open(str(place / "bert"), task)
    bench.set_up("f", "fusion", members=same)
    fusion = bench.host.inlays["f"]
    assert fusion.norms
    assert all((part.weight == 1.5).all() for key, part in fusion.parts.items() if key.startswith("norm"))
    for other in (member(place, tmp_path, "c", 2.0), member(place, tmp_path, "d", None)):
        with pytest.raises(inlay.SetupError, match=r"the members' norms differ \(.*a has its own.*norms=False"):
            Workbench.open(str(place / "bert"), task).set_up("f", "fusion", members=[*same, other])
        for norms in (True, False):
            bench = Workbench.open(str(place / "bert"), task)
            bench.set_up("f", "fusion", members=[*same, other], norms=norms)
            assert bench.host.inlays["f"].norms == norms


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*words])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_members_for_another_host_are_all_named_and_nothing_is_written(place, tmp_path, capsys):
    save_bert(tmp_path / "wide", hidden_size=24)
    members = [str(train(place, name, "data")) for name in ("cb", "csqa", "mnli")]
    told = refused(capsys, "fuse", *members, "--host", str(tmp_path / "wide"), "--task", "cb", "--data-dir", "data", "--out", str(tmp_path / "out"), "--batch-size", "8")  # fmt: skip
    assert told.count("it was made for a host with hidden_size 16, this one has 24") == 3
    assert not (tmp_path / "out").exists()


def test_more_labels_than_the_head(place, tmp_path, capsys):
    bench = Workbench.open(str(place / "bert"), builtin_tasks()["rte"])
    inlay.add(bench.host, "x", inlay.Pfeiffer(size=4), head=bench.head())
    inlay.save(bench.host, "x", tmp_path / "x", task="cb")  # two labels, said to be of a task with three
    told = refused(capsys, "eval", str(tmp_path / "x"), "--host", "bert", "--file", "data/cb/validation.jsonl")
    assert "'cb' has 3 labels (entailment, contradiction, neutral), its head 2 (entailment, not_entailment)" in told


def test_the_stride_of_contexts_is_a_setting(place, capsys):
    files = {"train_file": write_rows(place / "s" / "train.jsonl", rows_of("spans", 24)), "validation_file": place / "s" / "train.jsonl"}  # fmt: skip
    out = place / "runs" / "stride"
    train_run(Settings(**FEW, kind="spans", task="toy", **files, stride=3, host=str(place / "bert"), out=out))
    assert open_for_use(out).codec.stride == 3
    words = ("train", "--host", "bert", "--task", "cb", "--data-dir", "data", "--batch-size", "8", "--stride", "3")
    assert "--stride is 3, but nothing would use it" in refused(capsys, *words, "--out", "nothing")
    assert not Path("nothing").exists()
