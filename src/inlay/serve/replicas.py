"""More than one replica: the same application as a deployment of Ray Serve.

    inlay serve runs --engine ray --replicas 2

    Ray's proxy ──► replica: engine and application ──┐     each request goes to one of them
                ──► replica: engine and application ──┤
                                                      ▼
                    catalogue: what requests have loaded and deleted, and every replica's metrics

A replica is a whole server in a process of its own, with its own host, queue and limits. A folder that a request loads
is verified by the replica that it asked; then the catalogue tells the others, and the request is answered when they
have it too. Folders are on storage that every machine of the cluster sees, at the same paths.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from inlay.errors import ConfigError, InlayError
from inlay.runs.allowed import Allowed
from inlay.serve.app import Alone, build_app
from inlay.serve.engine import Engine
from inlay.serve.errors import NotFound
from inlay.serve.keys import Keys
from inlay.serve.limits import Limits
from inlay.serve.logs import LOG, log_to
from inlay.serve.pieces import Piece, common_host, piece_at, pieces_of, split_name
from inlay.serve.roots import inside
from inlay.serve.server import LOCAL, Reloading, check_bind, is_local
from inlay.studies.engines.ray import join, set_environment

APP = "inlay"
CATALOGUE = "inlay-catalogue"
EVERY = 0.2
"""Seconds between two looks at the catalogue."""
GONE = 5.0
"""Seconds after which a replica that does not look any more is not waited for."""


@dataclass(frozen=True)
class Order:
    """What every replica opens."""

    paths: tuple[str, ...]
    host: str | None = None
    limits: Limits = field(default_factory=Limits)
    allowed: Allowed = field(default_factory=Allowed)
    threads: int | None = None
    keys: Keys = field(default_factory=Keys)
    root: Path | None = None
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    reload: float | None = None

    def absolute(self) -> Order:
        """The same for a process with another working folder."""
        return replace(
            self,
            paths=tuple(_absolute(path) for path in self.paths),
            host=str(Path(self.host).absolute()) if self.host and Path(self.host).is_dir() else self.host,
            root=None if self.root is None else self.root.absolute(),
        )


def _absolute(given: str) -> str:
    name, path = split_name(given)
    return f"{name}={Path(path).absolute()}" if name is not None else str(Path(path).absolute())


class Catalogue:
    """An actor: the last thing that was done with each name, and how far every replica has come."""

    def __init__(self) -> None:
        self.version = 0
        self.done: dict[str, tuple[int, str | None]] = {}
        """Name → the change's number, and the folder; None: it was deleted."""
        self.seen: dict[str, tuple[int, float]] = {}
        self.metrics: dict[str, bytes] = {}

    def change(self, name: str, folder: str | None) -> int:
        self.version += 1
        self.done[name] = self.version, folder
        return self.version

    def since(self, replica: str, version: int, metrics: bytes) -> tuple[int, dict[str, str | None]]:
        """What has changed since a version that a replica has."""
        self.seen[replica], self.metrics[replica] = (version, time.monotonic()), metrics
        return self.version, {name: folder for name, (when, folder) in self.done.items() if when > version}

    def behind(self, version: int) -> int:
        """How many replicas do not have a version yet."""
        self._forget()
        return sum(has < version for has, _ in self.seen.values())

    def all_metrics(self) -> dict[str, bytes]:
        self._forget()
        return dict(self.metrics)

    def _forget(self) -> None:
        now = time.monotonic()
        for replica in [name for name, (_, when) in self.seen.items() if now - when > GONE]:
            del self.seen[replica], self.metrics[replica]


class Together(Alone):
    """One replica among others: what is loaded or deleted here is so everywhere."""

    names_requests = False  # Ray's proxy does

    def __init__(self, engine: Engine, catalogue: Any, name: str, root: Path | None = None) -> None:
        super().__init__(engine)
        self.may_open = Path.is_dir if root is None else inside(root)
        self.catalogue, self.name, self.version = catalogue, name, 0
        self.lock = threading.Lock()
        """Held while something is changed here and noted there, so that both have the same order."""
        self.ended = threading.Event()
        self.own = lambda: b""
        """This replica's metrics."""
        self.look()
        self.thread = threading.Thread(target=self._watch, name="inlay-catalogue", daemon=True)
        self.thread.start()

    def load(self, piece: Piece) -> None:
        with self.lock:
            super().load(piece)
            version = self._note(piece.name, str(piece.folder))
        self._wait(version)

    def delete(self, name: str) -> None:
        with self.lock:
            super().delete(name)
            version = self._note(name, None)
        self._wait(version)

    def metrics(self, own: bytes) -> bytes:
        """Those of all replicas, each with its name."""
        found: dict[str, bytes] = self._ask("all_metrics") | {self.name: own}
        return joined_metrics(found)

    def _ask(self, method: str, *words: Any) -> Any:
        import ray

        return ray.get(getattr(self.catalogue, method).remote(*words))

    def _note(self, name: str, folder: str | None) -> int:
        return int(self._ask("change", name, folder))

    def _wait(self, version: int) -> None:
        """Until every replica has it, the deadline at most."""
        until = time.monotonic() + self.engine.limits.deadline / 2
        while self._ask("behind", version) and time.monotonic() < until:
            time.sleep(EVERY / 4)

    def look(self) -> None:
        """Do here what was done elsewhere."""
        with self.lock:
            version, changes = self._ask("since", self.name, self.version, self.own())
            for name, folder in changes.items():
                self._follow(name, folder)
            self.version = version

    def _follow(self, name: str, folder: str | None) -> None:
        try:
            model = self.engine.models.get(name)
            if folder is None:
                with suppress(NotFound):
                    self.engine.unload(name)
            elif model is None or str(model.piece.folder) != folder or model.piece_mark != model.piece.mark:
                self.engine.put(piece_at(Path(folder), name, self.may_open))
        except (InlayError, OSError) as error:
            LOG.error("not followed", extra={"model": name, "reason": str(error)})

    def _watch(self) -> None:
        while not self.ended.wait(EVERY):
            try:
                self.look()
            except Exception:
                LOG.exception("the catalogue does not answer")


