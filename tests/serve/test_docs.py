"""docs/serving.md is true: its table of limits is that of the class, its routes are those of the application."""

import re
from pathlib import Path

from inlay.serve.limits import Limits

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_table_of_limits_is_that_of_the_class():
    for name, field in Limits.model_fields.items():
        words = " ".join((field.description or "").split())
        assert f"| `--{name.replace('_', '-')}` | {field.default:,} | {words} |" in PAGE


def test_every_route_is_described(client):
    described = set(re.findall(r"/[a-z0-9_/{}.]+", PAGE.partition("## Routes")[2].partition("An input is")[0]))
    assert {route.path for route in client.app.routes} - {"/", "/page/{name}"} <= described
