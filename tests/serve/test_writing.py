"""Hosts that write: T5 answers tasks in text, decoders go on with prompts, whole or piece by piece."""

from __future__ import annotations

import io
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import transformers as hf
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import inlay
from inlay.data.rows import Table
from inlay.data.task import Task
from inlay.runs.use import open_for_use
from inlay.serve import Engine, Limits, build_app
from inlay.serve.errors import DeadlineExceeded
from inlay.serve.keys import Keys
from inlay.serve.logs import LOG, log_to
from inlay.training.recipe import Generation
from inlay.training.workbench import Workbench
from tests.hosts import shake
from tests.serve.conftest import ADMIN
from tests.training.small import save_bert, save_decoder, save_t5


def shelf_of(folder: Path, host: Path, tasks: dict[str, Task]) -> Path:
    bench = Workbench.open(str(host), next(iter(tasks.values())))
    for number, (name, task) in enumerate(tasks.items()):
        inlay.add(bench.host, name, inlay.Pfeiffer(size=4))
        shake(bench.host, name, number, std=0.5)
        facts = {"task": task.model_dump(mode="json"), "max_length": 32}
        inlay.save(bench.host, name, folder / name, task=task.name, data=facts)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    tasks = {"own": Task(labels=("positive", "negative")), "free": Task(name="free", kind="text")}
    shelf_of(folder / "inlays", save_t5(folder / "host"), tasks)
    with Engine.open([folder / "inlays"], limits=Limits(wait=0.02)) as engine:
        yield engine, folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    shelf_of(
        folder / "inlays",
        save_decoder(folder / "host"),
        {"one": Task(name="one", kind="text"), "two": Task(name="two", kind="text")},
    )
    with Engine.open([folder / "inlays"], limits=Limits(new_tokens=20)) as engine:
        yield engine, folder


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A decoder that never ends a text, with room for two rows or sixteen tokens in a batch."""
    folder = tmp_path_factory.mktemp("endless")
    host = save_decoder(folder / "host")
    tasks = {"one": Task(name="one", kind="text"), "two": Task(name="two", kind="text")}
    shelf_of(folder / "inlays", host, tasks)
    with Engine.open([folder / "inlays"], limits=Limits(batch_rows=2, batch_tokens=16, wait=0)) as engine:
        engine.shelf.host.generation_config.eos_token_id = None
        engine.shelf.bench.tokenizer.eos_token = None
        yield engine


@contextmanager
def at_each_step(engine, act):
    """Calls a function with what the host reads, before each of its passes."""
    hook = lambda host, args, given: act(given.get("input_ids", given.get("decoder_input_ids")))
    handle = engine.shelf.host.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["own", "free"])
def test_answers_in_text_are_those_of_predict(t5, name):
    engine, folder = t5
    rows = [{"text": text} for text in ("good w1", "bad w2 w3 w4", "w5")]
    theirs = list(open_for_use(folder / "inlays" / name).predict(Table(rows, "rows")))
    mine = engine.classify(name, [row["text"] for row in rows])
    for ours, wanted in zip(mine, theirs, strict=True):
        if name == "free":
            assert ours == {"text": wanted["prediction"]}
        else:
            assert ours[0]["label"] == wanted["label"]
            assert ours[0].get("said") == wanted.get("said")


def test_a_task_with_a_template_answers_a_plain_text(tmp_path):
    task = Task(name="asked", kind="text", text="question", template="{question}{eos} {target}")
    shelf_of(tmp_path / "inlays", save_decoder(tmp_path / "host"), {"asked": task})
    theirs = list(open_for_use(tmp_path / "inlays" / "asked").predict(Table([{"question": "w1 good"}], "rows")))
    with Engine.open([tmp_path / "inlays"]) as engine:
        body = {"model": "asked", "inputs": ["w1 good", {"text": "w1 good"}, {"row": {"question": "w1 good"}}]}
        said = TestClient(build_app(engine)).post("/v1/classify", json=body)
    assert said.status_code == 200, said.text
    assert said.json()["results"] == [{"text": theirs[0]["prediction"]}] * 3


@pytest.mark.parametrize("words", [("bad", "good"), ("bad w3", "good")])
def test_answers_at_a_mask_are_those_of_predict(words, tmp_path):
    """A label may need several masks; such a row is one all the same."""
    hf.BertForMaskedLM.from_pretrained(save_bert(tmp_path / "host")).save_pretrained(tmp_path / "host")
    how = {"answer_with": "words", "label_words": words, "cloze": "{said} w1 {target}"}
    task = Task(text="said", labels=("negative", "positive"), **how)
    shelf_of(tmp_path / "inlays", tmp_path / "host", {"one": task, "two": task})
    texts = ["w1 good", "w2 bad w3 w4 w5", "w6"]
    with Engine.open([tmp_path / "inlays"]) as engine:
        both = [(name, engine.submit(name, texts)) for name in ("one", "two")]
        for name, mine in both:
            theirs = open_for_use(tmp_path / "inlays" / name).predict(Table([{"said": text} for text in texts], "rows"))
            for ours, wanted in zip(mine.result(60), theirs, strict=True):
                assert {said["label"]: said["score"] for said in ours} == pytest.approx(
                    wanted["probabilities"], abs=1e-5
                )


@pytest.mark.parametrize("answering", ["generation", "ranking"])
def test_the_model_thread_does_not_share_the_tokenizer_with_requests(t5, answering, monkeypatch):
    """It answers while others cut their inputs, and they may cut while it ranks labels."""
    engine, _ = t5
    model, go, free = engine.models["own"], threading.Event(), []
    monkeypatch.setattr(model, "codec", replace(model.codec, answering=answering))
    holder = threading.Thread(target=engine.between_batches, args=(lambda: go.wait(60),))
    holder.start()
    try:
        future = engine.submit("own", ["good w1", "bad w2"])
        with engine.cutting:
            go.set()
            assert len(future.result(60)) == 2
        with at_each_step(engine, lambda _: free.append(not engine.cutting.locked())):
            engine.classify("own", ["good w1"])
        assert free
        assert all(free)
    finally:
        go.set()
        holder.join()


def test_an_answer_does_not_wait_for_the_tokenizer(decoder):
    """The event loop, which has others to serve, takes no lock that is held for long."""
    engine, _ = decoder
    client, taken = TestClient(build_app(engine)), []

    def take_once(_) -> None:
        if not taken:
            taken.append(engine.cutting.acquire())  # by whoever cuts the inputs of another request

    ask = lambda: client.post("/v1/completions", json={"model": "one", "prompt": "w1", "max_tokens": 4})
    with at_each_step(engine, take_once), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            assert asked.result(60).status_code == 200
        finally:
            engine.cutting.release()


def alone(folder: Path, prompt: str, tokens: int) -> str:
    """transformers' own generate on the bare host."""
    host = hf.AutoModelForCausalLM.from_pretrained(folder / "host").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "host")
    ids = tokenizer(prompt, return_tensors="pt")
    made = host.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_completions_are_those_of_generate(decoder):
    engine, folder = decoder
    client = TestClient(build_app(engine))
    body = {"model": "host", "prompt": ["good w1", "bad w2 w3 {w4}"], "max_tokens": 6}
    said = client.post("/v1/completions", json=body)
    assert said.status_code == 200, said.text
    found = said.json()
    assert [choice["text"] for choice in found["choices"]] == [alone(folder, prompt, 6) for prompt in body["prompt"]]
    assert found["object"] == "text_completion"
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    one, two = (
        client.post("/v1/completions", json=body | {"model": name}).json()["choices"] for name in ("one", "two")
    )
    assert one != two


