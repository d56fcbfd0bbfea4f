"""What every request passes, whatever it asks for: an id, the key, the size of its body, headers, the log line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.serve.engine import Engine
from inlay.serve.errors import BadRequest, DeadlineExceeded, Forbidden, ServeError, TooLarge, Unauthorized, as_answer
from inlay.serve.keys import Keys, client_of, key_in
from inlay.serve.limits import Limits
from inlay.serve.logs import LOG, request_id
from inlay.serve.metrics import Metrics
from inlay.serve.tracing import span

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
ASKING = ("/v1/classify", "/predict", "/v1/explain", "/v1/completions")
"""What needs a place in the queue."""
QUIET = ("/health", "/ready", "/metrics")
"""What monitors ask for all the time is not worth a line while it goes well."""


class Gate:
    """The outermost layer of the application, but for CORS, which answers the preflight requests of browsers."""

    def __init__(
        self, app: ASGIApp, *, keys: Keys, engine: Engine, metrics: Metrics, hosts: Sequence[str] | None = None,
        names: bool = True,
    ) -> None:  # fmt: skip
        self.app, self.keys, self.engine, self.metrics, self.hosts = app, keys, engine, metrics, hosts
        self.limits = engine.limits
        self.names = names
        self.reading = 0
        """Requests that were let in and hold no place in the queue yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, begun = Headers(scope=scope), time.perf_counter()
        scope.setdefault("state", {})
        name = scope["state"]["id"] = request_id(headers.get("x-request-id"))
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(raw=message.setdefault("headers", []))
                for header, value in HEADERS.items():
                    own.setdefault(header, value)
                if self.names:
                    own["x-request-id"] = name
            await send(message)

        with span(f"{scope['method']} {scope['path'][:100]}", headers) as note:
            try:
                self._admit(scope, headers)
                if scope["path"] in ASKING:
                    self._let_in(scope)
                body = Body(receive, headers, self.limits)
                await self.app(scope, body.receive, answer)
            except ServeError as error:
                if not status:
                    await refuse(error, answer)
            except Exception:  # our own fault: the log says what, the answer does not
                LOG.exception("fault", extra={"id": name})
                if not status:
                    await refuse(ServeError("a fault of the server; its log has more under this request's id."), answer)
            finally:
                scope["state"].get("entered", _nothing)()
                self._tell(scope, name, status, time.perf_counter() - begun)
                note(status)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request without a key where there are keys, or with a foreign name for this host."""
        if self.hosts is not None and _name(headers.get("host", "")) not in self.hosts:
            raise Forbidden(
                f"this server is asked as {', '.join(self.hosts)}; a page of another name has no business here."
            )
        key = key_in(headers)
        role = self.keys.role_of(key)
        if self.keys and role is None:
            raise Unauthorized(
                "this server needs a key: Authorization: Bearer KEY" if key is None else "this key is not known here"
            )
        address = scope["client"][0] if scope.get("client") else ""
        scope["state"] |= {"role": role, "client": client_of(key if role else None, address)}

    def _let_in(self, scope: Scope) -> None:
        """Refuse before the body is read if the queue is full."""
        self.engine.check_room(self.reading)
        self.reading += 1
        left = iter([self._entered])
        scope["state"]["entered"] = lambda: next(left, _nothing)()  # once, by whoever comes first

    def _entered(self) -> None:
        """A request that was being read now has its places in the queue, or no longer needs any."""
        self.reading -= 1

    def _tell(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.responses.labels(route, str(status or 499)).inc()
        if scope["path"] in QUIET and status == 200:
            return
        facts = {"id": name, "method": scope["method"], "route": route, "status": status or 499}
        facts |= {"ms": round(seconds * 1e3, 2), "client": scope["state"].get("client", "")}
        LOG.info("request", extra=facts | scope["state"].get("facts", {}))


def _nothing() -> None:
    pass


def _name(host: str) -> str:
    """The name in a Host header, without the port: localhost:8000, [::1]:8000."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


async def refuse(error: ServeError, send: Send) -> None:
    """An error as the answer, before the application has begun one."""
    body = json.dumps(as_answer(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *extra(error)]
    if isinstance(error, TooLarge | DeadlineExceeded):  # what is still to come of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def extra(error: ServeError) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error."""
    found = []
    if error.retry_after is not None:
        found.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
    if isinstance(error, Unauthorized):
        found.append((b"www-authenticate", b'Basic realm="inlay, the key is the password", charset="UTF-8"'))
    return found


class Body:
    """A request's body as it comes in: not more than allowed, and not for ever."""

    def __init__(self, receive: Receive, headers: Headers, limits: Limits) -> None:
        self.inner, self.limits, self.seen, self.whole = receive, limits, 0, False
        self.until = time.monotonic() + limits.deadline
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            raise BadRequest("Content-Length is no number.")
        if int(length) > limits.body:
            raise TooLarge(f"the body has {int(length):,} bytes; this server takes {limits.body:,}.")

    async def receive(self) -> Message:
        if self.whole:
            return await self.inner()
        try:
            message: dict[str, Any] = dict(
                await asyncio.wait_for(self.inner(), min(self.limits.idle, max(0.01, self.until - time.monotonic())))
            )
        except TimeoutError:
            raise DeadlineExceeded("the body of the request did not arrive in time.") from None
        self.seen += len(message.get("body", b""))
        if self.seen > self.limits.body:
            raise TooLarge(f"the body has more than {self.limits.body:,} bytes, which is what this server takes.")
        self.whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message
