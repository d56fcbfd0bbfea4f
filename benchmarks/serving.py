"""The server on a real host: many inlays against one, batches against single requests, and other ways to serve.

    python benchmarks/serving.py --host FOLDER [--seconds 5] [--parts curve start loops others overload]

Sixteen inlays of random weights (Pfeiffer, reduction 16, with heads) are set into the host; texts have 5 to 10 words.

curve     `Engine` without HTTP, one client thread: rows per second of CPU time (all threads) by the size of batches,
          `one` inlay against `mixed`, rows of all sixteen in turn, and how many times single requests that is.
start     CPU time from the queue to the first module of the host, for batches of 64 rows over 100 loaded inlays: choose
          the rows, join their plans, pad the tokens, switch.
loops     `inlay serve` as a process, over HTTP. Closed: so many clients, each asks again when it is answered. Open:
          requests come by chance at half the rate that the closed loop reached; p50 and p99 of their time, against
          three times the mean forward that the server's own metrics show, and the maximum wait.
others    the usual way: one process per model with FastAPI and a transformers pipeline. Closed loop on one of them, and
          the memory of --processes of them (PSS: shared pages are divided among those who share them).
overload  a queue of 64 rows and 500 clients, whose requests come at the same instant and spread over a second: how fast
          the refusals (429) are, whether all that was accepted is answered, and how the server's memory grows.

A line with a target says PASS or FAIL. Time over HTTP is wall time: take it on a quiet machine, or read the ratios of
one run only. --json FILE keeps every number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

PARTS = ("curve", "start", "loops", "others", "overload")
SENTENCE = "the film was a good bad long short story with people who never said what they saw and left it"
INLAYS = 16
SIZES = (1, 2, 4, 8, 16, 32, 64)

PLAIN = """
import sys, torch, transformers, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
torch.set_num_threads(1)
model = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ask = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
app = FastAPI()
class Body(BaseModel):
    inputs: list[str]
@app.post("/classify")
def classify(body: Body):
    return ask(body.inputs)
@app.get("/ready")
def ready():
    return {}
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
"""What most people write first."""


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)  # noqa: S311 (not a secret)
    return [" ".join(draw.choices(SENTENCE.split(), k=draw.randint(5, 10))) for _ in range(count)]


def make_inlays(host: str, folder: Path, count: int) -> list[Path]:
    """Inlays of random weights, saved as a user has them."""
    import torch

    import inlay
    from inlay.data.task import Task
    from inlay.training.workbench import Workbench

    task = Task(name="films", labels=("bad", "good"))
    bench = Workbench.open(host, task)
    made = []
    for number in range(count):
        name = f"m{number}"
        torch.manual_seed(number)
        inlay.add(bench.host, name, inlay.Pfeiffer(reduction=16), head=bench.head())
        with torch.no_grad():
            for tensor in bench.host.inlays[name].parameters():
                tensor += 0.02 * torch.randn_like(tensor)
        facts = {"task": task.model_dump(mode="json"), "max_length": 128}
        inlay.save(bench.host, name, folder / name, task="films", data=facts)
        inlay.remove(bench.host, name)
        made.append(folder / name)
    return made


