"""Spans of requests, as OpenTelemetry's own kit records them."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's kit is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inlay.serve import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_a_request_is_a_span_that_goes_on_with_the_clients(client, spans):
    client.post("/v1/classify", json={"model": "a", "inputs": ["good"]}, headers={"traceparent": PARENT})
    client.get("/v1/models/none")
    ours = [span for span in spans.get_finished_spans() if span.instrumentation_scope.name == "inlay.serve"]
    asked, missing = ours
    assert asked.name == "POST /v1/classify"
    assert f"{asked.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{asked.parent.span_id:016x}" == PARENT.split("-")[2]
    assert asked.kind == trace.SpanKind.SERVER
    assert asked.attributes["http.response.status_code"] == 200
    assert missing.attributes["http.response.status_code"] == 404
    assert missing.parent is None


def test_nothing_is_needed_and_nothing_done_without_a_listener(client, monkeypatch):
    monkeypatch.setattr(trace, "get_tracer", lambda *words: pytest.fail("nobody listens"))
    assert client.get("/v1/models").status_code == 200
    monkeypatch.setattr(tracing, "trace", None)
    assert client.get("/v1/models").status_code == 200
