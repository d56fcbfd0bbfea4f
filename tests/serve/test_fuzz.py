"""A short run of tools/schemathesis_serve.py: what the description allows and what it does not."""

from __future__ import annotations

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from tools.schemathesis_serve import fuzz


def test_whatever_is_asked_has_a_documented_answer(guarded):
    _, root, engine = guarded
    seen = fuzz(engine, root, 150)
    assert sum(seen.values()) >= 150
    assert all(status < 500 for status in seen)
    assert {200, 422} <= set(seen)