def joined_metrics(found: Mapping[str, bytes]) -> bytes:
    """The metrics of several replicas as one text, with a label that says whose each sample is."""
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in sorted(found.items()):
        for family in text_string_to_metric_families(text.decode()):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            heads[name] = f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}"
            for sample in family.samples:
                labels = ",".join(
                    f'{key}="{_escaped(value)}"' for key, value in {**sample.labels, "replica": replica}.items()
                )
                samples.setdefault(name, []).append(f"{sample.name}{{{labels}}} {sample.value}")
    return "".join(f"{head}\n" + "\n".join(samples.get(name, ())) + "\n" for name, head in heads.items()).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Replica:
    """What Ray Serve runs: an engine and the application over it."""

    def __init__(self, order: Order) -> None:
        import ray
        from ray import serve

        log_to()
        name = serve.get_replica_context().replica_tag
        self.engine = Engine.open(
            order.paths, order.host, limits=order.limits, allowed=order.allowed, threads=order.threads
        )
        catalogue = ray.get_actor(CATALOGUE, namespace=APP)
        self.together = Together(self.engine, catalogue, name, order.root)
        self.order = order
        self.reloading = Reloading(self.engine, order.reload) if order.reload is not None else None
        if self.reloading is not None:
            self.reloading.start()

    def __serve_build_asgi_app__(self) -> Any:
        order = self.order
        app = build_app(
            self.engine, keys=order.keys, root=order.root, cors=order.cors, hosts=order.hosts, among=self.together
        )
        self.together.own = app.state.metrics.text
        return app

    def check_health(self) -> None:
        """Ray replaces a replica whose model thread does not answer."""
        if not self.engine.healthy():
            raise RuntimeError("the model thread does not answer")

    def __del__(self) -> None:
        if self.reloading is not None:
            self.reloading.ended.set()
        self.together.ended.set()
        self.engine.close()


def run_replicas(
    order: Order, bind: str = "127.0.0.1:8000", *, replicas: int = 2, address: str | None = None,
    open_to_all: bool = False,
) -> None:  # fmt: skip
    """Serve until a signal says to stop."""
    deployed = Deployed(order, bind, replicas=replicas, address=address, open_to_all=open_to_all)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())  # in place of Ray's own, which would end at once
    try:
        LOG.info("serving", extra={"address": f"http://{bind}", "replicas": replicas})
        while not stop.wait(0.2):
            pass
        LOG.info("going down")
    finally:
        deployed.close()
        LOG.info("ended")


class Deployed:
    """The application on a Ray cluster."""

    def __init__(
        self, order: Order, bind: str, *, replicas: int, address: str | None = None, open_to_all: bool = False
    ) -> None:
        host, port = check_bind(bind, order.keys, open_to_all)
        common_host(pieces_of(order.paths), order.host)  # what cannot be opened is told here, in plain words
        ray, serve = _ray()
        self.ray, self.serve, self.began = ray, serve, not ray.is_initialized()
        limits, cpus = order.limits, order.threads or 1
        if self.began:
            _begin(ray, address, replicas * cpus)
        try:
            _check_room(ray, replicas, cpus)
            self.catalogue = (
                ray.remote(num_cpus=0, max_restarts=-1)(Catalogue).options(name=CATALOGUE, namespace=APP).remote()
            )
            ray.get(self.catalogue.behind.remote(0))
            names = LOCAL if is_local(host) and not order.keys else None
            whole = replace(order.absolute(), hosts=names)
            serve.start(
                proxy_location="EveryNode",
                http_options={"host": host, "port": port, "request_timeout_s": limits.deadline + limits.idle + 5,
                              "keep_alive_timeout_s": max(1, round(limits.idle))},
            )  # fmt: skip
            deployment = serve.deployment(
                name="replica", num_replicas=replicas, ray_actor_options={"num_cpus": cpus},
                max_ongoing_requests=4 * limits.rows + 100,  # more than fit the queue: the engine itself says 429
                graceful_shutdown_timeout_s=limits.drain, health_check_period_s=min(10.0, limits.heartbeat),
                logging_config={"enable_access_log": False},  # the gate has its own line for each request
            )(serve.ingress()(Replica))  # fmt: skip
            serve.run(deployment.bind(whole), name=APP, route_prefix="/")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Finish what was taken, and stop."""
        with suppress(Exception):
            self.serve.delete(APP)
        with suppress(Exception):
            self.ray.kill(self.ray.get_actor(CATALOGUE, namespace=APP))
        if self.began:
            with suppress(Exception):
                self.serve.shutdown()
            self.ray.shutdown()


def _ray() -> tuple[Any, Any]:
    set_environment()
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine ray needs Ray Serve ({error}): pip install 'inlay[replicas]'") from None
    return ray, serve


def _begin(ray: Any, address: str | None, cpus: int) -> None:
    """Join a cluster, or start one on this machine."""
    if address is None:
        ray.init(address="local", num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, namespace=APP,
                 logging_level="error")  # fmt: skip
    else:
        join(ray, address, namespace=APP)


def _check_room(ray: Any, replicas: int, cpus: int) -> None:
    """Ray would wait for processors that never come."""
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < replicas * cpus:
        raise ConfigError(
            f"{replicas} replicas of {cpus} threads need {replicas * cpus} processors; the cluster has {there}. "
            f"Ask for fewer --replicas, or for fewer --threads."
        )