@pytest.mark.parametrize("kind", ["decoder", "t5"])
def test_usage_and_finish_reason_are_those_of_the_ids_that_were_written(kind, request, monkeypatch):
    """Also where a text has special tokens in it, which are not seen in it, or spaces at its ends."""
    engine, _ = request.getfixturevalue(kind)
    client, host, seen = TestClient(build_app(engine)), engine.shelf.host, []

    def spied(*args, _generate=host.generate, **given):
        made = _generate(*args, **given)
        seen.append(
            (int(given["attention_mask"].sum()), made[:, given["input_ids"].shape[1] if kind == "decoder" else 1 :])
        )
        return made

    monkeypatch.setattr(host, "generate", spied)
    body = {"model": engine.shelf.host_name, "prompt": ["good w1", "bad w2 w3"], "max_tokens": 6, "temperature": 1.5}
    reasons = set()
    for seed in range(12):
        found = client.post("/v1/completions", json=body | {"seed": seed}).json()
        read, made = seen[-1]
        ends = [row.index(1) + 1 if 1 in row else None for row in made.tolist()]  # 1 is </s> in both
        assert len(ends) == 2
        told = [choice["finish_reason"] for choice in found["choices"]]
        order = [1, 0]  # the longest is written first
        assert told == ["length" if ends[i] is None else "stop" for i in order]
        written = sum(end or 6 for end in ends)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        assert found["usage"] == usage
        reasons |= set(told)
    assert reasons == {"stop", "length"}