class Told:
    """Prints lines and keeps their numbers."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.missed = 0

    def line(
        self, part: str, name: str, value: float, unit: str = "", target: float | None = None, least: bool = False
    ) -> None:
        self.facts.setdefault(part, {})[name] = value
        end = ""
        if target is not None:
            good = value >= target if least else value <= target
            self.missed += not good
            end = f"   target {'>=' if least else '<='} {target:.4g}   {'PASS' if good else 'FAIL'}"
        print(f"{part:<10}{name:<52}{value:>12,.3f} {unit:<10}{end}", flush=True)


# without HTTP


def curve(told: Told, folders: Sequence[Path], host: str, seconds: float) -> None:
    from inlay.serve import Engine, Limits

    lines = texts(512)
    with Engine.open(folders, host, limits=Limits(rows=4096), threads=1) as engine:
        best = {(kind, size): 0.0 for kind in ("one", "mixed") for size in SIZES}
        for turn in range(4):  # taking turns; the best of each
            for kind, size in best:
                names = [f"m{i}" for i in range(INLAYS)] if kind == "mixed" else ["m0"]
                engine.batcher.rows, engine.batcher.wait = size, 0.0 if size == 1 else 5.0
                rate = _rate(engine, names, lines, size, seconds / 8)
                best[kind, size] = max(best[kind, size], rate) if turn else 0.0
    print(f"{'rows of a batch':<18}" + "".join(f"{size:>9}" for size in SIZES))
    for kind in ("one", "mixed"):
        print(f"{kind + ', rows/CPU s':<18}" + "".join(f"{best[kind, size]:>9,.0f}" for size in SIZES))
    told.facts["curve"] = {f"{kind} {size}": rate for (kind, size), rate in best.items()}
    for size in (16, 64):
        told.line(
            "curve",
            f"mixed over {INLAYS} / one inlay, batches of {size}",
            best["mixed", size] / best["one", size],
            "x",
            0.9,
            True,
        )
    told.line(
        "curve", "mixed, batches of 64 / one request at a time", best["mixed", 64] / best["mixed", 1], "x", 2.0, True
    )


def _rate(engine: Any, names: Sequence[str], lines: Sequence[str], size: int, seconds: float) -> float:
    """Rows per second of CPU time; requests of one row, a batch of them after the other."""
    began, rows = time.process_time(), 0
    while time.process_time() - began < seconds:
        asked = [engine.submit(names[(rows + i) % len(names)], [lines[(rows + i) % len(lines)]]) for i in range(size)]
        for future in asked:
            future.result()
        rows += size
    return rows / (time.process_time() - began)


def start(told: Told, host: str, folder: Path, repeats: int = 50) -> None:
    import torch

    from inlay.host.verbs import inlays_of
    from inlay.serve import Engine, Limits

    folders = make_inlays(host, folder / "hundred", 100)
    lines, draw = texts(512), random.Random(0)  # noqa: S311 (not a secret)
    with Engine.open(folders, host, limits=Limits(rows=4096), threads=1) as engine:
        engine.batcher.wait = 60.0  # nothing runs by itself
        engine.batcher.rows = 1 << 20
        taken: list[float] = []
        for _ in range(repeats):
            futures = [engine.submit(f"m{draw.randrange(100)}", [draw.choice(lines)]) for _ in range(64)]
            with engine.changed, torch.inference_mode():
                engine.batcher.rows = 64
                began = time.thread_time()
                batch = engine.batcher.take()
                plan, batch = engine.plan_for(batch)
                engine.padded(batch)
                inlays_of(engine.shelf.host).switch(engine.shelf.host, plan)
                taken.append(time.thread_time() - began)
                engine.batcher.rows = 1 << 20
            for future in futures:
                future.cancel()
        engine.close(0)
    told.line("start", "64 rows over 100 inlays, median CPU time", statistics.median(taken) * 1e3, "ms", 1.0)
    told.line("start", "the least", min(taken) * 1e3, "ms")


# over HTTP


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


class Server:
    """A server as a process of its own."""

    def __init__(self, words: Sequence[str], port: int, log: Path) -> None:
        self.port, self.log = port, log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                words, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def wait(self) -> Server:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"a server ended: {self.log.read_text()[-2000:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).close()
                return self
            except OSError:
                time.sleep(0.1)
        raise SystemExit("a server does not begin")

    def memory(self) -> int:
        """PSS in bytes."""
        rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(folders: Sequence[Path], host: str, work: Path, *more: str) -> Server:
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "inlay.cli",
        "serve",
        *map(str, folders),
        "--host",
        host,
        "--bind",
        f"127.0.0.1:{port}",
    ]
    return Server([*words, "--threads", "1", *more], port, work / f"{port}.log").wait()


class Line:
    """One connection that is kept: a client of a few lines, so that the server is what is measured."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: Any = None

    async def open(self) -> Line:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def ask(self, path: str, body: dict[str, Any]) -> int:
        """The status."""
        if self.reader is None:
            await self.open()
        data = json.dumps(body).encode()
        begin = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{begin}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        status, close = int(head[9:12]), b"connection: close" in head
        await self.reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        if close:
            self.writer.close()
            self.reader = None
        return status


