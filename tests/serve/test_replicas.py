"""Two replicas on a real local Ray: the same answers, and what one is told the other knows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'inlay[replicas]'")

from inlay.serve import Client
from inlay.serve.client import Failed
from inlay.serve.replicas import Catalogue, Order, joined_metrics
from tests.serve.conftest import ADMIN
from tests.serve.shop import inputs_for, kind_of
from tests.serve.test_engine import near

pytestmark = pytest.mark.long
MODELS = ("classification-0", "tags-1", "fused-classification")


@pytest.fixture(scope="module")
def replicas(shop, tmp_path_factory):
    """`inlay serve --engine ray --replicas 2`, as a user starts it."""
    folder = tmp_path_factory.mktemp("replicas")
    shutil.copytree(shop / "inlays" / "b", folder / "root" / "b")
    (folder / "keys.txt").write_text(f"admin {ADMIN}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [os.path.relpath(shop / "inlays" / name, folder) for name in MODELS]
    words += ["--engine", "ray", "--replicas", "2", "--threads", "1", "--keys", "keys.txt", "--root", "root"]
    src = str(Path(__file__).parents[2] / "src")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inlay.cli", "serve", *words, "--bind", f"127.0.0.1:{port}"],
            cwd=folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": src},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 1200
        while '"serving"' not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield url, process, folder
    finally:
        if process.poll() is None:
            process.terminate()  # so that Ray ends too
        process.wait(240)


def test_two_replicas_are_one_server(replicas, engine):
    url, process, folder = replicas
    with Client(url) as stranger, pytest.raises(Failed, match="needs a key"):
        stranger.models()
    with Client(url, ADMIN) as client:
        assert {entry["id"] for entry in client.models()} == {"bert", *MODELS}
        for name in MODELS * 4:
            given = inputs_for(kind_of(name), 3)
            assert near(client.classify(name, given), engine.classify(name, given))
        assert client.explain("fused-classification", "good w1")["members"] == ["a", "b"]
        client.load("new", "b")
        wanted = engine.classify("b", ["good"])
        for _ in range(12):  # whichever replica is asked
            assert near(client.classify("new", ["good"]), wanted)
        with pytest.raises(Failed, match="root folder"):
            client.load("other", "../keys.txt")
        client.delete("new")
        for _ in range(12):
            with pytest.raises(Failed) as told:
                client.classify("new", ["good"])
            assert told.value.status == 404
    answer = httpx.get(f"{url}/metrics", headers={"X-API-Key": ADMIN, "X-Request-ID": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    counts = [line for line in answer.text.splitlines() if line.startswith("inlay_responses_total{")]
    assert len({line.partition('replica="')[2].partition('"')[0] for line in counts}) == 2
    assert answer.headers["content-security-policy"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    log = (folder / "log").read_text()
    assert '"ended"' in log
    assert ADMIN not in log
    said = [json.loads(line[line.index("{") :]) for line in log.splitlines() if '"event": "request"' in line]
    assert {"/v1/classify", "/v1/inlays/{name}"} <= {event["route"] for event in said}


def test_a_catalogue_tells_the_last_of_each_name_and_who_is_behind(monkeypatch):
    catalogue = Catalogue()
    assert catalogue.since("x", 0, b"") == (0, {})
    catalogue.change("a", "/one")
    catalogue.change("a", "/two")
    version = catalogue.change("b", None)
    assert catalogue.behind(version) == 1
    assert catalogue.since("x", 0, b"") == (3, {"a": "/two", "b": None})
    assert catalogue.since("x", 3, b"") == (3, {})
    assert catalogue.behind(version) == 0
    assert catalogue.since("late", 0, b"m")[1] == {"a": "/two", "b": None}
    assert set(catalogue.all_metrics()) == {"x", "late"}
    now = time.monotonic()
    monkeypatch.setattr("inlay.serve.replicas.time.monotonic", lambda: now + 60)
    assert catalogue.behind(version) == 0, "who has gone is not waited for"


def test_metrics_of_replicas_are_one_text(client):
    from prometheus_client.parser import text_string_to_metric_families

    text = client.get("/metrics").content
    whole = list(text_string_to_metric_families(joined_metrics({"x": text, 'y"\n\\': text}).decode()))
    alone = list(text_string_to_metric_families(text.decode()))
    assert [family.name for family in whole] == [family.name for family in alone]
    assert sum(len(family.samples) for family in whole) == 2 * sum(len(family.samples) for family in alone)
    assert {sample.labels["replica"] for family in whole for sample in family.samples} == {"x", 'y"\n\\'}


def test_paths_are_told_as_other_processes_see_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    order = Order(("runs/joint:a", "mine=runs/b"), root=Path("runs")).absolute()
    assert order.paths == (f"{tmp_path}/runs/joint:a", f"mine={tmp_path}/runs/b")
    assert order.root == tmp_path / "runs"


def test_replicas_are_for_ray(shop, capsys):
    from inlay.cli import main

    for words in (["--replicas", "2"], ["--address", "127.0.0.1:1"]):
        with pytest.raises(SystemExit) as left:
            main(["serve", str(shop / "inlays" / "a"), *words])
        assert left.value.code == 2
        assert "--engine ray" in capsys.readouterr().err
