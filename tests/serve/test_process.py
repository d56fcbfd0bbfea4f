"""`inlay serve` as a process, under people who do not behave, and `inlay predict --server`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx2 as httpx
import pytest

from inlay.serve import Client
from tests.serve.test_engine import near

KEY = "a-key-for-the-process-test"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def served(shop, tmp_path_factory):
    """A server of two models in a process of its own; its port, and its log."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    (folder / "keys").write_text(f"admin {KEY}\n")
    words = [
        "serve",
        str(shop / "inlays" / "a"),
        str(shop / "inlays" / "tags-0"),
        "--bind",
        f"127.0.0.1:{port}",
        "--keys",
        str(folder / "keys"),
    ]
    words += ["--root", str(shop / "inlays"), "--idle", "1", "--drain", "10", "--rows", "64"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inlay.cli", *words],
            stderr=log,
            stdout=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        client = Client(f"http://127.0.0.1:{port}", KEY, retries=60)
        client.models()
        yield port, client, process, folder / "log"
        if process.poll() is None:
            process.kill()
        process.wait()


def raw(port: int, text: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=120)
    made.sendall(text)
    return made


def queued(port: int) -> int:
    """How many rows the server has still to read."""
    return httpx.get(f"http://127.0.0.1:{port}/health", headers={"X-API-Key": KEY}).json()["queue_rows"]


HEAD = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n".encode()


def test_people_who_do_not_behave_stop_nothing(served, engine):
    port, client, process, log = served
    open_ones = [raw(port, b"") for _ in range(20)]  # half-open: they never say a word
    open_ones += [raw(port, HEAD + b"Content-Length: 1000\r\n\r\n{") for _ in range(10)]  # slow: the body never comes
    open_ones += [raw(port, b"GET /hea") for _ in range(10)]
    again = raw(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # a second request that never becomes a whole one
    assert b"401" in again.recv(4096)
    again.sendall(b"GET /hea")
    wrong = raw(port, b"no request at all\r\n\r\n")
    assert b"400" in wrong.recv(4096)
    big = raw(port, HEAD + b"Content-Length: 104857600\r\n\r\n")
    assert b"413" in big.recv(4096)
    endless = raw(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    said = b""
    try:
        for _ in range(100):
            endless.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
    except OSError:
        pass
    try:
        said = endless.recv(4096)
    except OSError:
        said = b"413"
    assert b"413" in said or said == b""
    body = json.dumps({"model": "a", "inputs": ["w1 w2"] * 60}).encode()
    for _ in range(10):  # killed in the middle of a request
        gone = raw(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone.close()
    until = time.monotonic() + 600
    while (waiting := queued(port)) and time.monotonic() < until:
        time.sleep(0.05)
    assert waiting == 0, "nobody waits for them, and they are gone"
    deep = httpx.post(
        f"http://127.0.0.1:{port}/v1/classify", content=b"[" * 500_000, headers={"Authorization": f"Bearer {KEY}"}
    )
    assert deep.status_code in (400, 422)
    assert near(client.classify("a", ["good w1"]), engine.classify("a", ["good w1"]))
    for each in (*open_ones[:20], again):
        each.settimeout(60)
        while each.recv(4096):  # of what was answered; a connection without a request is closed
            pass
    for each in (*open_ones, again, wrong, big, endless):
        each.close()
    assert process.poll() is None
    assert any(json.loads(line)["event"].startswith("Invalid HTTP") for line in log.read_text().splitlines())


def test_predict_asks_a_server(served, shop, monkeypatch, capsys):
    from inlay.cli import main

    port, *_ = served
    monkeypatch.setenv("INLAY_SERVE_KEY", KEY)
    for model, text in (("a", "good w1"), ("tags-0", "good w1")):
        main(["predict", model, text, "--server", f"http://127.0.0.1:{port}"])
        theirs = json.loads(capsys.readouterr().out)
        main(["predict", str(shop / "inlays" / model), text, "--quiet"])
        ours = json.loads(capsys.readouterr().out)
        assert near(theirs, ours)
    for words, says in (
        (["predict", "zzz", "w1"], "has no model 'zzz'"),
        (["predict", "a", "w1", "--host", "x"], "the server has it open already"),
        (["predict", "a", "w1", "w2"], "reads 1 text"),
    ):
        with pytest.raises(SystemExit) as left:
            main([*words, "--server", f"http://127.0.0.1:{port}"])
        assert left.value.code == 2
        assert says in capsys.readouterr().err


def test_bad_words_are_refused(shop, tmp_path, capsys):
    from inlay.cli import main

    path = str(shop / "inlays" / "a")
    for words, says in (
        (["--bind", "0.0.0.0:1"], "--open"),
        (["--bind", "nonsense"], "--bind is"),
        (["--bind", "127.0.0.1:²"], "--bind is"),
        (["--root", str(tmp_path / "none")], "is not a folder"),
        (["--keys", str(tmp_path / "none")], "cannot be read"),
        (["--rows", "0"], "greater than or equal to 1"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["serve", path, *words])
        assert left.value.code == 2
        assert says in capsys.readouterr().err


def test_a_signal_ends_it_in_order(served):
    """The last test: what was asked before is answered, and the exit code says that all went well."""
    port, client, process, log = served
    body = json.dumps({"model": "a", "inputs": ["w1 w2 w3"] * 64}).encode()
    asked = raw(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = asked.recv(1 << 16)
    asked.close()
    client.close()
    assert b"200 OK" in said or b"503" in said
    assert process.wait(240) == 0
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert {"serving", "request", "going down", "ended"} <= {event["event"] for event in events}
    assert KEY not in log.read_text()
