"""Ask a server what its /openapi.json allows and what it does not: no 5xx, and every status is one that it documents.

    python tools/schemathesis_serve.py --cases 2000

A tiny host with inlays of every kind is made on the spot; the application is asked without a socket. Prints how many
requests were sent and what statuses came back; exit code 1 where something was not as the description says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from inlay.serve import Engine, build_app
from inlay.serve.keys import Keys

ADMIN = "a-key-for-the-fuzzing-admin"
TIMEOUT = "X-Request-Timeout"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz(engine: Engine, root: Path, cases: int, seed: int = 0) -> Counter[int]:
    """Ask every route its share of so many cases, valid and invalid; the statuses that came back."""
    app = build_app(engine, keys=Keys.of([], [ADMIN]), root=root)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Authorization": f"Bearer {ADMIN}"})
    schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
    operations = [operation.ok() for operation in schema.get_all_operations()]
    seen: Counter[int] = Counter()
    facts = {name: model.facts() for name, model in engine.models.items()}
    names = [name for name, own in facts.items() if own["kind"] in ("classification", "tags") and not own["pair"]]
    each = -(-cases // len(operations))
    turns = ((operation, seed + turn) for turn in range(100) for operation in operations)
    for operation, own_seed in turns:  # a route without parameters has few cases, so the others get more turns
        if sum(seen.values()) >= cases:
            break
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE) | operation.as_strategy(
            generation_mode=schemathesis.GenerationMode.NEGATIVE
        )

        @hypothesis.seed(own_seed)
        @hypothesis.settings(
            max_examples=each, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate], derandomize=False,
        )  # fmt: skip
        @hypothesis.given(case=strategy)
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body and sum(seen.values()) % 2:
                case.body["model"] = names[sum(seen.values()) % len(names)]  # half of them reach a model
            if case.method == "GET" and "name" in (case.path_parameters or {}) and sum(seen.values()) % 2:
                case.path_parameters["name"] = names[sum(seen.values()) % len(names)]
            if _is_short((case.headers or {}).get(TIMEOUT)):
                del case.headers[TIMEOUT]  # who asks for an answer within a microsecond gets the 504 that he asked for
            response = case.call(headers={"Authorization": f"Bearer {ADMIN}"})
            seen[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        ask()
    return seen


def _is_short(seconds: Any) -> bool:
    try:
        return 0 < float(seconds) < 10
    except (TypeError, ValueError):
        return False


def main() -> int:
    from tests.serve.shop import fill_shop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shop = fill_shop(Path(folder))
        with Engine.open([shop / "inlays"]) as engine:
            seen = fuzz(engine, shop / "inlays", options.cases, options.seed)
    print(
        f"{sum(seen.values()):,} requests: "
        + ", ".join(f"{count:,} × {status}" for status, count in sorted(seen.items()))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
