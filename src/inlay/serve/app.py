"""The server as an ASGI application: every route, and what it answers when it cannot.

app = build_app(Engine.open(["runs/rte"]))        uvicorn, hypercorn or Ray Serve run it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import inlay
from inlay.data.rows import check_text
from inlay.errors import InlayError
from inlay.serve import forms
from inlay.serve.completions import Completing
from inlay.serve.engine import Engine, Hold
from inlay.serve.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    Gone,
    Invalid,
    MethodNotAllowed,
    NotFound,
    ServeError,
    TooLarge,
    Unavailable,
    as_answer,
)
from inlay.serve.gate import Gate, extra
from inlay.serve.keys import Keys
from inlay.serve.logs import LOG
from inlay.serve.metrics import Metrics
from inlay.serve.pieces import Piece, piece_at
from inlay.serve.roots import below, inside
from inlay.serve.shelf import Model
from inlay.training.recipe import Generation

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
BAD = {
    400: "The request cannot be read", 401: "A key is needed", 403: "The key does not allow this",
    404: "There is no such model", 413: "Larger than this server ever takes", 422: "The request does not fit",
    429: "The queue is full; Retry-After says when to ask again", 503: "The server is going down",
    504: "The answer did not come before the deadline",
}  # fmt: skip
Timeout = Annotated[
    float | None, Header(alias="X-Request-Timeout", gt=0, le=86400, description="Seconds to wait for the answer")
]


def responses(ok: Any, *statuses: int, also: dict[int, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """What a route may answer."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": ok, "description": "Done"}} if ok is not None else {}
    found |= {status: {"model": model, "description": "Done"} for status, model in (also or {}).items()}
    every = {400, 401, 403, 413, 422, 504, *statuses}
    return found | {status: {"model": forms.Failure, "description": BAD[status]} for status in sorted(every)}


def build_app(
    engine: Engine, *, keys: Keys | None = None, root: Path | None = None, cors: Sequence[str] = (),
    hosts: Sequence[str] | None = None, page: bool = True, among: Alone | None = None,
) -> FastAPI:  # fmt: skip
    """The application over an engine.

    keys:  who may ask; none: everybody.
    root:  the folder below which models may be loaded by request; none: they cannot.
    cors:  origins whose pages may ask; none: only the server's own page.
    hosts: names under which the server may be asked; None: any.
    among: what other servers of the same models have to be told; None: there are none.
    """
    keys, among = keys or Keys(), among or Alone(engine)
    app = FastAPI(
        title="Inlay", version=inlay.__version__, docs_url=None, redoc_url=None,
        summary="One host, every inlay and fusion.", separate_input_output_schemas=False,
    )  # fmt: skip
    metrics = Metrics(engine)
    app.add_middleware(Gate, keys=keys, engine=engine, metrics=metrics, hosts=hosts, names=among.names_requests)
    if cors:  # outside the gate: a browser asks first without a key, and pages have to see refusals too
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-ID"],
        )  # fmt: skip
    app.state.engine, app.state.metrics = engine, metrics
    _handle_errors(app)
    _add_models(app, engine)
    ask = Asking(engine)
    _add_asking(app, ask)
    _add_completions(app, ask)
    _add_loading(app, engine, keys, root, among)
    _add_state(app, engine, metrics, among)
    if page:
        _add_page(app)
    return app


class Alone:
    """One server by itself: what changes here changes nowhere else."""

    names_requests = True
    """Whether answers have to say a request's id: nobody in front of the server does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def load(self, piece: Piece) -> None:
        self.engine.put(piece)

    def delete(self, name: str) -> None:
        self.engine.unload(name)

    def metrics(self, own: bytes) -> bytes:
        return own


class Asking:
    """Takes requests to the engine and waits for it, without keeping the event loop from others."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cutters = ThreadPoolExecutor(2, "inlay-cut")

    async def __call__(self, request: Request, rows: int, enter: Callable[..., Future[Any]], wait: float | None) -> Any:
        until = self.engine.limits.until(wait)
        return await _waited(request, await self.entered(request, rows, enter, until), until)

    async def entered(
        self, request: Request, rows: int, enter: Callable[..., Future[Any]], until: float
    ) -> Future[Any]:
        """In the queue; a full one says so at once, before anything is done for the request."""
        client = request.state.client
        with self.engine.room_for(rows) as hold:
            request.state.entered()
            return await asyncio.get_running_loop().run_in_executor(
                self.cutters, lambda: enter(hold, client=client, timeout=max(0.001, until - time.monotonic()))
            )


