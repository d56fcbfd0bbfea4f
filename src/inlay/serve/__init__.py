"""Serve one host with every inlay and fusion that is set into it.

`Engine` does it in Python, `build_app` and `inlay serve` over HTTP, `Client` and `AsyncClient` ask such a server. Names
load on first use: a client needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.serve.app import build_app
    from inlay.serve.client import AsyncClient, Client
    from inlay.serve.engine import Engine
    from inlay.serve.errors import ServeError
    from inlay.serve.limits import Limits

_HOME = {
    "AsyncClient": "inlay.serve.client",
    "Client": "inlay.serve.client",
    "Engine": "inlay.serve.engine",
    "Limits": "inlay.serve.limits",
    "ServeError": "inlay.serve.errors",
    "build_app": "inlay.serve.app",
}
__all__ = ["AsyncClient", "Client", "Engine", "Limits", "ServeError", "build_app"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inlay.serve' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
