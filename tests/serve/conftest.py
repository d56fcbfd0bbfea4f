from pathlib import Path

import pytest

from inlay.serve import Engine, Limits
from tests.serve.shop import fill_shop


@pytest.fixture(scope="session")
def shop(tmp_path_factory) -> Path:
    """A tiny host, 20 inlays of every kind and method, three fusions with three members."""
    return fill_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="session")
def engine(shop):
    with Engine.open([shop / "inlays"], limits=Limits(wait=0.01)) as engine:
        yield engine


USER, ADMIN = "a-key-that-may-ask-only", "a-key-that-may-load-too"


@pytest.fixture(scope="session")
def client(engine):
    """Asks the application without a socket and without keys."""
    from starlette.testclient import TestClient

    from inlay.serve import build_app

    return TestClient(build_app(engine))


@pytest.fixture
def guarded(shop, tmp_path):
    """An application with keys and a root folder, over an engine of its own; its root holds two inlays."""
    import shutil

    from starlette.testclient import TestClient

    from inlay.serve import build_app
    from inlay.serve.keys import Keys

    root = tmp_path / "root"
    for name in ("a", "b"):
        shutil.copytree(shop / "inlays" / name, root / name)
    with Engine.open([shop / "inlays" / "a"]) as engine:
        app = build_app(engine, keys=Keys.of([USER], [ADMIN]), root=root)
        yield TestClient(app), root, engine


@pytest.fixture(scope="session")
def url(engine):
    """A real server on a free port."""
    import socket
    import threading
    import time

    from inlay.serve import build_app
    from inlay.serve.server import make_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server(build_app(engine), engine, "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