async def _waited(request: Request, future: Future[Any], until: float) -> Any:
    """The answer, unless the client goes or the time is up: then its rows are dropped."""
    answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(_gone(request))
    try:
        done, _ = await asyncio.wait({answer, gone}, timeout=until - time.monotonic(), return_when="FIRST_COMPLETED")
        if answer in done:
            return answer.result()
        raise (
            Gone("the client has gone.")
            if gone in done
            else DeadlineExceeded("the answer did not come before the deadline. Ask for less, or later.")
        )
    finally:
        gone.cancel()
        future.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# routes


def _add_asking(app: FastAPI, ask: Asking) -> None:
    engine = ask.engine

    @app.post(
        "/v1/classify", responses=responses(forms.Classified, 404, 429, 503), response_model=None, tags=["answers"]
    )
    async def classify(request: Request, body: forms.ClassifyForm, timeout: Timeout = None) -> Response:
        """What a model says about inputs: labels with scores, numbers, tags or spans, by the kind of its task."""
        model, rows = body.model, len(body.inputs)
        request.state.facts = {"model": _known(engine, model), "rows": rows}
        kind = engine.shelf[model].codec.task.kind

        def enter(hold: Hold, **how: Any) -> Future[Any]:
            return engine.enter(hold, model, [_plain(given) for given in body.inputs], **how)

        results = await ask(request, rows, enter, timeout)
        return JSONResponse({"model": model, "kind": kind, "results": results})

    @app.post(
        "/predict", response_model=None, tags=["answers"],
        responses=responses(list[forms.Labelled] | list[list[forms.Labelled]], 404, 429, 503),
    )  # fmt: skip
    async def predict(request: Request, body: forms.PredictForm, timeout: Timeout = None) -> Response:
        """The same in the form of text-embeddings-inference: a list of labels with scores, or one per text."""
        model, (single, inputs) = _only(engine, body.model), _tei(body.inputs)
        request.state.facts = {"model": _known(engine, model), "rows": len(inputs)}
        if engine.shelf[model].codec.task.kind not in ("classification", "multilabel"):
            raise Invalid(f"{model!r} gives no labels for a text; ask /v1/classify.", urls=["/v1/classify"])
        results = await ask(request, len(inputs), lambda hold, **how: engine.enter(hold, model, inputs, **how), timeout)
        return JSONResponse(results[0] if single else results)

    @app.post("/v1/explain", responses=responses(forms.Explained, 404, 429, 503), response_model=None, tags=["answers"])
    async def explain(request: Request, body: forms.ExplainForm, timeout: Timeout = None) -> Response:
        """How a fusion weighs its members, by text, place, token and member; its answer with some off or pinned."""
        request.state.facts = {"model": _known(engine, body.model), "rows": 1}

        def enter(hold: Hold, **how: Any) -> Future[Any]:
            return engine.enter_explain(hold, body.model, _plain(body.input), off=body.off, pin=body.pin, **how)

        return JSONResponse(await ask(request, 1, enter, timeout))


