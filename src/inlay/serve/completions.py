"""The answers of /v1/completions, in OpenAI's form: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from inlay.serve.errors import ServeError, as_answer
from inlay.training.generation import WrittenText


class Completing:
    """The answers of /v1/completions, whole or in pieces."""

    def __init__(self, model: str) -> None:
        self.facts = {
            "id": f"cmpl-{secrets.token_hex(8)}", "object": "text_completion", "created": int(time.time()),
            "model": model,
        }  # fmt: skip

    def whole(self, texts: list[WrittenText]) -> dict[str, Any]:
        read, written = sum(one.read for one in texts), sum(one.tokens for one in texts)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return self.facts | {"choices": [_choice(i, one.text, one) for i, one in enumerate(texts)], "usage": usage}

    async def stream(self, pieces: asyncio.Queue[str], future: Future[Any]) -> AsyncIterator[str]:
        """Server-sent events. A client that goes away closes this, and its text is written no further."""
        answer = asyncio.ensure_future(asyncio.wrap_future(future))
        try:
            while not (answer.done() and pieces.empty()):
                piece = asyncio.ensure_future(pieces.get())
                await asyncio.wait({piece, answer}, return_when="FIRST_COMPLETED")
                if piece.done():
                    yield _event(self.facts | {"choices": [_choice(0, piece.result(), None)]})
                else:
                    piece.cancel()
            try:
                yield _event(self.facts | {"choices": [_choice(0, "", (await answer)[0])]})
            except ServeError as error:
                yield _event(as_answer(error))
            yield "data: [DONE]\n\n"
        finally:
            future.cancel()


def _choice(index: int, text: str, whole: WrittenText | None) -> dict[str, Any]:
    """A text, or a piece of one that is not whole yet."""
    reason = None if whole is None else "stop" if whole.ended else "length"
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
