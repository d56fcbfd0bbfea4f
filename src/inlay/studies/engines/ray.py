"""Tasks of a Ray cluster: the same worker function, on every machine that sees the study's folder.

When a task's process or machine dies, its cell is run again, from its checkpoint, as often as the study says. Inlay has
to be installed on every machine, and hosts, rows and the study's folder have to be at the same paths there, as on
shared storage.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from inlay.errors import first_line
from inlay.studies.engines.base import PATIENCE, Ended, EngineError, Moved

ANSWERS_WITHIN = 5.0
"""Seconds that a cluster's address has to answer."""


class RayTasks:
    """As many tasks at once as the cluster has CPUs, or as asked for."""

    def __init__(self, address: str | None = None, count: int | None = None) -> None:
        set_environment()
        import ray

        self.ray = ray
        self.began = not ray.is_initialized()
        if self.began:
            _begin(ray, address, count)
        there = ray.cluster_resources()
        self.count = count or max(1, int(there.get("CPU", 1)))
        nodes = [node.get("Resources", {}).get("memory", 0.0) for node in ray.nodes() if node.get("Alive")]
        self.largest = max(nodes, default=0.0)
        self.running: dict[Any, str] = {}
        self.task = ray.remote(num_cpus=1, max_retries=0)(_work)

    def room(self, megabytes: float) -> bool:
        return len(self.running) < self.count

    def start(self, cell: str, description: Mapping[str, Any], megabytes: float) -> None:
        memory = min(megabytes * 1024**2, 0.9 * self.largest)
        reference = self.task.options(memory=int(memory), name=cell).remote(dict(description))
        self.running[reference] = cell

    def wait(self, seconds: float) -> list[Ended | Moved]:
        if not self.running:
            time.sleep(seconds)
            return []
        done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        return [self._ended(reference) for reference in done]

    def _ended(self, reference: Any) -> Ended:
        cell = self.running.pop(reference)
        try:
            return Ended(cell, *self.ray.get(reference))
        except self.ray.exceptions.TaskCancelledError:
            return Ended(cell, "interrupted")
        except self.ray.exceptions.RayError as error:  # the process or the machine has gone
            return Ended(cell, "failed", f"the process that ran it is gone: {first_line(error)}", died=True)

    def stop(self) -> None:
        for reference in self.running:
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(reference)
        until = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < until:
            self.wait(0.5)
        if self.began:
            self.ray.shutdown()


def _work(description: dict[str, Any]) -> tuple[str, str]:
    """In a worker of Ray."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from inlay.studies.worker import run_cell

    return run_cell(description)


def _begin(ray: Any, address: str | None, count: int | None) -> None:
    """Join a cluster, or start one on this machine."""
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    if address is None:
        ray.init(address="local", num_cpus=count, **quiet)  # not one that happens to run here
    else:
        join(ray, address, log_to_driver=False)


def set_environment() -> None:
    """What Ray has to know before it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to other hosts
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def join(ray: Any, address: str, **options: Any) -> None:
    """Join the cluster at an address; what is no cluster is refused in plain words."""
    check_answers(address)
    try:
        ray.init(address=address, logging_level="error", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        told = first_line(error)
        raise EngineError(f"no Ray cluster at {address}: {told}. Start one with `ray start --head`.") from None


def check_answers(address: str) -> None:
    """Refuse at once what Ray itself would wait for, minutes long."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        if address in ("auto", "local"):
            return
        raise EngineError(f"--address is HOST:PORT, ray://HOST:PORT or auto, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"nothing answers at {address} ({error}). "
            f"Give the address of a Ray cluster that runs, or leave --address out."
        ) from None