def _add_completions(app: FastAPI, ask: Asking) -> None:
    engine = ask.engine
    events: dict[int | str, dict[str, Any]] = {
        200: {"model": forms.Completion, "content": {"text/event-stream": {}}, "description": "Done"}
    }

    @app.post(
        "/v1/completions", responses=responses(None, 404, 429, 503) | events, response_model=None, tags=["answers"]
    )
    async def completions(request: Request, body: forms.CompletionForm, timeout: Timeout = None) -> Response:
        """Go on with prompts, where the host writes text."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        request.state.facts = {"model": _known(engine, body.model), "rows": len(prompts)}
        if not prompts or not all(prompt.strip() for prompt in prompts):
            raise Invalid("prompt is empty: give a text, or a list of texts.")
        if body.max_tokens > engine.limits.new_tokens:
            raise Invalid(f"max_tokens is {body.max_tokens:,}; this server writes up to {engine.limits.new_tokens:,}.")
        if body.stream and len(prompts) > 1:
            raise Invalid("one prompt at a time can be streamed; give one, or leave stream out.")
        check_text(prompts, "prompt")
        how = Generation(
            max_new_tokens=body.max_tokens, sampling=body.temperature, top_p=body.top_p, sampling_seed=body.seed
        )
        made = Completing(body.model)

        def enter(hold: Hold, on_text: Callable[[str], None] | None = None, **more: Any) -> Future[Any]:
            return engine.enter_completion(hold, body.model, prompts, how, on_text=on_text, **more)

        if not body.stream:
            return JSONResponse(made.whole(await ask(request, len(prompts), enter, timeout)))
        pieces: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        until = engine.limits.until(timeout)

        def on_text(piece: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        future = await ask.entered(request, 1, partial(enter, on_text=on_text), until)
        return StreamingResponse(made.stream(pieces, future), media_type="text/event-stream")


def _add_models(app: FastAPI, engine: Engine) -> None:
    @app.get("/v1/models", responses=responses(forms.ModelList), response_model=None, tags=["models"])
    async def models() -> Response:
        """Every model, and the host as their parent."""
        return JSONResponse({"object": "list", "data": [_host(engine), *map(_entry(engine), engine.models.values())]})

    @app.get("/v1/models/{name}", responses=responses(forms.ModelEntry, 404), response_model=None, tags=["models"])
    async def model(name: str) -> Response:
        """One model."""
        return JSONResponse(_entry(engine)(engine.shelf[name]))


def _add_loading(app: FastAPI, engine: Engine, keys: Keys, root: Path | None, among: Alone) -> None:
    def allowed(request: Request) -> Path:
        if not keys.admins:
            raise Forbidden("this server was started without an admin key, so nothing is loaded or deleted by request.")
        if request.state.role != "admin":
            raise Forbidden("loading and deleting need an admin key.")
        if root is None:
            raise Forbidden("this server was started without --root, so nothing is loaded or deleted by request.")
        return root

    @app.put(
        "/v1/inlays/{name}", response_model=None, tags=["models"],
        responses=responses(forms.ModelEntry, 404, 503, also={201: forms.ModelEntry}),
    )  # fmt: skip
    async def load(request: Request, name: str, body: forms.LoadForm) -> Response:
        """Load a folder below the server's root under a name; it takes the place of a model of that name."""
        here = allowed(request)

        def work() -> None:
            folder = below(here, body.path)
            among.load(piece_at(folder, name, inside(here)))

        new = name not in engine.models
        engine.check_open()
        await asyncio.to_thread(work)
        LOG.info("loaded", extra={"id": request.state.id, "model": name, "replaced": not new})
        return JSONResponse(_entry(engine)(engine.shelf[name]), status_code=201 if new else 200)

    @app.delete("/v1/inlays/{name}", responses=responses(forms.Deleted, 404, 503), response_model=None, tags=["models"])
    async def delete(request: Request, name: str) -> Response:
        """Take a model off; requests that it has taken are answered first."""
        allowed(request)
        engine.check_open()
        await asyncio.to_thread(among.delete, name)
        LOG.info("deleted", extra={"id": request.state.id, "model": name})
        return JSONResponse({"id": name, "deleted": True})


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics, among: Alone) -> None:
    def state(good: bool, word: str) -> Response:
        facts = {
            "heartbeat_age": round(engine.since_beat(), 3),
            "queue_rows": engine.rows,
            "models": len(engine.models),
        }
        return JSONResponse({"status": "ok" if good else word} | facts, status_code=200 if good else 503)

    described = responses(forms.State, also={503: forms.State})

    @app.get("/health", responses=described, response_model=None, tags=["state"])
    async def health() -> Response:
        """Whether the model thread answers."""
        return state(engine.healthy(), "the model thread does not answer")

    @app.get("/ready", responses=described, response_model=None, tags=["state"])
    async def ready() -> Response:
        """Whether requests are taken."""
        return state(engine.healthy() and not engine.draining, "going down")

    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "For Prometheus"}
    }

    @app.get("/metrics", responses=responses(None) | text, response_class=Response, tags=["state"])
    async def scrape() -> Response:
        """What Prometheus reads."""
        text = await asyncio.to_thread(lambda: among.metrics(metrics.text()))
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    files = {file.name: file for file in PAGE.iterdir() if file.suffix in TYPES} if PAGE.is_dir() else {}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file(files.get("index.html"))

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(files.get(name))