Ask = Callable[[Line, int], Awaitable[int]]


def asking(names: Sequence[str], lines: Sequence[str]) -> Ask:
    return lambda line, i: line.ask("/v1/classify", {"model": names[i % len(names)], "inputs": [lines[i % len(lines)]]})


async def closed(port: int, ask: Ask, clients: int, seconds: float) -> float:
    """Answers per second of so many clients, each asking again when it is answered."""
    until, done = time.monotonic() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        line, i = await Line(port).open(), number * 7919
        while time.monotonic() < until:
            assert await ask(line, i) == 200
            done, i = done + 1, i + 1
        line.writer.close()

    began = time.monotonic()
    await asyncio.gather(*map(client, range(clients)))
    return done / (time.monotonic() - began)


async def open_loop(port: int, ask: Ask, rate: float, seconds: float) -> list[float]:
    """The time of each request, where they come by chance, whether others have been answered or not."""
    draw, lines, taken, tasks = random.Random(0), [], [], []  # noqa: S311 (not a secret)

    async def one(i: int) -> None:
        began = time.monotonic()
        line = lines.pop() if lines else await Line(port).open()
        assert await ask(line, i) == 200
        taken.append(time.monotonic() - began)
        lines.append(line)

    until, next_at, i = time.monotonic() + seconds, time.monotonic(), 0
    while next_at < until:
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        tasks.append(asyncio.create_task(one(i)))
        next_at, i = next_at + draw.expovariate(rate), i + 1
    await asyncio.gather(*tasks)
    for line in lines:
        line.writer.close()
    return taken


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


WAIT = 0.002


def loops(told: Told, folders: Sequence[Path], host: str, work: Path, seconds: float, clients: int) -> float:
    lines, every = texts(512), [f"m{i}" for i in range(INLAYS)]
    server = serve(folders, host, work, "--wait", str(WAIT))
    try:
        run = lambda names, count: asyncio.run(closed(server.port, asking(names, lines), count, seconds))
        run(every, 4)  # warm
        found = {}
        for name, names, count in (
            ("one at a time", ["m0"], 1),
            ("one inlay", ["m0"], clients),
            ("mixed", every, clients),
        ):
            cpu = server.cpu()
            found[name] = run(names, count)
            told.line("loops", f"closed, {name}, {count} clients", found[name], "rows/s")
            told.line("loops", "  server CPU per row", 1e3 * (server.cpu() - cpu) / (found[name] * seconds), "ms")
        told.line("loops", f"mixed over {INLAYS} / one inlay", found["mixed"] / found["one inlay"], "x", 0.9, True)
        told.line("loops", "mixed / one at a time", found["mixed"] / found["one at a time"], "x", 2.0, True)
        before = server.metric("inlay_batch_seconds_sum"), server.metric("inlay_batch_seconds_count")
        taken = asyncio.run(open_loop(server.port, asking(every, lines), found["mixed"] / 2, seconds * 2))
        batches = server.metric("inlay_batch_seconds_count") - before[1]
        forward = (server.metric("inlay_batch_seconds_sum") - before[0]) / batches
        told.line("loops", "open, half load: rate", found["mixed"] / 2, "rows/s")
        told.line("loops", "  rows of a batch", len(taken) / batches, "")
        told.line("loops", "  mean forward", forward * 1e3, "ms")
        told.line("loops", "  p50", quantile(taken, 0.5) * 1e3, "ms")
        told.line("loops", "  p99", quantile(taken, 0.99) * 1e3, "ms", (3 * forward + WAIT) * 1e3)
        told.line("loops", "memory of the server (PSS)", server.memory() / 2**20, "MiB")
        return server.memory()
    finally:
        server.stop()


