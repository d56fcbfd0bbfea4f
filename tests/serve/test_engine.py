"""The engine answers what each model answers alone, whatever runs beside it."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
import torch

import inlay
from inlay.data.rows import Table
from inlay.host.joined import Joiner
from inlay.runs.use import open_for_use
from inlay.serve import Engine, Limits
from inlay.serve.errors import DeadlineExceeded, Invalid, NotFound, Overloaded, TooLarge, Unavailable
from tests.serve.shop import TASKS, inputs_for, keep, kind_of, put_in
from tests.training.small import KINDS, rows_of

CLOSE = 1e-5


def near(mine, theirs) -> bool:
    """Equal, numbers within 1e-5."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine - theirs) < CLOSE
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(near(mine[name], theirs[name]) for name in mine)
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    return mine == theirs


def test_everything_of_a_folder_is_served(engine):
    assert len(engine.models) == 26
    assert engine.models["fused-tags"].members.keys() == {"a", "b", "c"}
    assert {model.method for model in engine.models.values()} >= {"pfeiffer", "lora", "prefix", "prompt", "fusion"}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_predict(engine, shop, kind):
    """`inlay predict` opens a host of its own, encodes as training does and knows nothing of batches."""
    rows = [
        {name: value for name, value in row.items() if name not in ("label", "labels", "tags", "answers")}
        for row in rows_of(kind, 9)
    ]
    opened = open_for_use(shop / "inlays" / f"{kind}-0")
    predicted = list(opened.predict(Table(rows, "rows")))
    said = engine.classify(f"{kind}-0", [{"row": row} for row in rows])
    for mine, theirs in zip(said, predicted, strict=True):
        if kind in ("classification", "multilabel"):
            assert near({entry["label"]: entry["score"] for entry in mine}, theirs["probabilities"])
        elif kind == "choice":
            assert near(
                theirs["probabilities"][mine[0]["index"]], max(theirs["probabilities"])
            )  # a choice may stand there twice
            assert near(
                [entry["score"] for entry in sorted(mine, key=lambda entry: entry["index"])],
                theirs["probabilities"][: len(mine)],
            )
        elif kind == "regression":
            assert near(mine["value"], theirs["prediction"])
        elif kind == "tags":
            assert [entry["label"] for entry in mine] == theirs["tags"]
            assert near([entry["score"] for entry in mine], theirs["probabilities"])
        else:
            assert mine["text"] == theirs["answer"]
            assert near(mine["score"], theirs["probability"])


def test_mixed_batches_under_load_answer_what_each_row_answers_alone(engine):
    """64 rows over 20 inlays and three fusions at once, from eight threads."""
    models = [name for name in engine.models if len(name) > 1]
    asked = [
        (models[i % len(models)], given)
        for i in range(64)
        for given in inputs_for(kind_of(models[i % len(models)]), 1, i)
    ]
    alone = [engine.classify(name, [given])[0] for name, given in asked]
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine.observer,
            "batch",
            lambda rows, seconds: sizes.append((len(rows), len({r.request.model.name for r in rows}))),
        )
        with ThreadPoolExecutor(64) as pool:
            for _ in range(3):
                order = random.Random(0).sample(range(64), 64)
                futures = {i: pool.submit(engine.classify, asked[i][0], [asked[i][1]]) for i in order}
                wrong = [asked[i] for i, future in futures.items() if not near(future.result()[0], alone[i])]
                assert not wrong
    assert max(rows for rows, _ in sizes) > 20
    assert max(models for _, models in sizes) > 10