def test_a_streamed_text_is_the_whole_one(decoder):
    engine, _ = decoder
    client = TestClient(build_app(engine))
    body = {"model": "one", "prompt": "good w1", "max_tokens": 8}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A decoder whose tokens have their spaces, as those of GPT-2 and Llama 3."""
    folder = tmp_path_factory.mktemp("spaced")
    host = save_decoder(folder / "host")
    size = hf.AutoConfig.from_pretrained(host).vocab_size
    words = ["<pad>", "</s>", "<s>", "<unk>", "Ġ", "Ċ"]
    words += [space + f"w{i}" for i in range((size - len(words)) // 2) for space in ("", "Ġ")]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=64).save_pretrained(host)
    shelf_of(folder / "inlays", host, {"one": Task(name="one", kind="text")})
    with Engine.open([folder / "inlays"]) as engine:
        yield engine, folder


def test_a_completion_has_the_spaces_at_its_ends_and_a_task_s_answer_has_not(spaced):
    """Clients put it behind their prompt, which is gone on with as it stands."""
    engine, folder = spaced
    client = TestClient(build_app(engine))
    prompts = [f"w{i} w{i + 1}{end}" for i in range(4) for end in ("", " ", "\n")]
    body = {"model": "host", "max_tokens": 5}
    said = client.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
    texts = [choice["text"] for choice in said]
    assert texts == [alone(folder, prompt, 5) for prompt in prompts]
    spaces = next(i for i, text in enumerate(texts) if text[:1].isspace() and text.strip())
    with client.stream("POST", "/v1/completions", json=body | {"prompt": prompts[spaces], "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == texts[spaces]
    answers = [answer["text"] for answer in engine.classify("one", [prompt.strip() for prompt in prompts])]
    assert any(answers)
    assert answers == [answer.strip() for answer in answers]


def test_an_answer_is_shown_without_the_spaces_before_it(spaced):
    opened, shown = open_for_use(spaced[1] / "inlays" / "one"), list[str]()
    for i in range(6):
        pieces = list[str]()
        [whole] = opened.write(Table([{"text": f"w{i} w{i + 1}"}], "rows"), pieces.append)
        assert "".join(pieces).rstrip() == whole == whole.strip()
        shown += pieces
    assert any(shown)


def test_sampling_follows_its_seed(decoder):
    engine, _ = decoder
    client = TestClient(build_app(engine))
    ask = lambda seed: client.post(
        "/v1/completions", json={"model": "one", "prompt": "w1", "max_tokens": 12, "temperature": 2, "seed": seed}
    ).json()["choices"]
    assert ask(1) == ask(1)
    assert len({ask(seed)[0]["text"] for seed in range(6)}) > 1


def wait_for(engine, future) -> None:
    """Until it has an answer or is cancelled, and the batch that it was in is over."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    engine.between_batches(lambda: None)


MANY = 300
"""Tokens of a text that nobody should write to its end."""


def enter(engine, prompts, client="", tokens=MANY, model="one"):
    with engine.room_for(len(prompts)) as hold:
        how = Generation(max_new_tokens=tokens, sampling=2.0)
        return engine.enter_completion(hold, model, prompts, how, client=client)


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_text_that_nobody_reads_any_more_is_written_no_further(endless, prompts):
    steps, entered = [], Future()

    def leave_at_three(read) -> None:
        steps.append(read)
        if len(steps) == 3:
            entered.result(120).cancel()

    with at_each_step(endless, leave_at_three):
        entered.set_result(future := enter(endless, ["w1"] * prompts))
        wait_for(endless, future)
    assert future.cancelled()
    assert len(steps) == 3


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_deadline_ends_a_text_and_each_token_is_a_sign_of_life(endless, prompts, monkeypatch):
    beats, asked = [], []

    def silent_then_late(read) -> None:
        beats.append(endless.beat)
        endless.beat = 0.0
        if len(beats) == 3:
            asked[0].deadline = 0.0

    monkeypatch.setattr(
        endless, "_queued", lambda request, hold: asked.append(request) or Engine._queued(endless, request, hold)
    )
    with at_each_step(endless, silent_then_late):
        future = enter(endless, ["w1"] * prompts)
        wait_for(endless, future)
        with pytest.raises(DeadlineExceeded):
            future.result(0)
    assert len(beats) == 3
    assert all(beats)