def others(told: Told, host: str, work: Path, ours: float, seconds: float, clients: int, processes: int) -> None:
    lines = texts(512)
    (work / "plain.py").write_text(PLAIN)
    running: list[Server] = []
    try:
        for _ in range(processes):
            port = free_port()
            running.append(
                Server([sys.executable, str(work / "plain.py"), host, str(port)], port, work / f"{port}.log")
            )
            if len(running) % 2 == 0:
                running[-1].wait()
        for server in running:
            server.wait()
        ask: Ask = lambda line, i: line.ask("/classify", {"inputs": [lines[i % len(lines)]]})
        asyncio.run(closed(running[0].port, ask, 2, 1.0))
        for count in (1, clients):
            rate = asyncio.run(closed(running[0].port, ask, count, seconds))
            told.line("others", f"FastAPI + pipeline, closed, {count} clients", rate, "rows/s")
        if "loops" in told.facts:
            ratio = told.facts["loops"][f"closed, one inlay, {clients} clients"] / rate
            told.line("others", "inlay serve, one inlay / FastAPI + pipeline", ratio, "x")
        for server in running[1:]:
            asyncio.run(closed(server.port, ask, 1, 0.2))  # each has answered
        whole = sum(server.memory() for server in running)
        told.line("others", f"memory of {processes} processes (PSS)", whole / 2**20, "MiB")
        if ours:
            if processes != INLAYS:
                whole *= INLAYS / processes
                print(f"{'':<10}(scaled to {INLAYS} processes, which would share a little more)")
            told.line("others", f"memory of one server / {INLAYS} processes", ours / whole, "x", 1 / 8)
    finally:
        for server in running:
            server.stop()


def overload(told: Told, folders: Sequence[Path], host: str, work: Path) -> None:
    lines, every = texts(512), [f"m{i}" for i in range(INLAYS)]
    server = serve(folders, host, work, "--rows", "64")
    try:
        ask = asking(every, lines)
        asyncio.run(closed(server.port, ask, 8, 1.0))
        before = server.memory()
        for name, spread in (("at one instant", 0.0), ("within a second", 1.0)):
            found = asyncio.run(_rush(server.port, ask, 500, spread))
            refused = [seconds for status, seconds in found if status == 429]
            accepted = [seconds for status, seconds in found if status == 200]
            told.line("overload", f"500 clients {name}: answered", len(accepted), "")
            told.line("overload", "  refused with 429", len(refused), "")
            told.line("overload", "  anything else", 500 - len(accepted) - len(refused), "", 0)
            if refused:
                told.line("overload", "  429: median", quantile(refused, 0.5) * 1e3, "ms")
                told.line("overload", "  429: the slowest", max(refused) * 1e3, "ms", 50.0)
        told.line("overload", "memory after / before", server.memory() / before, "x", 1.25)
    finally:
        server.stop()


async def _rush(port: int, ask: Ask, clients: int, spread: float) -> list[tuple[int, float]]:
    lines = [await Line(port).open() for _ in range(clients)]

    async def one(i: int) -> tuple[int, float]:
        await asyncio.sleep(spread * i / clients)
        began = time.monotonic()
        return await ask(lines[i], i), time.monotonic() - began

    found = await asyncio.gather(*map(one, range(clients)))
    for line in lines:
        if line.reader is not None:
            line.writer.close()
    return list(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="folder of an encoder, for instance a MiniLM")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (5)")
    parser.add_argument("--clients", type=int, default=32, help="of the closed loop (32)")
    parser.add_argument("--processes", type=int, default=INLAYS, help=f"of the usual way ({INLAYS})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    told = Told()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        folders = make_inlays(options.host, work / "inlays", INLAYS)
        ours = 0.0
        if "curve" in options.parts:
            curve(told, folders, options.host, options.seconds)
        if "start" in options.parts:
            start(told, options.host, work)
        if "loops" in options.parts:
            ours = loops(told, folders, options.host, work, options.seconds, options.clients)
        if "others" in options.parts:
            others(told, options.host, work, ours, options.seconds, options.clients, options.processes)
        if "overload" in options.parts:
            overload(told, folders, options.host, work)
    if options.json:
        options.json.write_text(json.dumps(told.facts, indent=1) + "\n")
    return int(options.strict and told.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
