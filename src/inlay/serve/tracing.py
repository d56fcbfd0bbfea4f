"""A span for every request, where OpenTelemetry is installed; without it nothing happens and nothing is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:  # pragma: no cover - an optional package
    trace = None  # type: ignore[assignment]


@contextmanager
def span(name: str, headers: Mapping[str, str]) -> Iterator[Callable[[int], None]]:
    """A server's span, child of the one that the client's headers name; hands back what notes the status."""
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nobody listens
        yield lambda status: None
        return
    parent = propagate.extract(dict(headers))
    tracer = trace.get_tracer("inlay.serve")
    with tracer.start_as_current_span(name, context=parent, kind=trace.SpanKind.SERVER) as own:

        def note(status: int) -> None:
            own.set_attribute("http.response.status_code", status)
            if status >= 500:
                own.set_status(trace.StatusCode.ERROR)

        yield note
