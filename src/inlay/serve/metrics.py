"""What Prometheus reads. Models are labels by their names; nothing that a client sends becomes one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inlay.serve.engine import Engine
from inlay.serve.errors import ServeError
from inlay.serve.requests import Request, Row

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """Counts what an engine does and what a server answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.registry = registry = CollectorRegistry()
        self.batch_rows = Histogram("inlay_batch_rows", "Rows of a batch", buckets=ROWS, registry=registry)
        self.batch_tokens = Histogram(
            "inlay_batch_tokens", "Tokens of a batch, padding included", buckets=TOKENS, registry=registry
        )
        self.batch_models = Histogram("inlay_batch_models", "Models of a batch", buckets=ROWS, registry=registry)
        self.batch_seconds = Histogram("inlay_batch_seconds", "Time of a batch", buckets=SECONDS, registry=registry)
        self.tokens = Counter("inlay_tokens", "Tokens that the host has read", ["model"], registry=registry)
        self.padding = Counter("inlay_padding_tokens", "Padding that the host has read", registry=registry)
        self.latency = Histogram(
            "inlay_request_seconds", "Time from the queue to the answer", ["model"], buckets=SECONDS, registry=registry
        )
        self.errors = Counter("inlay_errors", "Requests without an answer", ["error_type"], registry=registry)
        self.responses = Counter("inlay_responses", "Responses", ["route", "status"], registry=registry)
        for name, text, value in (
            ("inlay_queue_rows", "Rows that wait or run", lambda: engine.rows),
            ("inlay_queue_limit_rows", "Rows that may wait or run", lambda: engine.limits.rows),
            ("inlay_models", "Models that are loaded", lambda: len(engine.shelf.models)),
            ("inlay_heartbeat_age_seconds", "Time since the model thread's last sign of life", engine.since_beat),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        engine.observer = self

    def batch(self, rows: Sequence[Row], seconds: float) -> None:
        longest, real = max(row.length for row in rows), sum(row.length for row in rows)
        self.batch_rows.observe(len(rows))
        self.batch_tokens.observe(len(rows) * longest)
        self.batch_models.observe(len({row.request.model.name for row in rows}))
        self.batch_seconds.observe(seconds)
        self.padding.inc(len(rows) * longest - real)
        for row in rows:
            self.tokens.labels(row.request.model.name).inc(row.length)

    def answered(self, request: Request, error: BaseException | None) -> None:
        self.latency.labels(request.model.name).observe(time.monotonic() - request.arrived)
        if error is not None:
            gone = isinstance(error, CancelledError)
            self.errors.labels("gone" if gone else getattr(error, "error_type", ServeError.error_type)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it; models that are gone leave nothing behind."""
        here = self.engine.shelf.names
        for metric in (self.tokens, self.latency):
            for name in {sample.labels.get("model") for each in metric.collect() for sample in each.samples} - here:
                if name is not None:
                    metric.remove(name)
        return generate_latest(self.registry)
