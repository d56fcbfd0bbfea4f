"""Examples as tokens: tokenised once, kept flat in memory and cached on disk; a batch is padded to its own longest row.

ids     every sequence, one after the other     (all tokens,)
starts  where each sequence begins              (sequences + 1,)
owns    the first sequence of each example      (examples + 1,); more than one each only for `choice`
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inlay.data.examples import Example, Target
from inlay.storage.cache import cache_folder
from inlay.storage.files import write_whole

IGNORED = -100
"""Target tokens that no loss counts."""


@dataclass(frozen=True)
class Tokens:
    """Many sequences in flat tensors, one per kind of input."""

    columns: dict[str, Tensor]
    starts: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def padded(self, which: Tensor, pads: dict[str, int], left: bool = False) -> dict[str, Tensor]:
        """Some sequences as (sequences, longest) tensors, with `mask` 1 at real tokens."""
        begin, lengths = self.starts[which], self.lengths[which]
        longest = int(lengths.max())
        at = torch.arange(longest).expand(len(which), -1)
        if left:
            at = at - (longest - lengths).unsqueeze(1)
        real = (at >= 0) & (at < lengths.unsqueeze(1))
        flat = (begin.unsqueeze(1) + at).clamp(0, max(0, int(self.starts[-1]) - 1))
        found = {
            name: torch.where(real, column[flat].long(), pads.get(name, 0)) for name, column in self.columns.items()
        }
        return found | {"mask": real.long()}


@dataclass(frozen=True)
class Features:
    """All examples of a split, ready to be batched."""

    inputs: Tokens
    owns: Tensor
    targets: Tensor | Tokens | None
    """Label indices, numbers, or target texts; None where they are not known."""
    pads: dict[str, int]
    left: bool = False
    cached: bool = False

    def __len__(self) -> int:
        return len(self.owns) - 1

    @property
    def lengths(self) -> Tensor:
        """The longest sequence of each example."""
        lengths = self.inputs.lengths
        return (
            torch.stack([lengths[a:b].max() for a, b in zip(self.owns[:-1], self.owns[1:], strict=True)])
            if self.several
            else lengths
        )

    @property
    def several(self) -> bool:
        return len(self.inputs.starts) != len(self.owns)

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of some examples, padded to the longest of them, with `labels` where they are known."""
        index = torch.tensor(rows)
        if self.several:
            choices = int(self.owns.diff()[index].max())
            offset = torch.arange(choices).expand(len(rows), -1)
            there = offset < self.owns.diff()[index].unsqueeze(1)
            which = self.owns[index].unsqueeze(1) + torch.where(there, offset, 0)  # an absent choice repeats the first
            made = self.inputs.padded(which.flatten(), self.pads, self.left)
            made = {name: tensor.unflatten(0, (len(rows), choices)) for name, tensor in made.items()} | {"there": there}
        else:
            made = self.inputs.padded(index, self.pads, self.left)
        made["attention_mask"] = made.pop("mask")
        if isinstance(self.targets, Tensor):
            made["labels"] = self.targets[index]
        elif self.targets is not None:
            wanted = self.targets.padded(index, {})
            made["labels"] = wanted["input_ids"].masked_fill(wanted["mask"] == 0, IGNORED)
        return made

    def weights(self, rows: Sequence[int]) -> int:
        """What a step's mean loss divides by: rows, or target tokens."""
        if isinstance(self.targets, Tokens):
            return int(self.targets.lengths[torch.tensor(rows)].sum())
        return len(rows)


def features(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    targets: Sequence[Target] | None,
) -> Features:
    """Tokenise examples; `targets` are numbers, or texts for a sequence-to-sequence host."""
    pairs = [text for example in examples for text in example.texts]
    owns = torch.tensor([0, *(len(example.texts) for example in examples)]).cumsum(0)
    inputs, cached = _tokens(tokenizer, [a for a, _ in pairs], [b for _, b in pairs], max_length)
    wanted: Tensor | Tokens | None = None
    if targets is not None and targets and isinstance(targets[0], str):
        wanted, _ = _tokens(tokenizer, cast(list[str], list(targets)), [None] * len(targets), max_length)
    elif targets is not None:
        wanted = torch.tensor(targets)
    pads = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
    return Features(inputs, owns, wanted, pads, tokenizer.padding_side == "left", cached)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str | None], max_length: int
) -> tuple[Tokens, bool]:
    """Tokens from the cache, or made and put there."""
    file = cache_folder() / "tokens" / f"{_key(tokenizer, texts, pairs, max_length)}.safetensors"
    try:
        kept = safetensors.torch.load_file(file)
        return Tokens(kept, kept.pop("starts")), True
    except (OSError, safetensors.SafetensorError):
        pass  # not there yet, or damaged: made anew
    seconds = [pair or "" for pair in pairs] if any(pair is not None for pair in pairs) else None
    made = tokenizer(texts, seconds, truncation=True, max_length=max_length, return_attention_mask=False)
    starts = torch.tensor([0, *map(len, made["input_ids"])]).cumsum(0)
    columns = {name: torch.tensor([i for row in rows for i in row], dtype=torch.int32) for name, rows in made.items()}
    with suppress(OSError):  # a cache that cannot be written costs time, not the run
        write_whole(file, safetensors.torch.save(columns | {"starts": starts}))
    return Tokens(columns, starts), False


def _key(tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str | None], max_length: int) -> str:
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {max_length} {tokenizer.padding_side}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    for text, pair in zip(texts, pairs, strict=True):
        digest.update(f"\0{len(text)} {text}\0{pair}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
