"""One host, one thread that runs it, and every model that is set into it.

engine = Engine.open(["runs/rte", "runs/sentiment", "runs/fused"])
engine.classify("sentiment", ["I liked it."])         [[{"label": "positive", "score": 0.98}, …]]
engine.close()

any thread          checks, cuts into tokens, queues, waits
the model thread    takes a batch, joins the plans of its rows, runs the host once, hands the answers out;
                    between two batches models come and go
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from inlay.checkpoints.ours import read as verified
from inlay.data.examples import Example
from inlay.data.task import Task
from inlay.errors import InlayError
from inlay.host.plan import Plan
from inlay.host.verbs import inlays_of
from inlay.runs.allowed import Allowed
from inlay.serve.batcher import Batcher
from inlay.serve.errors import (
    DeadlineExceeded,
    Gone,
    Invalid,
    Overloaded,
    ServeError,
    TooLarge,
    Unavailable,
    check_several,
)
from inlay.serve.explain import explained, look_inside
from inlay.serve.inputs import read_inputs
from inlay.serve.limits import Limits
from inlay.serve.logs import LOG
from inlay.serve.pieces import Piece, common_host, piece_at, pieces_of
from inlay.serve.requests import Request, Row
from inlay.serve.shelf import Model, Shelf
from inlay.storage.folders import reading
from inlay.training.codec import Codec, EncodedSplit
from inlay.training.evaluate import ask
from inlay.training.generation import WrittenText, write_rows
from inlay.training.recipe import Generation
from inlay.training.threads import use_threads
from inlay.training.tokens import on_device
from inlay.training.workbench import Workbench

T = TypeVar("T")
Read = Callable[[Model], tuple[Codec, list[Example]]]
"""How a request is read, once its model is known."""
BEAT = 0.25
"""Seconds between two signs of life of an idle model thread."""


class Observer(Protocol):
    """Whoever counts what an engine does."""

    def batch(self, rows: Sequence[Row], seconds: float) -> None: ...
    def answered(self, request: Request, error: BaseException | None) -> None: ...


class Nobody:
    """Counts nothing."""

    def batch(self, rows: Sequence[Row], seconds: float) -> None: ...
    def answered(self, request: Request, error: BaseException | None) -> None: ...


@dataclass
class Hold:
    """Places in the queue that are kept for a request while it is read."""

    rows: int


class Engine:
    """Serves models on one host, in this process and without HTTP."""

    def __init__(self, shelf: Shelf, limits: Limits | None = None, threads: int | None = None) -> None:
        self.shelf, self.limits, self.threads = shelf, limits or Limits(), threads
        self.observer: Observer = Nobody()
        self.batcher: Batcher[Row] = Batcher(self.limits.batch_rows, self.limits.batch_tokens, self.limits.wait)
        self.jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.rows = 0
        """Rows that wait or run: what the limit counts."""
        self.speed = 50.0
        """Rows per second, as the last batches had it."""
        self.beat = time.monotonic()
        self.opened = time.time()
        self.draining = self.stopping = False
        self.changed = threading.Condition()
        self.cutting = threading.Lock()
        """A tokenizer keeps how it cuts in itself, so one thread uses it at a time; the model thread has its own."""
        self.thread = threading.Thread(target=self._work, name="inlay-model", daemon=True)
        self.thread.start()

    @classmethod
    def open(
        cls, paths: Sequence[str | Path], host: str | None = None, *, limits: Limits | None = None,
        allowed: Allowed | None = None, threads: int | None = None,
    ) -> Engine:  # fmt: skip
        """Open the host that these runs, inlays and fusions are for, and load all of them; `NAME=PATH` names one."""
        limits, allowed = limits or Limits(), allowed or Allowed()
        pieces = pieces_of([str(path) for path in paths])
        if not pieces:
            raise Invalid("nothing to serve: give at least one run or inlay.")
        name = common_host(pieces, host)
        bench = Workbench.open(name, pieces[0].task, trust_remote_code=allowed.trust_remote_code)
        bench.host.requires_grad_(False)
        engine = cls(Shelf(bench, name, allowed, limits.models), limits, threads)
        problems = []
        for piece in pieces:
            try:
                engine.put(piece)
            except InlayError as error:
                problems.append(str(error))
        if problems:
            engine.close(0)
            raise InlayError("\n".join(problems))
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # asking

    def classify(self, model: str, inputs: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """What a model says about inputs; `inlay.serve.answers` has the forms of both."""
        return self._wait(self.submit(model, inputs, timeout=timeout))

    def explain(
        self, model: str, given: Any, *,
        off: Sequence[str] = (), pin: Mapping[str, float] | None = None, timeout: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """How a fusion weighs its members, per token and place, and what it says with some of them off or pinned."""
        with self.room_for(1) as hold:
            future = self.enter_explain(hold, model, given, off=off, pin=pin, timeout=timeout)
        return self._wait(future)

    def submit(
        self, model: str, inputs: Sequence[Any], *, client: str = "", timeout: float | None = None
    ) -> Future[list[Any]]:
        """The same without waiting for it. A future that is cancelled costs nothing more."""
        check_several(inputs)
        with self.room_for(len(inputs)) as hold:
            return self.enter(hold, model, inputs, client=client, timeout=timeout)

    def enter(
        self, hold: Hold, model: str, inputs: Sequence[Any], *, client: str = "", timeout: float | None = None
    ) -> Future[list[Any]]:
        """The same where the caller holds `room_for` the inputs."""
        with self._prepared(model, _inputs(inputs), client, timeout) as request:
            return self._queued(request, hold)

    def enter_explain(
        self, hold: Hold, model: str, given: Any, *, off: Sequence[str] = (), pin: Mapping[str, float] | None = None,
        client: str = "", timeout: float | None = None,
    ) -> Future[dict[str, Any]]:  # fmt: skip
        """`explain` without waiting for it, where the caller holds `room_for` one input."""
        with self._prepared(model, _inputs([given]), client, timeout) as request:
            served = request.model
            if not served.members:
                raise Invalid(f"{model!r} is no fusion ({served.method}): it has no members to weigh.")
            if served.codec.form != "labels":
                raise Invalid(f"{model!r} answers in words; only fusions that answer with labels can be looked into.")
            request.off, request.pin, request.looks_inside = tuple(off), dict(pin or {}), True
            return self._queued(request, hold)

    def enter_completion(
        self, hold: Hold, model: str, prompts: Sequence[str], how: Generation, *,
        on_text: Callable[[str], None] | None = None, client: str = "", timeout: float | None = None,
    ) -> Future[list[WrittenText]]:  # fmt: skip
        """What a host that writes makes of prompts; `on_text` is given a single one's text piece by piece."""

        def read(served: Model) -> tuple[Codec, list[Example]]:
            if served.codec.form != "text":
                words = f"{model!r} answers with labels and writes no text; ask /v1/classify."
                raise Invalid(words, urls=["/v1/classify"])
            task = Task(name="completion", kind="text")
            codec = replace(served.codec, task=task, generation=how, answering="generation", verbatim=True)
            return codec, [Example(((prompt, None),), None, before=prompt) for prompt in prompts]

        with self._prepared(model, read, client, timeout) as request:
            request.writes, request.on_text = True, on_text
            return self._queued(request, hold)

    def complete(self, model: str, prompts: Sequence[str], how: Generation | None = None) -> list[str]:
        """What a host that writes makes of prompts."""
        with self.room_for(len(prompts)) as hold:
            future = self.enter_completion(hold, model, prompts, how or Generation())
        return [one.text for one in self._wait(future)]

    @contextmanager
    def room_for(self, rows: int) -> Iterator[Hold]:
        """Hold places in the queue while inputs are cut into tokens; refused at once where there are none."""
        self.check_open()
        if rows > self.limits.rows:
            raise TooLarge(f"{rows:,} inputs in one request; this server takes {self.limits.rows:,} rows at once.")
        with self.changed:
            if self.rows + rows > self.limits.rows:
                raise self._full(rows)
            self.rows += rows
        hold = Hold(rows)
        try:
            yield hold
        finally:
            with self.changed:
                self.rows -= hold.rows  # none, where the request is in the queue now

    def check_room(self, more: int = 0) -> None:
        """Refuse where there would be no room for a single row besides `more` that are about to come."""
        self.check_open()
        if self.rows + more >= self.limits.rows:
            raise self._full(1)

    def check_open(self) -> None:
        if self.draining:
            raise Unavailable("the server is going down. Ask another one, or later.")

    def _full(self, rows: int) -> Overloaded:
        return Overloaded(
            f"{self.rows:,} rows wait or run and the limit is {self.limits.rows:,}, so {rows:,} more find no room. "
            f"Ask again later.",
            retry_after=max(1.0, self.rows / self.speed),
        )

    @contextmanager
    def _prepared(self, model: str, read: Read, client: str, timeout: float | None) -> Iterator[Request]:
        """Checked and tokenised inputs for a model that is kept until it has answered, or until an error."""
        deadline = self.limits.until(timeout)
        served = self.shelf.claim(model)
        try:
            codec, examples = read(served)
            if codec.form == "labels":
                self._check_rows(sum(len(example.texts) for example in examples))  # before choices are cut into tokens
            yield Request(served, codec, self._cut(codec, examples, deadline), client, deadline)
        except BaseException:
            self.shelf.release(served)
            raise

    def _cut(self, codec: Codec, examples: Sequence[Example], deadline: float) -> EncodedSplit:
        if not self.cutting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("the inputs could not be read before the deadline.")
        try:
            return codec.encode(examples, labelled=False, cache=False)
        finally:
            self.cutting.release()

    def _queued(self, request: Request, hold: Hold) -> Future[Any]:
        """Into the queue, at the places that are held for it."""
        rows = request.rows()
        self._check_rows(len(rows))
        with self.changed:
            self.check_open()
            if self.rows - hold.rows + len(rows) > self.limits.rows:
                raise self._full(len(rows))
            self.rows += len(rows) - hold.rows
            hold.rows = 0
            request.future.add_done_callback(lambda _: self._left(request, len(rows)))
            self.batcher.add(request.client, rows)
            self.changed.notify_all()
        return request.future

    def _check_rows(self, rows: int) -> None:
        if rows > self.limits.rows:
            raise TooLarge(
                f"the inputs are {rows:,} rows for the host (choices and windows of long contexts are rows too), "
                f"and this server takes {self.limits.rows:,} at once."
            )

    def _left(self, request: Request, rows: int) -> None:
        """A request has its answer, or nobody wants one any more."""
        with self.changed:
            self.rows -= rows
            self.changed.notify_all()
        self.shelf.release(request.model)
        error = CancelledError() if request.future.cancelled() else request.future.exception()
        self.observer.answered(request, error)

    def _wait(self, future: Future[T]) -> T:
        """The answer. The model thread notices a deadline when it gets to the rows; this waits no longer."""
        try:
            return future.result(self.limits.deadline + 1)
        except Late:
            future.cancel()
            raise DeadlineExceeded("the answer did not come before the deadline.") from None

    # models

    @property
    def models(self) -> dict[str, Model]:
        """The models by name."""
        return dict(self.shelf.models)

    def load(self, path: str | Path, name: str | None = None) -> str:
        """Load a run or inlay under its own or another name; it takes the place of one of that name. Returns the name.

        It is verified whole before anything changes, and comes between two batches.
        """
        return self.put(piece_at(Path(path), name))

    def put(self, piece: Piece) -> str:
        """Load what was found on disk."""
        for folder in (*piece.members, *(() if piece.inlay is None else (piece.inlay,))):
            with reading(folder) as there:
                verified(there)  # here, so that a damaged file costs the model thread nothing
        self.between_batches(lambda: self.shelf.put(piece))
        return piece.name

    def unload(self, name: str) -> None:
        """Take a model off. Requests that it has taken are answered first."""
        self.shelf.loaded(name)
        self.between_batches(lambda: self.shelf.drop(name))

    def refresh(self) -> list[str]:
        """Load what has changed on disk since; what cannot be loaded stays as it is. Returns the names."""
        done = []
        for model in self.models.values():
            mark = model.piece.mark
            if mark in ((), model.piece_mark):
                continue
            try:
                self.put(model.piece.again())
                done.append(model.name)
            except (InlayError, OSError) as error:
                model.piece_mark = mark  # tried; it is tried again when it changes again
                LOG.warning("not reloaded", extra={"model": model.name, "reason": str(error)})
        return done

    def between_batches(self, work: Callable[[], T]) -> T:
        """Run something in the model thread, between two batches."""
        if threading.current_thread() is self.thread:
            return work()
        future: Future[T] = Future()
        with self.changed:
            if self.stopping or not self.thread.is_alive():
                raise Unavailable("the engine is closed.")
            self.jobs.append((work, future))
            self.changed.notify_all()
        return future.result()

    # the model thread

    def healthy(self) -> bool:
        """Whether the model thread gave a sign of life lately."""
        return self.thread.is_alive() and self.since_beat() < self.limits.heartbeat

    def since_beat(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.beat

    def close(self, drain: float | None = None) -> None:
        """Accept nothing more, finish what was accepted within `drain` seconds, and stop."""
        self.draining = True
        until = time.monotonic() + (self.limits.drain if drain is None else drain)
        with self.changed:
            while (self.rows or self.jobs) and time.monotonic() < until and self.thread.is_alive():
                self.changed.wait(0.05)
            self.stopping = True
            late = [row.request for row in self.batcher]
            self.changed.notify_all()
        for request in late:
            request.fail(Unavailable("the server went down before this request had its turn."))
        self.thread.join(5)
        for _, future in self.jobs:
            future.cancel()

    def _work(self) -> None:
        use_threads(self.threads)
        job_last = False
        while True:
            with self.changed:
                job, batch = self._next(job_last)
            if job is None and not batch:
                return
            job_last = job is not None
            if job is not None:
                _run_job(*job)
            else:
                self._run(batch)
                batch.clear()
                self.shelf.sweep()  # a model whose last row this was goes now, however many others still ask

    def _next(self, job_last: bool) -> tuple[tuple[Callable[[], Any], Future[Any]] | None, list[Row]]:
        """What to do next: a batch and a job in turn where both wait; nothing at all once the engine stops."""
        while not self.stopping:
            now = self.beat = time.monotonic()
            ready = self.batcher.ready_at()
            due = ready is not None and ready <= now
            if self.jobs and not (job_last and due):
                return self.jobs.popleft(), []
            if due:
                batch = self.batcher.take()
                if batch:
                    return None, batch
                continue
            self.shelf.sweep()
            self.changed.wait(BEAT if ready is None else min(BEAT, ready - now))
        return None, []

    def _run(self, batch: list[Row]) -> None:
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                self._forward(batch)
        except ServeError as error:  # what was asked has no meaning
            for row in batch:
                row.request.fail(error)
        except BaseException:
            LOG.exception("a batch failed", extra={"rows": len(batch)})
            for row in batch:
                row.request.fail(ServeError("the host failed on this batch."))
        seconds = time.perf_counter() - begun
        self.speed += 0.2 * (len(batch) / max(seconds, 1e-6) - self.speed)
        self.observer.batch(batch, seconds)

    def _forward(self, batch: list[Row]) -> None:
        request = batch[0].request
        if request.looks_inside:
            look_inside(self.shelf, batch, self.padded(batch))
            for row in batch:
                self._done(row.request)
        elif request.writes:
            self._complete(batch)
        elif request.model.codec.form == "labels":
            self._classify(batch)
        else:
            self._ask(batch)

    def _classify(self, batch: list[Row]) -> None:
        """One forward, whatever models its rows are for."""
        plan, batch = self.plan_for(batch)
        host, inputs = self.shelf.host, self.padded(batch)
        inlays_of(host).switch(host, plan)
        logits: Tensor = host(**inputs).logits.cpu()
        for row, own in zip(batch, logits, strict=True):
            codec, features = row.request.model.codec, row.request.split.features
            if own.dim() == 2:  # the batch has logits for every token: of a text they are the same at all of them
                own = own[features.real(row.length, len(own))] if codec.per_token else own[0]
            row.request.found[row.at] = own[..., : codec.outputs]
            self._done(row.request)

    def plan_for(self, batch: Sequence[Row]) -> tuple[Plan, list[Row]]:
        """One plan for all rows. Those of one model lie side by side, so that nothing is copied; so do like models."""
        batch = sorted(batch, key=lambda row: (row.request.model.likeness, id(row.plan)))
        alike = {id(row.plan): row.request.model.likeness for row in batch}
        return self.shelf.joiner.joined([row.plan for row in batch], likeness=alike), batch

    def padded(self, batch: Sequence[Row]) -> dict[str, Tensor]:
        """What the host reads."""
        features, device = batch[0].request.split.features, self.shelf.host.device
        lengths = [row.length for row in batch]
        at, many = torch.arange(max(lengths)), torch.tensor(lengths).unsqueeze(1)
        real = at >= len(at) - many if features.left else at < many
        found = {
            name: torch.full(real.shape, features.pads.get(name, 0)).masked_scatter_(
                real, torch.cat([row.columns[name] for row in batch]).long()
            )
            for name in batch[0].columns
        }
        return on_device(found | {"attention_mask": real.long()}, device)

    def _ask(self, batch: list[Row]) -> None:
        """Rows of one model whose host answers in words: a text that it writes, or what it says at a mask."""
        model, host = batch[0].request.model, self.shelf.host
        codec = replace(model.codec, tokenizer=self.shelf.tokenizer)
        split = codec.encode([row.request.split.examples[row.at] for row in batch], labelled=False, cache=False)
        inlays_of(host).switch(host, model.plan)
        answers = ask(host, codec, split, on_step=lambda: self._go_on(batch))
        for row, answer in zip(batch, answers, strict=True):
            row.request.written[row.at] = answer
            self._done(row.request)

    def _complete(self, batch: list[Row]) -> None:
        """Go on with prompts of one request."""
        request, host, rows = batch[0].request, self.shelf.host, [row.at for row in batch]
        single = len(request.split.examples) == 1 and request.codec.generation.beams == 1
        inlays_of(host).switch(host, request.model.plan)
        made = write_rows(
            host, request.codec, request.split, rows,
            on_text=request.on_text if single else None, on_step=lambda: self._go_on(batch),
        )  # fmt: skip
        for at, text in zip(rows, made, strict=True):
            request.texts[at] = text
            self._done(request)

    def _go_on(self, batch: Sequence[Row]) -> None:
        """Called after each token: gives a sign of life, and stops writing when nobody waits for any of the rows."""
        self.beat = time.monotonic()
        wanted = [row.wanted for row in batch]  # all are asked: one that is too late is told so now
        if not any(wanted):
            raise Gone("nobody waits for this text any more.")

    def _done(self, request: Request) -> None:
        request.left -= 1
        if request.left == 0 and not request.future.done():
            request.finish(explained(request) if request.looks_inside else request.result())


def _inputs(inputs: Sequence[Any]) -> Read:
    """How the inputs of /v1/classify are read."""
    if not inputs:
        raise Invalid("inputs is empty: give at least one.")

    def read(served: Model) -> tuple[Codec, list[Example]]:
        return served.codec, read_inputs(served.codec.task, inputs, prompted=served.codec.form == "text")

    return read


def _run_job(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
