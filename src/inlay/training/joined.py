"""What decoders read: a prompt and its answer as one sequence, of which only the answer's tokens count.

    tokens     p p p p a a a </s>            both are cut into tokens apart, so that the border is exact,
    labels     · · · · a a a </s>            and the prompt the same when the host is asked

In training rows are padded on the right; the logits before the first answer of a batch are never computed. To be asked,
prompts are padded on the left, whatever the tokenizer does otherwise.

Packing puts several short rows of a batch into one sequence. Positions begin anew with each row, none sees another:

    tokens     p p a </s> p p p a </s>       mask    x
    positions  0 1 2 3    0 1 2 3 4                  x x
    (two rows in one sequence)                       … and nothing of the first row in the second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inlay.errors import ConfigError, first_line
from inlay.host.verbs import evaluating
from inlay.training.tokens import IGNORED, Features, Tokens, cache_key, cached_tensors, flat, on_device

AT_MOST = 5
"""Rows without room for an answer that are named."""


@dataclass(frozen=True)
class JoinedFeatures(Features):
    """Prompts with their answers, one sequence for each row; `targets` has the labels of the same tokens."""

    prompts: Tensor = field(default_factory=lambda: torch.empty(0))
    """How many tokens of each row are its prompt."""
    room: int = 0
    """Tokens of a sequence that short rows share; 0: each row has a sequence of its own."""

    def asked(self) -> Features:
        """The prompts alone, padded on the left."""
        lengths, inputs = self.prompts, self.inputs
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        at = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)
        at += inputs.starts[:-1].repeat_interleave(lengths)
        columns = {name: column[at] for name, column in inputs.columns.items()}
        return Features(Tokens(columns, starts), self.owns, None, self.pads, left=True, cached=self.cached)

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Inputs (B, T) and `labels` (B, W): those of the last W tokens, each predicted one token earlier."""
        assert isinstance(self.targets, Tokens), "rows without answers are collated by `asked`"
        if self.room:
            return self._packed(rows)
        which = torch.tensor(rows)
        made = self.inputs.padded(which, self.pads)
        made["attention_mask"] = made.pop("mask")
        first = int(self.prompts[which].min())  # the first token that any row has to predict
        return made | {"labels": self._labels(rows, which)["labels"][:, first:]}

    def _labels(self, rows: Sequence[int], which: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.targets, Tokens)
        wanted = self.targets.padded(which, {})
        return {"labels": wanted["input_ids"].masked_fill(wanted["mask"] == 0, IGNORED)}

    def weights(self, rows: Sequence[int]) -> int:
        which = torch.tensor(rows)
        return int((self.inputs.lengths[which] - self.prompts[which]).sum())

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer, its end included."""
        return int((self.inputs.lengths - self.prompts).max())

    def _packed(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The same rows in fewer sequences: the longest first, each where it still fits."""
        assert isinstance(self.targets, Tokens)
        lengths = self.inputs.lengths
        order = sorted(rows, key=lambda row: -int(lengths[row]))
        bins: list[list[int]] = []
        room: list[int] = []
        for row in order:
            need = int(lengths[row])
            at = next((i for i, left in enumerate(room) if left >= need), None)
            if at is None:
                bins.append([])
                room.append(self.room)
                at = len(bins) - 1
            bins[at].append(row)
            room[at] -= need
        shape = (len(bins), self.room - min(room))
        ids, labels = torch.full(shape, self.pads.get("input_ids", 0)), torch.full(shape, IGNORED)
        position, owner = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        for i, packed in enumerate(bins):
            at = 0
            for row in packed:
                here, there = slice(at, at + int(lengths[row])), slice(*self.inputs.starts[row : row + 2].tolist())
                ids[i, here] = self.inputs.columns["input_ids"][there].long()
                labels[i, here] = self.targets.columns["input_ids"][there].long()
                labels[i, at] = IGNORED  # the token before it is another row's
                position[i, here] = torch.arange(int(lengths[row]))
                owner[i, here] = row
                at += int(lengths[row])
        first = int(self.prompts[torch.tensor([packed[0] for packed in bins])].min())
        return {
            "input_ids": ids,
            "position_ids": position,
            "attention_mask": block_causal(owner),
            "labels": labels[:, first:],
        }


def block_causal(owner: Tensor) -> Tensor:
    """(B, 1, T, T), 0 where a token sees another and the lowest number elsewhere: only earlier ones of the same row.

    owner: (B, T), the row that each token belongs to, -1 for padding, which sees itself alone.
    """
    tokens = owner.shape[1]
    same = owner.unsqueeze(2) == owner.unsqueeze(1)
    alone = torch.eye(tokens, dtype=torch.bool)
    seen = (same & torch.ones(tokens, tokens, dtype=torch.bool).tril() & (owner >= 0).unsqueeze(2)) | alone
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).unsqueeze(1)


