"""The clients: what they ask, when they ask again, and what they raise."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest

from inlay.serve import AsyncClient, Client, ServeError
from tests.serve.test_engine import near


def test_a_client_answers_what_the_engine_does(url, engine):
    with Client(url) as client:
        assert near(client.classify("a", ["good w1", "bad"]), engine.classify("a", ["good w1", "bad"]))
        assert client.explain("fused-tags", "good w1", off=["a"])["changed"]["off"] == ["a"]
        assert {model["id"] for model in client.models()} == {"bert", *engine.models}
        with pytest.raises(ServeError, match="no model 'zzz'") as told:
            client.classify("zzz", ["x"])
        assert (told.value.status, told.value.error_type) == (404, "not_found")
        assert told.value.request_id
        with pytest.raises(ServeError, match="without an admin key"):
            client.load("b", "b")
        with pytest.raises(ServeError, match="without an admin key"):
            client.delete("b")


@pytest.mark.parametrize("alone", ["good w1", {"text": "good w1"}])
def test_one_input_is_not_taken_for_several(url, engine, alone):
    with Client(url) as client, pytest.raises(ServeError, match="inputs is a list of them, got"):
        client.classify("a", alone)
    with pytest.raises(ServeError, match="inputs is a list of them, got"):
        engine.classify("a", alone)


def test_many_asynchronous_clients_at_once(url, engine):
    wanted = engine.classify("a", ["good w1"])

    async def ask():
        async with AsyncClient(url) as client:
            found = await asyncio.gather(*(client.classify("a", ["good w1"]) for _ in range(40)))
            models = await client.models()
            told = await client.explain("fused-classification", "good w1")
            return found, models, told

    found, models, told = asyncio.run(ask())
    assert all(near(each, wanted) for each in found)
    assert len(models) == len(engine.models) + 1
    assert told["members"] == ["a", "b"]


def answering(*statuses, hint="0"):
    """A transport that answers these, one after the other; and how often it was asked."""
    asked = []

    def handle(request):
        status = statuses[len(asked)]
        asked.append(request)
        if status == "refused":
            raise httpx.ConnectError("refused")
        if status == "late":
            raise httpx.ReadTimeout("late")
        body = {"results": [1]} if status == 200 else {"error": "words", "error_type": "kind"}
        return httpx.Response(status, json=body, headers={"retry-after": hint})

    return httpx.MockTransport(handle), asked


@pytest.mark.parametrize("first", [429, 503, "refused"])
def test_it_asks_again_where_that_may_help(first, monkeypatch):
    waits = []
    monkeypatch.setattr("inlay.serve.client.time.sleep", waits.append)
    transport, asked = answering(first, first, 200, hint="7")
    assert Client("http://x", "key-of-a-client", transport=transport).classify("m", ["x"]) == [1]
    assert len(asked) == 3
    assert asked[0].headers["authorization"] == "Bearer key-of-a-client"
    if first != "refused":
        assert all(7 <= wait <= 7.7 for wait in waits[1:])


def test_it_asks_again_only_so_often_and_only_then(monkeypatch):
    monkeypatch.setattr("inlay.serve.client.time.sleep", lambda seconds: None)
    for statuses, tries in (([429] * 3, 3), ([422], 1), ([504], 1), (["late"], 1), ([500], 1)):
        transport, asked = answering(*statuses)
        with pytest.raises(ServeError):
            Client("http://x", transport=transport, retries=2).classify("m", ["x"])
        assert len(asked) == tries


def test_what_is_no_answer_of_ours_is_told(monkeypatch):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with pytest.raises(ServeError, match="in no form we know"):
        Client("http://x", transport=transport).models()