def _file(file: Path | None) -> Response:
    """One of the page's files: a name that was not there at the start finds nothing."""
    if file is None:
        raise NotFound("there is no such file.")
    return FileResponse(file, media_type=TYPES[file.suffix], headers={"cache-control": "no-cache"})


# pieces of answers


def _plain(given: forms.Input) -> str | dict[str, Any]:
    """One input as `inlay.serve.inputs` reads it."""
    return given if isinstance(given, str) else given.model_dump(exclude_none=True)


def _known(engine: Engine, model: str) -> str:
    """A model's name for the log: what is none is not repeated there."""
    return model if model in engine.shelf.names else "unknown"


def _only(engine: Engine, model: str | None) -> str:
    if model is not None:
        return model
    names = list(engine.models)
    if len(names) != 1:
        raise Invalid(f"this server has {len(names)} models; name one of them: {', '.join(names[:20])}.")
    return names[0]


def _tei(inputs: str | list[Any]) -> tuple[bool, list[Any]]:
    """Whether it is a single input, and the inputs as /v1/classify has them."""
    single = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], str))
    rows = [[inputs] if isinstance(inputs, str) else inputs] if single else inputs
    wrong = [row for row in rows if len(row) not in (1, 2)]
    if wrong or not rows:
        raise Invalid("an input is a text, or a list with one text or the two of a pair; several are a list of lists.")
    return single, [row[0] if len(row) == 1 else {"text": row[0], "pair": row[1]} for row in rows]


def _entry(engine: Engine) -> Callable[[Model], dict[str, Any]]:
    def entry(model: Model) -> dict[str, Any]:
        host = engine.shelf.host_name
        return {
            "id": model.name, "object": "model", "created": int(model.created), "owned_by": "inlay",
            "root": model.name, "parent": host, "inlay": model.facts(),
        }  # fmt: skip

    return entry


def _host(engine: Engine) -> dict[str, Any]:
    name = engine.shelf.host_name
    return {
        "id": name, "object": "model", "created": int(engine.opened), "owned_by": "inlay", "root": name,
        "parent": None, "inlay": None,
    }  # fmt: skip


# errors


def _handle_errors(app: FastAPI) -> None:
    def answer(error: ServeError) -> Response:
        headers = {name.decode(): value.decode() for name, value in extra(error)}
        return JSONResponse(as_answer(error), status_code=error.status, headers=headers)

    @app.exception_handler(InlayError)
    async def ours(request: Request, error: InlayError) -> Response:
        return answer(error if isinstance(error, ServeError) else Invalid(str(error)))

    @app.exception_handler(OSError)
    async def files(request: Request, error: OSError) -> Response:
        return answer(Invalid(f"a file cannot be read: {error.strerror}"))

    @app.exception_handler(RequestValidationError)
    async def form(request: Request, error: RequestValidationError) -> Response:
        problems = error.errors()
        if any(problem["type"] == "json_invalid" for problem in problems):
            return answer(BadRequest(f"the body is no JSON: {problems[0].get('ctx', {}).get('error', '')}"))
        lines = [f"{'.'.join(map(str, problem['loc'][:6]))}: {problem['msg']}" for problem in problems[:20]]
        kind = TooLarge if all(problem["type"] == "too_long" for problem in problems) else Invalid
        return answer(kind("\n".join(dict.fromkeys(lines))))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ServeError):  # while the body was read
            return answer(error.__cause__)
        kinds = {400: BadRequest, 404: NotFound, 405: MethodNotAllowed, 413: TooLarge, 503: Unavailable}
        kind = kinds.get(error.status_code, BadRequest)
        path = request.url.path[:80]
        words = {404: f"no route {path!r}; /openapi.json lists them.", 405: f"{path!r} has no {request.method}."}
        said = words.get(error.status_code, str(error.detail))
        response = answer(kind(said, urls=[repr(path), "/openapi.json"]))
        response.headers.update(error.headers or {})
        return response
