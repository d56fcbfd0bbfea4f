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