def test_a_joined_plan_is_that_of_rows(engine):
    """Against the setup as everybody activates it, resolved from scratch."""
    host, shelf = engine.shelf.host, engine.shelf
    models = list(shelf.models.values())
    batch = {
        "input_ids": torch.randint(5, 40, (len(models), 9)),
        "attention_mask": torch.ones(len(models), 9, dtype=torch.long),
    }
    batch["attention_mask"][::3, 6:] = 0

    def both():
        with torch.no_grad():
            shelf.host.inlays.switch(host, Joiner(host.inlays.anatomy).joined([model.plan for model in models]))
            joined = host(**batch).logits
            inlay.activate(host, inlay.Rows(*(model.inlay for model in models)))
            return joined, host(**batch).logits

    joined, rows = engine.between_batches(both)
    torch.testing.assert_close(joined, rows, atol=1e-6, rtol=1e-6)


def test_what_changes_the_weights_runs_alone(shop, tmp_path):
    from inlay.training.workbench import Workbench

    bench = Workbench.open(str(shop / "bert"), TASKS["classification"])
    for name, method in {"said": inlay.SAID(d=8), "plain": inlay.Pfeiffer(size=2)}.items():
        put_in(bench, name, method, 3)
        keep(bench, name, TASKS["classification"], tmp_path)
    with Engine.open([tmp_path / "inlays"], limits=Limits(wait=0.05)) as engine:
        alone = [engine.classify(name, ["good w1"]) for name in ("said", "plain")]
        futures = [engine.submit(name, ["good w1"]) for name in ("said", "plain")]
        assert all(near(a, b.result()) for a, b in zip(alone, futures, strict=True))
        assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        ("nli-0", "w1", "reads pair and text, got text"),
        ("classification-0", {"text": "w1", "pair": "w2"}, "reads text, got pair and text"),
        ("choice-0", {"text": "w1"}, "reads choices and text"),
        ("choice-0", {"text": "w1", "choices": ["one"]}, "two or more choices"),
        ("spans-0", {"text": "w1"}, "its context"),
        ("classification-0", " ", "is empty"),
        ("classification-0", "half \ud800", "not whole Unicode"),
        ("tags-0", {"words": ["a", ""]}, "word 1 is ''"),
        ("nli-0", {"row": {"premise": "w1"}}, "has no column 'hypothesis'"),
        ("nli-0", {"row": {}, "text": "w1"}, "a row stands alone"),
    ],
)
def test_an_input_that_does_not_fit_is_told_with_its_place(engine, model, given, says):
    good = inputs_for(kind_of(model), 1)[0]
    with pytest.raises(Invalid, match=r"inputs\[1\]: ") as told:
        engine.classify(model, [good, given])
    assert says in str(told.value)
    assert engine.rows == 0


def test_unknown_models_and_empty_requests_are_refused(engine):
    with pytest.raises(NotFound, match="Did you mean 'fused-tags'"):
        engine.classify("fused-tag", ["w1"])
    with pytest.raises(Invalid, match="inputs is empty"):
        engine.classify("a", [])
    with pytest.raises(TooLarge, match="513 inputs"):
        engine.classify("a", ["w1"] * 513)
    with pytest.raises(TooLarge, match="rows for the host"):
        engine.classify("spans-0", [{"text": "w1", "pair": "w2 " * 10_000}])


@pytest.fixture
def stuck(shop):
    """An engine whose model thread is busy until the test lets it go; room for four rows."""
    engine = Engine.open([shop / "inlays" / "a"], limits=Limits(rows=4, wait=0, deadline=5))
    go = threading.Event()
    holder = threading.Thread(target=engine.between_batches, args=(lambda: go.wait(120),))
    holder.start()
    while engine.jobs:
        time.sleep(0.001)
    yield engine, go
    go.set()
    holder.join()
    engine.close(5)


def test_a_full_queue_refuses_at_once_and_answers_what_it_took(stuck):
    engine, go = stuck
    taken = [engine.submit("a", ["good w1", "bad"]) for _ in range(2)]
    with pytest.raises(Overloaded) as told:
        engine.submit("a", ["w1"])
    assert told.value.retry_after >= 1
    go.set()
    assert all(len(future.result(120)) == 2 for future in taken)
    assert engine.classify("a", ["w1"])


