"""Rank the answers that a host may give by their likelihood, instead of letting it write one.

All candidates of a row stand one after the other in one pass of the decoder, each behind a start token of its own, and
a mask keeps them apart. T5 knows only distances between tokens, so each sees exactly what it would see alone:

    start a₁ a₂ </s> | start b₁ </s>        the encoder and its keys and values are needed once per row

The answer is the one that greedy generation would have written, where that is a candidate: each of its tokens is then
the likeliest of all words. Otherwise it is the candidate with the highest likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.training.codec import Answer, Codec

BY_DISTANCE = ("t5", "mt5", "umt5")
"""Families whose decoder knows distances only and takes a mask of any form; others run one pass per candidate."""


def ranked(
    host: PreTrainedModel, codec: Codec, batch: dict[str, Tensor], candidates: Sequence[Sequence[str]]
) -> list[Answer]:
    """Which of its candidates each row of a batch is answered with, and how likely each is beside the others."""
    known: dict[str, list[int]] = {}
    for text in {text for row in candidates for text in row}:
        known[text] = codec.tokenizer(text).input_ids
    tokens = [[known[text] for text in row] for row in candidates]
    together = host.config.model_type in BY_DISTANCE
    scores, written = (_together if together else _one_by_one)(host, batch, tokens)
    return [_answer(*row) for row in zip(scores, written, strict=True)]


def _answer(scores: list[float], written: list[bool]) -> Answer:
    shares = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    best = written.index(True) if any(written) else int(shares.argmax())
    return Answer(best, tuple(shares.tolist()))


Scored = tuple[list[list[float]], list[list[bool]]]
"""Per row and candidate: its log-likelihood, and whether greedy generation would write it."""


def _together(host: PreTrainedModel, batch: dict[str, Tensor], tokens: list[list[list[int]]]) -> Scored:
    """All candidates of a row in one pass."""
    start = _start(host)
    inputs = [[i for one in row for i in (start, *one[:-1])] for row in tokens]  # (B, S)
    targets = [[i for one in row for i in one] for row in tokens]
    owner = [[n for n, one in enumerate(row) for _ in one] for row in tokens]
    longest = max(map(len, targets))
    device = host.device
    given, wanted, whose = (
        torch.tensor([row + [fill] * (longest - len(row)) for row in rows], device=device)
        for rows, fill in ((inputs, 0), (targets, 0), (owner, -1))
    )
    seen = (whose.unsqueeze(2) == whose.unsqueeze(1)).tril()  # (B, S, S): the earlier tokens of the same candidate
    hidden = torch.finfo(host.dtype).min
    mask = torch.zeros(seen.shape, dtype=host.dtype, device=device).masked_fill(~seen, hidden).unsqueeze(1)
    logits = host(**batch, decoder_input_ids=given, decoder_attention_mask=mask, use_cache=False).logits
    likely, first = _of_tokens(logits, wanted)
    scores, written = [], []
    for row, one in enumerate(tokens):
        ends = torch.tensor([0, *map(len, one)]).cumsum(0).tolist()
        parts = list(pairwise(ends))
        scores.append([float(likely[row, a:b].sum()) for a, b in parts])
        written.append([bool(first[row, a:b].all()) for a, b in parts])
    return scores, written


def _one_by_one(host: PreTrainedModel, batch: dict[str, Tensor], tokens: list[list[list[int]]]) -> Scored:
    """A pass for the first candidate of every row, one for the second, and so on; the encoder runs once."""
    start, device = _start(host), host.device
    model: Any = host
    mask = batch.get("attention_mask")
    states = model.get_encoder()(**{name: t for name, t in batch.items() if name in ("input_ids", "attention_mask")})
    scores: list[list[float]] = [[] for _ in tokens]
    written: list[list[bool]] = [[] for _ in tokens]
    for n in range(max(map(len, tokens))):
        own = [row[min(n, len(row) - 1)] for row in tokens]
        longest = max(map(len, own))
        wanted = torch.tensor([one + [0] * (longest - len(one)) for one in own], device=device)
        given = torch.cat([torch.full_like(wanted[:, :1], start), wanted[:, :-1]], 1)
        logits = model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=given, use_cache=False).logits
        likely, first = _of_tokens(logits, wanted)
        for row, one in enumerate(tokens):
            if n < len(one):
                scores[row].append(float(likely[row, : len(own[row])].sum()))
                written[row].append(bool(first[row, : len(own[row])].all()))
    return scores, written


def _start(host: PreTrainedModel) -> int:
    found = host.generation_config.decoder_start_token_id if host.generation_config is not None else None
    return int(found if found is not None else host.config.decoder_start_token_id or 0)


def _of_tokens(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, V) and (B, S): each wanted token's log-likelihood, and whether it is the likeliest of all."""
    logits = logits.float()
    own = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    return (own - logits.logsumexp(-1)).cpu(), (logits.argmax(-1) == wanted).cpu()
