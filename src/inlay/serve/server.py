"""uvicorn around the application: where it listens, how it goes down, and whom it does not wait for."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from inlay.errors import ConfigError
from inlay.serve.app import build_app
from inlay.serve.engine import Engine
from inlay.serve.keys import Keys
from inlay.serve.logs import LOG

SWITCH = 1e-4
"""Seconds that one thread may keep Python from another. The usual 5 ms would pass at every answer that is written while
others are cut into tokens: with five hundred clients, seconds."""
LOCAL = ("localhost", "127.0.0.1", "::1")


def address(bind: str) -> tuple[str, int]:
    """HOST:PORT, also [::1]:8000."""
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise ConfigError(f"--bind is {bind!r}; give an address and a port, for instance 127.0.0.1:8000.")
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(bind: str, keys: Keys, open_to_all: bool) -> tuple[str, int]:
    """Refuse an address that others reach, unless there is a key or it is said that everybody may ask."""
    host, port = address(bind)
    if not is_local(host) and not keys and not open_to_all:
        raise ConfigError(
            f"{bind} can be reached from other machines, and there is no key. Give keys (--keys FILE, or "
            f"INLAY_SERVE_KEYS), or say that everybody may ask: --open."
        )
    return host, port


class Impatient(H11Protocol):
    """Closes a connection on which no whole request arrives for a while, so that half-open sockets do not pile up."""

    idle = 10.0
    waiting: asyncio.TimerHandle | None = None
    """Runs while the head of a request is to come, or the rest of one that was answered before it was whole."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # uvicorn's own clock between two requests stops at their first byte
        if not self._has_none():
            self._wait_no_more()
        elif self.waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _has_none(self) -> bool:
        """Whether there is no request to answer."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self.waiting = self.loop.call_later(self.idle, self._still_nothing)

    def _wait_no_more(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def _still_nothing(self) -> None:
        if self._has_none() and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Goes down in order: first it takes nothing more and says so, then it ends when everything is answered."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.engine.draining:  # the second time: at once
            self.should_exit = self.force_exit = True
            return
        LOG.info("going down", extra={"signal": signal.Signals(sig).name, "rows": self.engine.rows})
        self.engine.draining = True
        threading.Thread(target=self._drain, name="inlay-drain", daemon=True).start()

    def _drain(self) -> None:
        until = time.monotonic() + self.engine.limits.drain
        while self.engine.rows and time.monotonic() < until:
            time.sleep(0.02)
        self.should_exit = True


def make_server(app: FastAPI, engine: Engine, host: str, port: int) -> Server:
    """The server of an application, not yet running."""
    limits = engine.limits
    protocol = type("Impatient", (Impatient,), {"idle": limits.idle})
    config = uvicorn.Config(
        app, host, port, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=round(limits.idle),
        timeout_graceful_shutdown=max(1, round(limits.drain)), h11_max_incomplete_event_size=16_384,
    )  # fmt: skip
    return Server(config, engine)


class Reloading(threading.Thread):
    """Looks at the folders of the models at an interval, and loads what has changed."""

    def __init__(self, engine: Engine, every: float) -> None:
        super().__init__(name="inlay-reload", daemon=True)
        self.engine, self.every, self.ended = engine, every, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.every):
            try:
                for name in self.engine.refresh():
                    LOG.info("reloaded", extra={"model": name})
            except Exception:
                LOG.exception("reloading failed")


def serve(
    engine: Engine, bind: str = "127.0.0.1:8000", *, keys: Keys | None = None, open_to_all: bool = False,
    root: Path | None = None, cors: Sequence[str] = (), reload: float | None = None,
) -> None:  # fmt: skip
    """Serve until a signal says to stop."""
    sys.setswitchinterval(SWITCH)
    keys = keys or Keys()
    host, port = check_bind(bind, keys, open_to_all)
    names = LOCAL if is_local(host) and not keys else None
    app = build_app(engine, keys=keys, root=root, cors=cors, hosts=names)
    reloading = Reloading(engine, reload) if reload is not None else None
    if reloading is not None:
        reloading.start()
    LOG.info(
        "serving",
        extra={"address": f"http://{bind}", "models": list(engine.models), "host": engine.shelf.host_name},
    )
    try:
        make_server(app, engine, host, port).run()
    finally:
        if reloading is not None:
            reloading.ended.set()
        engine.close()
        LOG.info("ended")