def test_answers_in_text_give_signs_of_life_and_end_when_nobody_waits(t5):
    engine, _ = t5
    beats, entered = [], Future()

    def leave_at_three(read) -> None:
        beats.append(engine.beat)
        engine.beat = 0.0
        if len(beats) == 3:
            entered.result(120).cancel()

    with at_each_step(engine, leave_at_three):
        entered.set_result(future := engine.submit("free", ["w1", "w2 w3"]))
        wait_for(engine, future)
    assert future.cancelled()
    assert len(beats) == 3
    assert all(beats)


def test_prompts_are_written_within_the_limits_of_a_batch_and_others_have_their_turn(endless):
    """Five prompts in batches of two: who comes during the first of them does not wait for the last."""
    read, order, other = [], [], []

    def look(ids) -> None:
        read.append(tuple(ids.shape))
        if len(read) == 1:
            other.append(enter(endless, ["w1"], client="other", tokens=2, model="two"))
            other[0].add_done_callback(lambda _: order.append("other"))

    prompts = ["w1", "w2 w3", "w4", "w5 w1", "w2 " * 20]
    with at_each_step(endless, look):
        many = enter(endless, prompts, client="many", tokens=4)
        many.add_done_callback(lambda _: order.append("many"))
        texts = [one.text for one in many.result(60)]
        other[0].result(60)
    assert max(rows for rows, _ in read) == 2
    assert max(rows * tokens for rows, tokens in read) == 20, "one that is longer runs alone"
    assert order == ["other", "many"]
    how = Generation(max_new_tokens=4, sampling=2.0)
    with endless.room_for(5) as hold:
        again = endless.enter_completion(hold, "one", prompts, how).result(60)
    assert texts == [one.text for one in again]
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ""}, "prompt is empty"), ({"prompt": []}, "prompt is empty"), ({"prompt": "w1", "max_tokens": 21}, "up to 20"),
        ({"prompt": ["a", "b"], "stream": True}, "one prompt at a time"), ({"prompt": "w1", "n": 2}, "Extra inputs"),
        ({"prompt": "w1", "temperature": 3}, "less than or equal to 2"), ({"prompt": "\ud800"}, "not whole Unicode"),
    ],
)  # fmt: skip
def test_bad_completions_are_refused(decoder, body, says):
    client = TestClient(build_app(decoder[0]))
    told = client.post(
        "/v1/completions", content=json.dumps({"model": "one"} | body), headers={"Content-Type": "application/json"}
    )
    assert told.status_code == 422
    assert says in told.json()["error"]


def test_the_hosts_own_completions_are_counted_and_logged_by_its_name(decoder, monkeypatch):
    engine, _ = decoder
    client, told = TestClient(build_app(engine)), io.StringIO()
    monkeypatch.setattr(LOG, "handlers", [])
    monkeypatch.setattr(LOG, "level", LOG.level)
    monkeypatch.setattr(LOG, "propagate", LOG.propagate)
    log_to(told)
    for name in ("host", "one"):
        client.post("/v1/completions", json={"model": name, "prompt": "w1", "max_tokens": 2})
    for _ in range(2):
        text = client.get("/metrics").text
        for name in ("host", "one"):
            assert f'inlay_request_seconds_count{{model="{name}"}} 1.0' in text
            assert f'inlay_tokens_total{{model="{name}"}} 1.0' in text
    assert [line["model"] for line in map(json.loads, told.getvalue().splitlines()) if "model" in line] == [
        "host",
        "one",
    ]


def test_a_host_with_labels_writes_nothing(client):
    told = client.post("/v1/completions", json={"model": "a", "prompt": "w1"})
    assert told.status_code == 422
    assert told.json()["error"] == "'a' answers with labels and writes no text; ask /v1/classify."
    assert client.post("/v1/completions", json={"model": "bert", "prompt": "w1"}).status_code == 404


def test_the_host_itself_is_not_deleted_but_a_model_of_its_name_is(decoder):
    engine, folder = decoder
    app = build_app(engine, keys=Keys.of([], [ADMIN]), root=folder)
    client = TestClient(app, headers={"X-API-Key": ADMIN})
    told = client.delete("/v1/inlays/host")
    assert told.status_code == 404
    assert "the host itself" in told.json()["error"]
    body = {"model": "host", "prompt": "w1", "max_tokens": 4}
    alone = client.post("/v1/completions", json=body).json()["choices"]
    assert client.put("/v1/inlays/host", json={"path": "inlays/one"}).status_code == 201
    assert client.delete("/v1/inlays/host").json() == {"id": "host", "deleted": True}
    assert client.delete("/v1/inlays/host").status_code == 404
    assert client.post("/v1/completions", json=body).json()["choices"] == alone
    assert set(engine.models) == {"one", "two"}
    assert not engine.shelf.retired