def joined_features(
    prompts: Sequence[str], answers: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase, max_length: int,
    *, packed: bool = False, cache: bool = True,
) -> JoinedFeatures:  # fmt: skip
    """Tokenise prompts and answers; an answer ends with the tokenizer's end of text. A row is cut at `max_length`."""
    how = f"joined {max_length} {tokenizer.eos_token_id}"
    key = cache_key(tokenizer, list(prompts), answers or [None] * len(prompts), how) if cache else None
    made, cached = cached_tensors(key, lambda: _cut(prompts, answers, tokenizer, max_length))
    lengths = made.pop("prompts")
    _check_room(prompts, made["starts"].diff(), lengths, made.pop("wanted"), max_length, answers is not None)
    labels = made.pop("labels", None)
    starts = made.pop("starts")
    owns = torch.arange(len(prompts) + 1)
    targets = Tokens({"input_ids": labels}, starts) if labels is not None else None
    pads = {"input_ids": int(tokenizer.pad_token_id or 0)}
    return JoinedFeatures(
        Tokens(made, starts), owns, targets, pads, left=False, cached=cached, kind="joined", prompts=lengths,
        room=max_length if packed else 0,
    )  # fmt: skip


def _cut(
    prompts: Sequence[str], answers: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Tensor]:
    """Tokens of whole rows, how many of them are the prompt, and how many tokens the uncut prompt has."""
    before = [
        _without_end(ids, tokenizer) for ids in tokenizer(list(prompts), return_attention_mask=False)["input_ids"]
    ]
    after: list[list[int]] = [[] for _ in prompts]
    if answers is not None:
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        cut = tokenizer(list(answers), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        after = [ids + end for ids in cut]
    whole = [(one + other)[:max_length] for one, other in zip(before, after, strict=True)]
    lengths = torch.tensor([min(len(one), max_length) for one in before])
    found = flat({"input_ids": whole}) | {"prompts": lengths, "wanted": torch.tensor([len(one) for one in before])}
    if answers is not None:
        at = torch.cat([torch.arange(len(ids)) for ids in whole])
        target = at >= lengths.repeat_interleave(found["starts"].diff())
        found["labels"] = torch.where(target, found["input_ids"], IGNORED).to(torch.int32)
    return found


def _without_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A prompt goes on: some tokenizers put an end of text after every text."""
    ends = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id is not None
    return ids[:-1] if ends and tokenizer("", return_attention_mask=False)["input_ids"][-1:] == ids[-1:] else ids


def _check_room(
    texts: Sequence[str], lengths: Tensor, prompts: Tensor, wanted: Tensor, max_length: int, labelled: bool
) -> None:
    """Every row needs a prompt, and room for an answer after it."""
    if (prompts == 0).any():
        raise ConfigError("the template has nothing before {target}: a decoder needs something to go on from.")
    none = ((lengths == prompts) if labelled else (wanted >= max_length)).nonzero().flatten().tolist()
    if none:
        named = ", ".join(f"row {row + 1} ({texts[row][:40]!r}…, {int(wanted[row])} tokens)" for row in none[:AT_MOST])
        more = f" and {len(none) - AT_MOST} more" if len(none) > AT_MOST else ""
        raise ConfigError(
            f"max_length is {max_length}, which leaves nothing of the answer after the text of {named}{more}. "
            f"Use a larger max_length, or leave such rows out."
        )


@torch.no_grad()
def check_packing(host: PreTrainedModel, features: JoinedFeatures) -> None:
    """Refuse packing where the host's own logits of two rows change when they share a sequence."""
    order = features.inputs.lengths.argsort(stable=True)[:2].tolist()
    rows = order if len(order) == 2 else order * 2
    wide = replace(features, room=0)
    window = getattr(host.config.get_text_config(), "sliding_window", None)
    told = f"{host.config.model_type} cannot pack rows"
    if window is not None and int(features.lengths.max()) > window:
        raise ConfigError(
            f"{told}: its layers see only the last {window} tokens, which a mask of rows does not express. {TO_DO}"
        )
    ids = torch.cat([features.inputs.columns["input_ids"][_span(features, row)].long() for row in rows])
    sizes = [int(features.inputs.lengths[row]) for row in rows]
    owner = torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)]).unsqueeze(0)
    position = torch.cat([torch.arange(size) for size in sizes]).unsqueeze(0)
    batch = {"input_ids": ids.unsqueeze(0), "position_ids": position, "attention_mask": block_causal(owner)}
    try:
        with evaluating(host):
            alone = [host(**_inputs(wide.collate([row]), host)).logits[0] for row in rows]
            both = host(**on_device(batch, host.device)).logits[0].split(sizes)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"{told}: its attention takes no mask of its own ({first_line(error)}). {TO_DO}") from None
    scale = max(float(one.abs().max()) for one in alone)
    off = max(float((one - other).abs().max()) for one, other in zip(alone, both, strict=True))
    if not off <= 1e-4 * max(scale, 1.0):
        raise ConfigError(f"{told}: a row's logits change by {off:.2g} beside another row. {TO_DO}")


TO_DO = "Leave packing out."


def _inputs(batch: dict[str, Tensor], host: PreTrainedModel) -> dict[str, Tensor]:
    return on_device({name: tensor for name, tensor in batch.items() if name != "labels"}, host.device)


def _span(features: JoinedFeatures, row: int) -> slice:
    return slice(*features.inputs.starts[row : row + 2].tolist())
