"""Rank the answers that a host may give by their likelihood, instead of letting it write one.

All candidates of a row are one tree in one pass of the decoder, in which a common beginning stands once:

    start ─┬─ a₁ ─┬─ a₂ ─ </s>         a node sees what is on its way from the start, and nothing else
           │      └─ a₃ ─ </s>         T5 knows only distances between tokens: each is told the one on its way,
           └─ b₁ ─ </s>                so every candidate has exactly the likelihood that it has alone

The answer is the one that greedy generation would have written, where that is a candidate: each of its tokens is then
the likeliest of all words. Otherwise it is the candidate with the highest likelihood.

Cost per row, with E for the encoder and the keys and values that the decoder makes of it once, d for one token in the
decoder with its logits:

    ranking       E + d · (nodes of the tree)     one pass, every weight is read once
    generation    E + d · (tokens written)        one pass per token

Two labels make a tree with more nodes than either has tokens. So ranking never computes less than generation that stops
right after a label. It is faster where a pass costs more than its arithmetic (few rows: reading the weights, the
overhead of a step), and where the host writes on beyond a label. `benchmarks/ranking.py` has both counts and times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.training.codec import Answer, Codec
from inlay.training.tokens import decoder_start

BY_DISTANCE = ("t5", "mt5")
"""Families whose decoder has one bias by distance for all its layers; others run one pass per candidate."""


def ranked(
    host: PreTrainedModel, codec: Codec, batch: dict[str, Tensor], candidates: Sequence[Sequence[str]]
) -> list[Answer]:
    """The candidate that answers each row of a batch, and how likely each candidate is compared with the others."""
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


@dataclass(frozen=True)
class Tree:
    """The beginnings of a row's candidates, each once: a node is the tokens read so far, the root the start alone."""

    inputs: list[int]
    """The last token of each node."""
    parents: list[int]
    """Node to the node before it; the root's is -1."""
    at: list[int]
    """For each token of each candidate: the node that predicts it."""
    wanted: list[int]
    """That token."""
    owner: list[int]
    """Its candidate."""


def tree_of(candidates: list[list[int]], start: int) -> Tree:
    """The tree of a list of candidates."""
    nodes: dict[tuple[int, ...], int] = {(): 0}
    tree = Tree([start], [-1], [], [], [])
    for n, tokens in enumerate(candidates):
        for k, token in enumerate(tokens):
            prefix = tuple(tokens[:k])
            if prefix not in nodes:
                nodes[prefix] = len(nodes)
                tree.inputs.append(prefix[-1])
                tree.parents.append(nodes[prefix[:-1]])
            tree.at.append(nodes[prefix])
            tree.wanted.append(token)
            tree.owner.append(n)
    return tree


def _together(host: PreTrainedModel, batch: dict[str, Tensor], tokens: list[list[list[int]]]) -> Scored:
    """All candidates of a row in one pass."""
    different = {str(row): row for row in tokens}  # rows have mostly the same candidates
    known = {key: tree_of(row, decoder_start(host)) for key, row in different.items()}
    trees = [known[str(row)] for row in tokens]
    size, longest = max(len(tree.inputs) for tree in trees), max(len(tree.at) for tree in trees)
    masks = {key: _mask(host, tree.parents, size) for key, tree in known.items()}
    given, at, wanted, owner = (
        torch.tensor([values + [fill] * (length - len(values)) for values in rows], device=host.device)
        for rows, length, fill in (
            ([tree.inputs for tree in trees], size, 0),
            ([tree.at for tree in trees], longest, 0),
            ([tree.wanted for tree in trees], longest, 0),
            ([tree.owner for tree in trees], longest, max(map(len, tokens))),  # padding is a candidate of its own
        )
    )
    mask = torch.stack([masks[str(row)] for row in tokens])  # (B, H, S, S)
    logits = host(**batch, decoder_input_ids=given, decoder_attention_mask=mask, use_cache=False).logits.float()
    rows = torch.arange(len(trees), device=host.device).unsqueeze(1)
    own = logits[rows, at, wanted]
    total, first = _overwritten(logits)
    likely, missed = (own - total[rows, at]).cpu(), (first[rows, at] != wanted).cpu()
    sums = likely.new_zeros(len(trees), max(map(len, tokens)) + 1)
    scores, misses = (sums.scatter_add(1, owner.cpu(), x).tolist() for x in (likely, missed.to(likely.dtype)))
    counts = [len(row) for row in tokens]
    return (
        [row[:count] for row, count in zip(scores, counts, strict=True)],
        [[not miss for miss in row[:count]] for row, count in zip(misses, counts, strict=True)],
    )


def _mask(host: PreTrainedModel, parents: list[int], size: int) -> Tensor:
    """(H, S, S) to add to the scores: a node sees its ancestors, each at its distance along the path to the root.

    The host itself adds a bias for the distance of two nodes in the sequence; what is added here corrects that.
    """
    model: Any = host
    attention = model.get_decoder().block[0].layer[0].SelfAttention
    bias = attention.compute_bias(size, size)[0].detach()  # (H, S, S): query, key
    by_distance = bias[:, :, 0]  # (H, S): from the first token
    mask = torch.full_like(bias, torch.finfo(bias.dtype).min)
    for node in range(size):
        seen, distance = node, 0
        while seen >= 0:
            mask[:, node, seen] = by_distance[:, distance] - bias[:, node, seen]
            seen, distance = (parents[seen] if seen < len(parents) else -1), distance + 1
    return mask


def _one_by_one(host: PreTrainedModel, batch: dict[str, Tensor], tokens: list[list[list[int]]]) -> Scored:
    """A pass for the first candidate of every row, one for the second, and so on; the encoder runs once."""
    start, device = decoder_start(host), host.device
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


def _of_tokens(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, V) and (B, S): each wanted token's log-likelihood, and whether it is the likeliest of all."""
    logits = logits.float()
    own = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    total, first = _overwritten(logits)
    return (own - total).cpu(), (first == wanted).cpu()


def _overwritten(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, V) to logsumexp and argmax, (B, S) each, in the logits' own memory: a copy of it costs more than both."""
    highest, first = logits.max(-1)
    return highest + logits.sub_(highest.unsqueeze(-1)).exp_().sum(-1).log(), first
