"""Every route: what it answers, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
import time

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from inlay.serve import Engine, Limits, build_app, forms
from inlay.serve.keys import Keys
from inlay.serve.logs import LOG, log_to
from tests.serve.conftest import ADMIN, USER
from tests.serve.shop import inputs_for, kind_of
from tests.serve.test_engine import near


def as_admin(key: str = ADMIN) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_classify_answers_what_the_engine_does(client, engine):
    for model in engine.models:
        inputs = inputs_for(kind_of(model), 2)
        said = client.post("/v1/classify", json={"model": model, "inputs": inputs})
        assert said.status_code == 200, said.text
        body = said.json()
        assert near(body["results"], engine.classify(model, inputs))
        assert body["kind"] == engine.models[model].codec.task.kind


def test_predict_is_that_of_text_embeddings_inference(client, engine):
    def ask(inputs, **more):
        return client.post("/predict", json={"inputs": inputs, "model": "classification-0"} | more)

    one = ask("good w1").json()
    assert one == sorted(one, key=lambda entry: -entry["score"])
    assert {entry["label"] for entry in one} == {"negative", "positive"}
    assert near(one, engine.classify("classification-0", ["good w1"])[0])
    assert near(ask(["good w1"]).json(), one)
    assert near(ask([["good w1"], ["bad"]]).json(), [one, ask("bad").json()])
    pair = ask(["good", "w1"], model="nli-0").json()
    assert near(pair, engine.classify("nli-0", [{"text": "good", "pair": "w1"}])[0])
    assert ask(["a", "b", "c"]).status_code == 422
    told = ask("w1", model="tags-0")
    assert told.status_code == 422
    assert told.json()["error"] == "'tags-0' gives no labels for a text; ask /v1/classify."
    told = client.post("/predict", json={"inputs": "w1"})
    assert told.status_code == 422
    assert "name one of them" in told.json()["error"]


def test_models_have_the_shape_of_openai(client):
    whole = client.get("/v1/models").json()
    assert whole["object"] == "list"
    host, *models = whole["data"]
    assert host["parent"] is None
    assert {model["parent"] for model in models} == {host["id"]} == {"bert"}
    assert all(model["object"] == "model" and isinstance(model["created"], int) for model in whole["data"])
    fused = client.get("/v1/models/fused-tags").json()
    assert fused["inlay"]["members"] == ["a", "b", "c"]
    assert client.get("/v1/models/nothing").status_code == 404


def test_explain_gives_the_weights_of_every_token_place_and_member(client, engine):
    said = client.post("/v1/explain", json={"model": "fused-classification", "input": "good w1 bad"}).json()
    assert said["members"] == ["a", "b"]
    assert said["texts"] == [["[CLS]", "good", "w1", "bad", "[SEP]"]]
    weights = said["weights"][0]
    assert [len(weights), len(weights[0]), len(weights[0][0])] == [len(said["places"]), 5, 2]
    assert all(abs(sum(token) - 1) < 1e-4 for place in weights for token in place)
    assert near(said["answer"], engine.classify("fused-classification", ["good w1 bad"])[0])
    assert said["changed"] is None


def test_explain_equals_fusion_activations(client, engine):
    """Against the verb that Python users have."""
    import torch

    import inlay

    host, name = engine.shelf.host, engine.models["fused-classification"].inlay
    ids = engine.shelf.bench.tokenizer("good w1 bad", return_tensors="pt")
    theirs = engine.between_batches(lambda: inlay.fusion_activations(host, name, [dict(ids)], per_token=True))
    said = client.post("/v1/explain", json={"model": "fused-classification", "input": "good w1 bad"}).json()
    for place, mine in zip(said["places"], said["weights"][0], strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs.by_token[0][place][0].float(), atol=1e-5, rtol=0)


def test_members_can_be_off_and_pinned(client, engine):
    def ask(**how):
        return client.post("/v1/explain", json={"model": "fused-tags", "input": "good w1 bad"} | how)

    changed = ask(off=["a"], pin={"b": 0.25}).json()["changed"]
    for place in changed["weights"][0]:
        for a, b, c in place:
            assert (a, b, c) == pytest.approx((0, 0.25, 0.75), abs=1e-4)
    usual = ask().json()["answer"]
    assert not near(changed["answer"], usual)
    assert near(ask(off=["a"]).json()["answer"], usual)
    for how, says in (
        ({"off": ["z"]}, "is not a member"),
        ({"pin": {"a": 0.9, "b": 0.9}}, "Fuse('fused-tags'): pinned weights lie between 0 and 1 and sum to at most 1"),
        ({"pin": {"a": 0.9, "b": 0.9}}, "got {'a': 0.9, 'b': 0.9}."),
        ({"off": ["a"], "pin": {"a": 0.9}}, "Fuse('fused-tags'): a member is either off or pinned, once."),
        ({"off": ["a", "b", "c"]}, "must sum to 1"),
        ({"pin": {"a": 2}}, "less than or equal to 1"),
    ):
        told = ask(**how)
        assert told.status_code == 422
        assert says in told.json()["error"]
    assert client.post("/v1/explain", json={"model": "a", "input": "w1"}).status_code == 422


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, ""),
        (b'{"model": "a", "inputs": [' + b"9" * 5000 + b"]}", 400, ""),
        (b"\xff\xfe", 400, ""),
        (b'{"model": "a", "inputs": ["x"], "more": 1}', 422, "more: Extra inputs are not permitted"),
        (b'{"model": "a", "inputs": [["a", "b"]]}', 422, "inputs.0"),
        (b'{"model": "a", "inputs": [{"text": "x", "txet": "y"}]}', 422, "txet"),
        (b'{"model": "none", "inputs": ["x"]}', 404, "no model 'none'"),
        (b'{"inputs": ["x"]}', 422, "model: Field required"),
        (b'{"model": "a", "inputs": ["\\ud800"]}', 422, "not whole Unicode"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(client, body, status, says):
    told = client.post("/v1/classify", content=body, headers={"Content-Type": "application/json"})
    assert told.status_code == status, told.text
    assert told.json().keys() == {"error", "error_type"}
    assert says in told.json()["error"]


def test_other_content_types_are_not_read_as_json(client):
    """So that no page of another origin can ask without being asked itself first."""
    told = client.post(
        "/v1/classify", content=b'{"model": "a", "inputs": ["x"]}', headers={"Content-Type": "text/plain"}
    )
    assert told.status_code == 422


def test_a_body_has_a_limit_also_in_pieces(client, engine):
    big = b'{"model": "a", "inputs": ["' + b"w1 " * (engine.limits.body // 3) + b'"]}'
    assert client.post("/v1/classify", content=big).status_code == 413

    def pieces():
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    told = client.post("/v1/classify", content=pieces(), headers={"Content-Type": "application/json"})
    assert told.status_code == 413
    assert "1,048,576" in told.json()["error"]


def test_unknown_routes_and_methods(client):
    assert client.get("/nothing").json()["error_type"] == "not_found"
    for path in ("/nothing", "/v2/a%20b/c:d", "/v1/classify/x"):
        asked = path.replace("%20", " ")
        assert client.get(path).json()["error"] == f"no route '{asked}'; /openapi.json lists them."
    assert client.get("/v1/classify").status_code == 405
    assert client.get("/v1/classify").json()["error_type"] == "method_not_allowed"
    assert client.get("/v1/classify").json()["error"] == "'/v1/classify' has no GET."


def test_every_answer_has_an_id_and_headers_that_protect(client):
    for path in ("/", "/health", "/nothing", "/v1/models"):
        answer = client.get(path, headers={"X-Request-ID": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    assert client.get("/health", headers={"X-Request-ID": "no\tid"}).headers["x-request-id"] != "no\tid"


def test_health_ready_and_metrics(client, engine):
    client.post("/v1/classify", json={"model": "a", "inputs": ["w1", "w2 w3"]})
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").json()["models"] == len(engine.models)
    text = client.get("/metrics").text
    for name in (
        "inlay_queue_rows",
        "inlay_batch_rows_bucket",
        "inlay_batch_tokens_sum",
        "inlay_heartbeat_age_seconds",
    ):
        assert name in text
    assert 'inlay_request_seconds_count{model="a"}' in text
    assert re.search(r'inlay_responses_total\{route="/v1/classify",status="200"\} \d', text)
    client.post("/v1/classify", json={"model": "evil\nname", "inputs": ["w1"]})
    assert "evil" not in client.get("/metrics").text


def test_a_silent_model_thread_is_not_healthy(shop):
    engine = Engine.open([shop / "inlays" / "a"], limits=Limits(heartbeat=1))
    client, go = TestClient(build_app(engine)), threading.Event()
    assert client.get("/health").status_code == 200
    holder = threading.Thread(target=engine.between_batches, args=(go.wait,))
    holder.start()
    time.sleep(1.3)
    assert client.get("/health").status_code == 503
    assert client.get("/health").json()["status"] == "the model thread does not answer"
    go.set()
    holder.join()
    engine.close()
    assert client.get("/ready").status_code == 503
    told = client.post("/v1/classify", json={"model": "a", "inputs": ["w1"]})
    assert (told.status_code, told.headers["retry-after"]) == (503, "5")


def test_a_full_queue_says_when_to_come_back(shop):
    with Engine.open([shop / "inlays" / "a"], limits=Limits(rows=2)) as engine:
        client = TestClient(build_app(engine))
        assert client.post("/v1/classify", json={"model": "a", "inputs": ["w1"] * 3}).status_code == 413
        with engine.room_for(2):
            told = client.post("/v1/classify", json={"model": "a", "inputs": ["w1"]})
        assert told.status_code == 429
        assert int(told.headers["retry-after"]) >= 1
        go = threading.Event()
        holder = threading.Thread(target=engine.between_batches, args=(lambda: go.wait(120),))
        holder.start()
        late = client.post("/v1/classify", json={"model": "a", "inputs": ["w1"]}, headers={"X-Request-Timeout": "0.05"})
        assert late.status_code == 504
        assert engine.rows == 0
        go.set()
        holder.join()


# keys


def test_every_route_needs_a_key_where_there_are_keys(guarded):
    client, _, _ = guarded
    routes = [(method, route.path) for route in client.app.routes for method in (route.methods or ())]
    assert len(routes) > 12
    for method, path in [*routes, ("GET", "/nothing"), ("POST", "/v1/classify/")]:
        answer = client.request(method, path.replace("{name}", "a"))
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].startswith("Basic")


def test_keys_come_in_three_ways(guarded):
    client, _, _ = guarded
    for headers in (as_admin(USER), {"X-API-Key": USER}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/v1/models", auth=("anybody", USER)).status_code == 200
    for headers in (
        as_admin("wrong"),
        {"X-API-Key": ""},
        {"Authorization": "Basic %%%"},
        {"Authorization": "Bearer"},
        as_admin(USER + "x"),
    ):
        assert client.get("/v1/models", headers=headers).status_code == 401


def test_loading_needs_an_admin(guarded, shop):
    client, _, engine = guarded
    for method, path in (("PUT", "/v1/inlays/b"), ("DELETE", "/v1/inlays/a")):
        assert client.request(method, path, headers=as_admin(USER), json={"path": "b"}).status_code == 403
    bare = TestClient(build_app(engine))
    assert bare.put("/v1/inlays/b", json={"path": "b"}).status_code == 403
    no_root = TestClient(build_app(engine, keys=Keys.of([], [ADMIN])))
    assert no_root.put("/v1/inlays/b", json={"path": "b"}, headers=as_admin()).status_code == 403


def test_load_replace_and_delete(guarded, shop):
    client, _root, engine = guarded
    ask = lambda name: client.post("/v1/classify", json={"model": name, "inputs": ["good w1"]}, headers=as_admin(USER))
    assert ask("b").status_code == 404
    assert client.put("/v1/inlays/b", json={"path": "b"}, headers=as_admin()).status_code == 201
    first = ask("b").json()["results"]
    assert client.put("/v1/inlays/b", json={"path": "a"}, headers=as_admin()).status_code == 200
    assert near(ask("b").json()["results"], ask("a").json()["results"])
    assert not near(ask("b").json()["results"], first)
    assert client.delete("/v1/inlays/b", headers=as_admin()).json() == {"id": "b", "deleted": True}
    assert ask("b").status_code == 404
    assert client.delete("/v1/inlays/b", headers=as_admin()).status_code == 404
    assert ask("a").status_code == 200
    assert len(list(engine.shelf.host.inlays)) == 1


def test_a_damaged_folder_is_refused_and_changes_nothing(guarded):
    client, root, engine = guarded
    before = client.post("/v1/classify", json={"model": "a", "inputs": ["w1"]}, headers=as_admin(USER)).json()
    weights = root / "b" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    told = client.put("/v1/inlays/a", json={"path": "b"}, headers=as_admin())
    assert told.status_code == 422
    assert "weights.safetensors" in told.json()["error"]
    assert str(root.parent) not in told.text
    assert "/" not in told.json()["error"]
    after = client.post("/v1/classify", json={"model": "a", "inputs": ["w1"]}, headers=as_admin(USER)).json()
    assert near(before["results"], after["results"])
    assert len(list(engine.shelf.host.inlays)) == 1


def test_keys_are_in_no_log(guarded, monkeypatch):
    client, _, _ = guarded
    told = io.StringIO()
    monkeypatch.setattr(LOG, "handlers", [])  # what an earlier test has set up is back afterwards
    monkeypatch.setattr(LOG, "level", LOG.level)
    monkeypatch.setattr(LOG, "propagate", LOG.propagate)
    log_to(told)
    client.get("/v1/models", headers=as_admin(USER))
    client.get("/v1/models?key=" + ADMIN, headers=as_admin())
    client.get("/v1/models", headers=as_admin("a-key-that-is-not-known"))
    lines = [json.loads(line) for line in told.getvalue().splitlines()]
    assert [line["status"] for line in lines if line["event"] == "request"] == [200, 200, 401]
    assert all((len(line["id"]) == 16 and line["route"] == "/v1/models") or line["status"] == 401 for line in lines)
    for key in (USER, ADMIN, "a-key-that-is-not-known"):
        assert key not in json.dumps(lines)


def test_a_page_of_another_name_finds_no_local_server(engine):
    client = TestClient(build_app(engine, hosts=("localhost", "127.0.0.1", "::1")), base_url="http://localhost:8000")
    assert client.get("/health").status_code == 200
    assert client.get("/health", headers={"Host": "[::1]:8000"}).status_code == 200
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403


MANY = 30_000


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (forms.ClassifyForm, {"inputs": [0] * MANY}),
        (forms.ClassifyForm, {"inputs": [{"a": 1}] * MANY}),
        (forms.ClassifyForm, {"inputs": [{"text": "a", "choices": [0] * MANY}]}),
        (forms.ClassifyForm, {"inputs": [{f"k{i}": 1 for i in range(MANY)}]}),
        (forms.ClassifyForm, {f"k{i}": 1 for i in range(MANY)}),
        (forms.PredictForm, {"inputs": [[0]] * MANY}),
        (forms.PredictForm, {"inputs": ["a"] + [0] * MANY}),
        (forms.ExplainForm, {"input": "a", "off": [""] * MANY}),
        (forms.ExplainForm, {"input": "a", "pin": {f"k{i}": 9 for i in range(MANY)}}),
        (forms.CompletionForm, {"prompt": [0] * MANY}),
    ],
)
def test_a_body_that_is_wrong_everywhere_is_not_searched_for_all_of_it(form, body):
    """Half a million wrong places in a megabyte took half a minute to tell, in which nobody else was answered."""
    with pytest.raises(ValidationError) as refused:
        form.model_validate({"model": "a"} | body)
    assert 1 <= refused.value.error_count() <= 8


def test_unknown_names_are_told_beside_what_is_missing(client):
    answer = client.post("/v1/classify", json={f"k{i}": 1 for i in range(9)} | {"inputs": ["x"]})
    assert answer.status_code == 422
    assert answer.json()["error"].split("\n") == [
        "body.model: Field required", *(f"body.k{i}: Extra inputs are not permitted" for i in range(5))
    ]  # fmt: skip


def test_more_inputs_than_any_server_takes_are_not_all_looked_at(client):
    answer = client.post("/v1/classify", json={"model": "a", "inputs": [{}] * (forms.MOST + 1)})
    assert (answer.status_code, answer.json()["error_type"]) == (413, "too_large")
    assert "at most 32768" in answer.json()["error"]


def test_choices_that_find_no_room_are_not_cut_into_tokens(engine, client, monkeypatch):
    monkeypatch.setattr(engine, "_cut", lambda *_: pytest.fail("they were cut into tokens"))
    rows = [{"text": "w1", "choices": ["w2"] * (engine.limits.rows + 1)}]
    answer = client.post("/v1/classify", json={"model": "choice-0", "inputs": rows})
    assert answer.status_code == 413
    assert "513 rows" in answer.json()["error"]


def test_cors_is_off_unless_an_origin_is_named(engine, client):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options("/v1/classify", headers=asks).headers
    named = TestClient(build_app(engine, cors=["https://a.example"]))
    assert named.options("/v1/classify", headers=asks).headers["access-control-allow-origin"] == "https://a.example"
    other = asks | {"Origin": "https://b.example"}
    assert "access-control-allow-origin" not in named.options("/v1/classify", headers=other).headers


def test_pages_of_a_named_origin_may_ask_with_a_key_and_see_why_not(engine):
    app = build_app(engine, keys=Keys.of([USER], [ADMIN]), cors=["https://a.example"])
    client, page = TestClient(app), {"Origin": "https://a.example"}
    first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    asked = client.options("/v1/classify", headers=page | first)
    assert asked.status_code == 200
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    body = {"model": "a", "inputs": ["w1"]}

    def ask(headers):
        answer = client.post("/v1/classify", json=body, headers=page | headers)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        return answer

    assert ask(as_admin(USER)).status_code == 200
    assert ask(as_admin("wrong")).status_code == 401
    with engine.room_for(engine.limits.rows):
        full = ask(as_admin(USER))
    assert full.status_code == 429
    assert "retry-after" in full.headers["access-control-expose-headers"].lower()
    assert client.options("/v1/classify", headers=page).status_code == 401, "this is no browser's first question"


def test_hot_reload_takes_what_has_changed_and_only_that(shop, tmp_path):
    shutil.copytree(shop / "inlays" / "a", tmp_path / "a")
    with Engine.open([tmp_path / "a"]) as engine:
        before = engine.classify("a", ["good w1"])
        assert engine.refresh() == []
        shutil.rmtree(tmp_path / "a")
        shutil.copytree(shop / "inlays" / "b", tmp_path / "a")
        assert engine.refresh() == ["a"]
        after = engine.classify("a", ["good w1"])
        assert not near(before, after)
        (tmp_path / "a" / "inlay.json").write_text("{}")
        assert engine.refresh() == []
        assert near(engine.classify("a", ["good w1"]), after)
