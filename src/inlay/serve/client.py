"""Ask a server.

    with Client("http://127.0.0.1:8000") as client:
        client.classify("sentiment", ["I liked it."])         [[{"label": "positive", "score": 0.98}, …]]

`AsyncClient` is the same with `await`. Where the server is full or going down (429, 503), or cannot be reached, both
ask again, after as long as the server says; every other error is raised as `ServeError` with the server's words.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx2 as httpx

from inlay.serve.errors import ServeError, check_several

T = TypeVar("T")
AGAIN = (429, 503)
LONGEST = 60.0
"""Seconds that a server may let us wait at a time."""
Asked = Generator[tuple[str, str, Any, float], httpx.Response | httpx.TransportError, Any]
"""Yields (method, path, body, seconds to wait before); takes what came of it; returns the answer."""


class Failed(ServeError):
    """What the server said instead of an answer."""

    def __init__(self, message: str, status: int, error_type: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.error_type, self.request_id = status, error_type, request_id


class _Asking:
    """What both clients say, without how it is sent."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def _asked(self, method: str, path: str, body: Any = None) -> Asked:
        """Once, and again as often as allowed where that may help."""
        wait = 0.0
        for left in reversed(range(self.retries + 1)):
            came = yield method, path, body, wait
            if isinstance(came, httpx.TransportError):
                if not left or not isinstance(came, httpx.ConnectError):
                    raise Failed(f"the server did not answer: {came or type(came).__name__}", 0, "unreachable")
                wait = _pause(None, self.retries - left)
            elif came.status_code in AGAIN and left:
                wait = _pause(came.headers.get("retry-after"), self.retries - left)
            else:
                return _read(came)
        raise AssertionError("the last try returns or raises")

    def _classify(self, model: str, inputs: Sequence[Any]) -> Asked:
        check_several(inputs)
        return self._asked("POST", "/v1/classify", {"model": model, "inputs": list(inputs)})

    def _explain(self, model: str, given: Any, off: Sequence[str], pin: Mapping[str, float] | None) -> Asked:
        body = {"model": model, "input": given, "off": list(off), "pin": dict(pin or {})}
        return self._asked("POST", "/v1/explain", body)

    def _models(self) -> Asked:
        return self._asked("GET", "/v1/models")

    def _load(self, name: str, path: str) -> Asked:
        return self._asked("PUT", f"/v1/inlays/{name}", {"path": path})

    def _delete(self, name: str) -> Asked:
        return self._asked("DELETE", f"/v1/inlays/{name}")


def _pause(hint: str | None, tries: int) -> float:
    """As long as the server says, or longer each time; never all clients at the same moment."""
    usual = 0.1 * 2**tries
    try:
        wait = float(hint) if hint is not None else usual
    except ValueError:
        wait = usual
    return min(LONGEST, max(0.0, wait)) * random.uniform(1.0, 1.1)  # noqa: S311 (not a secret)


def _read(response: httpx.Response) -> Any:
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_success and body is not None:
        return body
    if not isinstance(body, Mapping):
        body = {"error": f"the server answered {response.status_code} in no form we know", "error_type": "unknown"}
    said, kind = str(body.get("error", body)), str(body.get("error_type", "unknown"))
    raise Failed(said, response.status_code, kind, response.headers.get("x-request-id"))


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Client(_Asking):
    """Asks a server and waits."""

    def __init__(
        self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        super().__init__(retries)
        self.http = httpx.Client(base_url=url, headers=_headers(key), timeout=timeout, transport=transport)

    def classify(self, model: str, inputs: Sequence[Any]) -> list[Any]:
        """One answer per input; `inlay.serve.answers` has the forms."""
        return self._run(self._classify(model, inputs))["results"]

    def explain(
        self, model: str, given: Any, *, off: Sequence[str] = (), pin: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """How a fusion weighs its members."""
        return self._run(self._explain(model, given, off, pin))

    def models(self) -> list[dict[str, Any]]:
        """Every model; the host is the one without a parent."""
        return self._run(self._models())["data"]

    def load(self, name: str, path: str) -> dict[str, Any]:
        """Load a folder below the server's root; needs an admin key."""
        return self._run(self._load(name, path))

    def delete(self, name: str) -> None:
        """Take a model off; needs an admin key."""
        self._run(self._delete(name))

    def _run(self, asked: Asked) -> Any:
        try:
            method, path, body, wait = next(asked)
            while True:
                time.sleep(wait)
                try:
                    came: httpx.Response | httpx.TransportError = self.http.request(method, path, json=body)
                except httpx.TransportError as error:
                    came = error
                method, path, body, wait = asked.send(came)
        except StopIteration as done:
            return done.value

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(_Asking):
    """Asks a server without blocking."""

    def __init__(
        self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        super().__init__(retries)
        self.http = httpx.AsyncClient(base_url=url, headers=_headers(key), timeout=timeout, transport=transport)

    async def classify(self, model: str, inputs: Sequence[Any]) -> list[Any]:
        """One answer per input."""
        return (await self._run(self._classify(model, inputs)))["results"]

    async def explain(
        self, model: str, given: Any, *, off: Sequence[str] = (), pin: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """How a fusion weighs its members."""
        return await self._run(self._explain(model, given, off, pin))

    async def models(self) -> list[dict[str, Any]]:
        """Every model; the host is the one without a parent."""
        return (await self._run(self._models()))["data"]

    async def load(self, name: str, path: str) -> dict[str, Any]:
        """Load a folder below the server's root; needs an admin key."""
        return await self._run(self._load(name, path))

    async def delete(self, name: str) -> None:
        """Take a model off; needs an admin key."""
        await self._run(self._delete(name))

    async def _run(self, asked: Asked) -> Any:
        try:
            method, path, body, wait = next(asked)
            while True:
                await asyncio.sleep(wait)
                try:
                    came: httpx.Response | httpx.TransportError = await self.http.request(method, path, json=body)
                except httpx.TransportError as error:
                    came = error
                method, path, body, wait = asked.send(came)
        except StopIteration as done:
            return done.value

    async def aclose(self) -> None:
        await self.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
