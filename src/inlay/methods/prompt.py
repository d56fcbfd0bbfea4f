"""Prompt tuning: learned tokens in front of the text (Lester et al. 2021).

    [p_1 … p_P; e(x_1) … e(x_T)]          p (P, D) in the space of the host's token embeddings

Encoders see the longer text, and what they give is cut back to the real tokens; in an encoder-decoder the decoder
attends to the prompt as well. A causal decoder is run on the prompt alone, once per step, and its keys and values stand
in front: the same as the longer text, and nothing of it enters the cache. Real tokens stand P positions later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import AnatomyError, ConfigError
from inlay.methods.acting import Reads
from inlay.methods.base import Method, register
from inlay.methods.prefix import Table


class Tokens(nn.Module):
    """P embedded tokens, (rows, P, D)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = Table(length, width)
        self.length = length
        nn.init.uniform_(self.table.weight, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@register("prompt")
class Prompt(Method):
    """Learned tokens in front of the text."""

    rate: ClassVar[float] = 3e-2
    epochs: ClassVar[int] = 20
    mixes: ClassVar[tuple[str, ...]] = ("table",)

    length: int = Field(default=100, ge=1)
    """P, the tokens in front."""
    init: Literal["uniform", "vocabulary", "text"] = "uniform"
    """Where they begin: U(-0.5, 0.5), the first P tokens of the vocabulary, or the tokens of a text."""
    text: str = ""
    """That text; without init it means init="text". A shorter one than the prompt is repeated."""
    ids: tuple[int, ...] = ()
    """The tokens of that text, as the host's tokenizer numbers them; found where there is a tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _a_text_is_to_begin_with(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "init" not in fields and (fields.get("text") or fields.get("ids")):
            return {**fields, "init": "text"}
        return fields

    @model_validator(mode="after")
    def _a_text_that_fits(self) -> Prompt:
        if (self.init == "text") != bool(self.ids or self.text):
            raise ValueError("init='text' needs the text to begin with, as text or as the ids of its tokens")
        if len(self.ids) > self.length:
            raise ValueError(f"the text has {len(self.ids)} tokens, which is more than the prompt's {self.length}")
        return self

    def in_tokens(self, tokenizer: Any) -> Prompt:
        if not self.text or self.ids:
            return self
        if tokenizer is None:
            raise ConfigError(
                "the text to begin with has to be cut into tokens: inlay.add(…, tokenizer=tokenizer), or ids=…"
            )
        ids = tuple(tokenizer(self.text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise ConfigError(f"the tokenizer finds no tokens in the text {self.text!r}")
        return type(self)(**{**dict(self), "ids": ids})

    def usual_rate(self, text: bool = False) -> float:
        return self.rate if self.init == "uniform" else 3e-1

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        if anatomy.positions is not None and self.length >= anatomy.positions:
            raise ConfigError(
                f"a prompt of {self.length} leaves none of the host's {anatomy.positions} positions to the text"
            )
        if anatomy.causal:
            anatomy.attention_places("self_attention")  # or the reason why not
            if not anatomy.told_positions:
                raise AnatomyError(
                    "a prompt moves the tokens of a text, but this host is not told where they stand. Use a Prefix, "
                    "which leaves them there."
                )
        return anatomy.of_kind("tokens")

    def reads_at(self, place: Place) -> Reads:
        return "output"

    def moves(self, anatomy: Anatomy) -> int:
        return self.length if anatomy.causal else 0

    def build(self, place: Place, shared: nn.Module) -> Tokens:
        return Tokens(self.length, place.d_out)

    def start(self, part: nn.Module, module: nn.Module) -> None:
        vocabulary: Tensor = module.weight  # type: ignore[assignment]
        if self.init == "uniform" or vocabulary.is_meta or (self.text and not self.ids):  # the last: only counted
            return
        ids = list(range(self.length)) if self.init == "vocabulary" else list(self.ids)
        if max(ids) >= vocabulary.shape[0] or min(ids) < 0:
            raise ConfigError(
                f"the host's vocabulary has {vocabulary.shape[0]} tokens, so none has the number {max(ids)}"
            )
        chosen = torch.tensor((ids * self.length)[: self.length])
        for tokens in (m for m in part.modules() if isinstance(m, Table)):
            if not tokens.weight.is_meta:
                tokens.weight.data.copy_(vocabulary.detach()[chosen.to(vocabulary.device)])

    def closed_form(self, places: Sequence[Place]) -> str | None:
        width = places[0].d_out
        return f"P·d = {self.length * width:,}   (P={self.length}, d={width})"