def test_who_has_gone_makes_room(stuck):
    engine, go = stuck
    gone = engine.submit("a", ["w1"] * 4)
    assert gone.cancel()
    kept = engine.submit("a", ["w1"] * 4)
    go.set()
    assert len(kept.result(120)) == 4
    with pytest.raises(CancelledError):
        gone.result(0)


def test_a_deadline_is_kept(stuck):
    engine, go = stuck
    late = engine.submit("a", ["w1"], timeout=0.01)
    time.sleep(0.05)
    go.set()
    with pytest.raises(DeadlineExceeded):
        late.result(120)
    assert engine.rows == 0


def test_a_drain_refuses_what_is_new_and_finishes_what_was_taken(stuck):
    engine, go = stuck
    taken = engine.submit("a", ["w1"])
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine.draining:
        time.sleep(0.001)
    with pytest.raises(Unavailable):
        engine.submit("a", ["w1"])
    go.set()
    assert taken.result(120)
    closing.join(10)
    assert not engine.thread.is_alive()


def test_one_bad_batch_fails_alone(shop):
    with Engine.open([shop / "inlays" / "a"]) as engine:
        host = engine.shelf.host
        handle = host.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("/secret/place broke")))
        with pytest.raises(inlay.InlayError, match="the host failed on this batch"):
            engine.classify("a", ["w1"])
        handle.remove()
        assert engine.classify("a", ["w1"])
        assert engine.healthy()


def test_a_dropped_model_leaves_with_its_last_row_though_more_work_waits(shop):
    with Engine.open([shop / "inlays" / "a"], limits=Limits(wait=0)) as engine:
        there: list[int] = []
        seen: Future[None] = Future()

        def look() -> None:
            there.append(len(list(engine.shelf.host.inlays)))

        def take_a_row_and_drop() -> Future[list[object]]:
            taken = engine.submit("a", ["w1"])
            engine.shelf.drop("a")
            look()
            engine.jobs.append((look, seen))  # the row's batch is next, then this, and the thread is never idle
            return taken

        assert len(engine.between_batches(take_a_row_and_drop).result(120)) == 1
        seen.result(120)
        assert there == [1, 0]


def test_a_look_inside_keeps_the_limits_of_a_batch_and_others_have_their_turn(shop):
    """A context of many windows; with members off they are read twice."""
    given = {"text": "w1", "pair": " ".join(["good w1 w2 w3"] * 40)}
    paths = [shop / "inlays" / name for name in ("fused-spans", "b", "c")]
    how = {"off": ["b"]}
    with Engine.open(paths) as engine:
        whole = engine.explain("fused-spans", given, **how)
    assert len(whole["texts"]) > 6
    read, order, others = [], [], []
    with Engine.open(paths, limits=Limits(batch_rows=4, batch_tokens=60, wait=0)) as engine:

        def look(host, args, inputs) -> None:
            read.append(tuple(inputs["input_ids"].shape))
            if len(read) == 1:
                others.append(engine.submit("b", ["w1"], client="other"))
                others[0].add_done_callback(lambda _: order.append("other"))

        engine.shelf.host.register_forward_pre_hook(look, with_kwargs=True)
        with engine.room_for(1) as hold:
            future = engine.enter_explain(hold, "fused-spans", given, **how)
            future.add_done_callback(lambda _: order.append("inside"))
        parts = future.result(60)
    for mine, theirs in ((parts, whole), (parts["changed"], whole["changed"])):
        for one, other in zip(mine.pop("weights"), theirs.pop("weights"), strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=0)
    assert near(parts, whole)
    assert max(rows for rows, _ in read) <= 4
    assert max(rows * tokens for rows, tokens in read) <= 60
    assert order == ["other", "inside"]


def test_nothing_is_cached_on_disk_by_asking(engine, monkeypatch):
    monkeypatch.setattr("inlay.training.tokens.write_whole", lambda *_: pytest.fail("a request was cached"))
    engine.classify("a", ["a text that nobody asked before"])
