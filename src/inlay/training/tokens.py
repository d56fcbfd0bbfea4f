"""Examples as tokens: tokenised once, kept flat in memory and cached on disk; a batch is padded to its own longest row.

ids     every sequence, one after the other     (all tokens,)
starts  where each sequence begins              (sequences + 1,)
owns    the first sequence of each example      (examples + 1,)

what an example is    its sequences                                             labels of a batch
text                  one                                                       (B,), (B, labels), or a text's tokens
choices               one for each choice                                       (B,)
words                 one; the first token of a word carries its label          (B, T)
joined                one: a prompt and its answer (decoders)                   (B, last tokens)
windows               one for each piece of a long context, which overlap       (windows, 2): first and last token
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inlay.data.examples import Example
from inlay.errors import ConfigError
from inlay.storage.cache import cache_folder
from inlay.storage.files import write_whole
from inlay.storage.tensor_file import Damaged, pack, unpack

COUNT_FROM_PADDING = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "mpnet", "longformer", "ibert",
    "data2vec-text", "xmod",
)  # fmt: skip
"""Hosts whose first position is the one after their padding token's, 2."""

Target = int | float | str | tuple[float, ...] | None
"""What an example asks for: the index of a label or choice, a number, a text, 0 or 1 for each label; None: unknown."""
FeatureKind = Literal["text", "choices", "words", "windows", "joined"]
"""What the sequences of an example are; see above."""
PLACES = ("word", "begin", "end")
"""What a token stands for: which word it is the first of, or from where to where it is in the context; -1: nothing."""
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
    """Label indices, numbers, target texts, a label for each token, or first and last tokens; None: not known."""
    pads: dict[str, int]
    left: bool = False
    cached: bool = False
    kind: FeatureKind = "text"
    places: Tokens | None = None
    """What each token stands for, where that is asked."""

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

    def sequences(self, rows: Sequence[int]) -> Tensor:
        """The sequences of some examples, one after the other."""
        index = torch.tensor(rows)
        if not self.several:
            return index
        return torch.cat([torch.arange(int(self.owns[i]), int(self.owns[i + 1])) for i in index])

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Inputs (sequences, T) of some examples, padded to the longest of them, with `labels` where they are known.

        Choices also get `has_choice` (B, most choices): which of them each row has.
        """
        which = self.sequences(rows)
        made = self.inputs.padded(which, self.pads, self.left)
        made["attention_mask"] = made.pop("mask")
        if self.kind == "choices":
            made["has_choice"] = self.choices_of(rows)
        return made | self._labels(rows, which)

    def choices_of(self, rows: Sequence[int]) -> Tensor:
        """Which choices each of these examples has (B, most choices)."""
        counts = self.owns.diff()[torch.tensor(rows)]
        return torch.arange(int(counts.max())) < counts.unsqueeze(1)

    def _labels(self, rows: Sequence[int], which: Tensor) -> dict[str, Tensor]:
        if self.targets is None:
            return {}
        if self.kind == "windows":
            assert isinstance(self.targets, Tensor)
            lengths = self.inputs.lengths[which]  # first and last token of each window, wherever its padding is
            return {"labels": self.targets[which] + ((lengths.max() - lengths).unsqueeze(1) if self.left else 0)}
        if isinstance(self.targets, Tensor):
            return {"labels": self.targets[torch.tensor(rows)]}
        wanted = self.targets.padded(torch.tensor(rows), {}, self.left and self.kind == "words")
        return {"labels": wanted["input_ids"].masked_fill(wanted["mask"] == 0, IGNORED)}

    def weights(self, rows: Sequence[int]) -> int:
        """What a step's mean loss divides by: rows, windows, labelled words, or target tokens."""
        if self.kind == "words":
            return max(1, int((self._labels(rows, torch.tensor(rows))["labels"] != IGNORED).sum()))
        if isinstance(self.targets, Tokens):
            return int(self.targets.lengths[torch.tensor(rows)].sum())
        return len(self.sequences(rows)) if self.kind == "windows" else len(rows)

    def real(self, length: int, longest: int) -> slice:
        """Where the tokens of a sequence are in a batch that is padded to the longest."""
        return slice(longest - length, longest) if self.left else slice(0, length)

    def stands_for(self, sequence: int) -> dict[str, Tensor]:
        """What the tokens of one sequence stand for, each (T,)."""
        assert self.places is not None
        here = slice(int(self.places.starts[sequence]), int(self.places.starts[sequence + 1]))
        return {name: column[here] for name, column in self.places.columns.items()}


def features(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    targets: Sequence[Target] | None,
    cache: bool = True,
) -> Features:
    """Tokenise texts and choices; `targets` are numbers, or texts for a sequence-to-sequence host."""
    pairs = [text for example in examples for text in example.texts]
    owns = torch.tensor([0, *(len(example.texts) for example in examples)]).cumsum(0)
    inputs, cached = _tokens(tokenizer, [a for a, _ in pairs], [b for _, b in pairs], max_length, cache)
    wanted: Tensor | Tokens | None = None
    if targets is not None and targets and isinstance(targets[0], str):
        wanted, _ = _tokens(tokenizer, cast(list[str], list(targets)), [None] * len(targets), max_length, cache)
    elif targets is not None:
        wanted = torch.tensor(targets)
    kind: FeatureKind = "choices" if any(len(example.texts) > 1 for example in examples) else "text"
    return _ready(tokenizer, inputs, owns, wanted, cached=cached, kind=kind)


def word_features(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int, labelled: bool, cache: bool = True
) -> Features:
    """Tokenise rows of words. The first token of a word carries its label, all others are ignored."""
    _check_fast(tokenizer, "labels words")
    texts = [example.texts[0][0] for example in examples]
    words = [example.words for example in examples]
    key = cache_key(tokenizer, texts, [repr(row) for row in words], f"words {max_length}") if cache else None
    kept, cached = cached_tensors(key, lambda: _cut_words(tokenizer, texts, words, max_length))
    inputs, places = _split(kept)
    targets = None
    if labelled:
        at = places.columns["word"]
        known = torch.tensor([label for example in examples for label in cast(tuple[int, ...], example.target)])
        first = torch.tensor([0, *map(len, words)]).cumsum(0)[:-1].repeat_interleave(inputs.lengths)
        labels = torch.where(at >= 0, known[(first + at).clamp(min=0)], IGNORED)
        targets = Tokens({"input_ids": labels}, inputs.starts)
    owns = torch.arange(len(examples) + 1)
    return _ready(tokenizer, inputs, owns, targets, cached=cached, kind="words", places=places)


def window_features(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int, labelled: bool,
    cache: bool = True,
) -> Features:  # fmt: skip
    """Tokenise questions with their contexts; a long context is read in windows that share `stride` tokens."""
    _check_fast(tokenizer, "marks spans")
    stride = min(stride, max_length // 4)  # what is left beside the longest question, and still moves on
    questions, contexts = [example.texts[0][0] for example in examples], [str(e.texts[0][1]) for e in examples]
    key = cache_key(tokenizer, questions, contexts, f"windows {max_length} {stride}") if cache else None
    kept, cached = cached_tensors(key, lambda: _cut_windows(tokenizer, questions, contexts, max_length, stride))
    owns = kept.pop("owns")
    inputs, places = _split(kept)
    made = _ready(tokenizer, inputs, owns, None, cached=cached, kind="windows", places=places)
    if not labelled:
        return made
    first = torch.tensor([first_token(made, i, tokenizer) for i in range(len(inputs.starts) - 1)])
    targets = torch.stack([first, first], 1)
    for row, example in enumerate(examples):
        right = cast(tuple[tuple[str, int], ...], example.target)
        for window in range(int(owns[row]), int(owns[row + 1])) if right else ():
            span = _span_in(made.stands_for(window), right[0][1], right[0][1] + len(right[0][0]))
            targets[window] = torch.tensor(span) if span is not None else targets[window]
    return replace(made, targets=targets)


def first_token(made: Features, sequence: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where a window says that it has no answer: its [CLS] token, or its first one."""
    ids = made.inputs.columns["input_ids"][int(made.inputs.starts[sequence]) : int(made.inputs.starts[sequence + 1])]
    found = (ids == tokenizer.cls_token_id).nonzero() if tokenizer.cls_token_id is not None else ids.new_zeros(0)
    return int(found[0]) if len(found) else 0


def _span_in(places: dict[str, Tensor], begin: int, end: int) -> tuple[int, int] | None:
    """First and last token of a piece of the context; None where it is not wholly in this window."""
    context = places["begin"] >= 0
    first = (context & (places["begin"] <= begin) & (places["end"] > begin)).nonzero()
    last = (context & (places["begin"] < end) & (places["end"] >= end)).nonzero()
    return (int(first[0]), int(last[0])) if len(first) and len(last) else None


def _ready(
    tokenizer: PreTrainedTokenizerBase, inputs: Tokens, owns: Tensor, targets: Tensor | Tokens | None, **rest: Any
) -> Features:
    pads = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
    return Features(inputs, owns, targets, pads, tokenizer.padding_side == "left", **rest)


def _check_fast(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    if not tokenizer.is_fast:
        raise ConfigError(
            f"a task that {what} has to know where each token stands in the text, which {type(tokenizer).__name__} "
            f"does not say. Use a host with a fast tokenizer."
        )


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch where the host computes."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


# cutting


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: Sequence[str | None], max_length: int,
    cache: bool = True,
) -> tuple[Tokens, bool]:  # fmt: skip
    """Tokens of texts or pairs, from the cache, or made and put there."""

    def make() -> dict[str, Tensor]:
        seconds = [pair or "" for pair in pairs] if any(pair is not None for pair in pairs) else None
        return flat(tokenizer(texts, seconds, truncation=True, max_length=max_length, return_attention_mask=False))

    kept, cached = cached_tensors(cache_key(tokenizer, texts, pairs, str(max_length)) if cache else None, make)
    return Tokens(kept, kept.pop("starts")), cached


def _cut_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], words: list[tuple[str, ...]], max_length: int
) -> dict[str, Tensor]:
    """Tokens, and for the first one of each word which word it is."""
    made = tokenizer(
        texts, truncation=True, max_length=max_length, return_attention_mask=False, return_offsets_mapping=True
    )
    found = []
    for text, row, offsets in zip(texts, words, made.pop("offset_mapping"), strict=True):
        begins = [0]
        for word in row:
            begins.append(begins[-1] + len(word) + 1)
        before = -1
        for begin, end in offsets:
            at = next((i for i in range(begin, end) if not text[i].isspace()), None)  # some begin with the space before
            word_at = -1 if at is None else bisect_right(begins, at) - 1
            found.append(word_at if word_at > before else -1)
            before = max(before, word_at)
    return flat(made) | {"word": torch.tensor(found, dtype=torch.int32)}


def _cut_windows(
    tokenizer: PreTrainedTokenizerBase, questions: list[str], contexts: list[str], max_length: int, stride: int
) -> dict[str, Tensor]:
    """Tokens of every window, where in the context each of them is, and the first window of each example."""
    made = tokenizer(
        _shortened(tokenizer, questions, max_length // 2), contexts, truncation="only_second", max_length=max_length,
        stride=stride, return_overflowing_tokens=True, return_offsets_mapping=True, return_attention_mask=False,
    )  # fmt: skip
    begin, end = [], []
    for window, offsets in enumerate(made.pop("offset_mapping")):
        for part, (a, b) in zip(made.sequence_ids(window), offsets, strict=True):
            begin.append(a if part == 1 and b > a else -1)
            end.append(b if part == 1 and b > a else -1)
    owner = torch.tensor(made.pop("overflow_to_sample_mapping"))
    places = {"begin": torch.tensor(begin, dtype=torch.int32), "end": torch.tensor(end, dtype=torch.int32)}
    owns = torch.cat([torch.zeros(1, dtype=torch.int64), owner.bincount(minlength=len(questions)).cumsum(0)])
    return flat(made) | places | {"owns": owns}


def _shortened(tokenizer: PreTrainedTokenizerBase, questions: list[str], most: int) -> list[str]:
    """Questions of at most this many tokens, so that there is room for the context."""
    cut = tokenizer(questions, truncation=True, max_length=most, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    return [text[: max((b for _, b in offsets), default=0)] for text, offsets in zip(questions, cut, strict=True)]


def flat(made: Any) -> dict[str, Tensor]:
    """A tokenizer's lists one after the other, and where each begins."""
    starts = torch.tensor([0, *map(len, made["input_ids"])]).cumsum(0)
    columns = {name: torch.tensor([i for row in rows for i in row], dtype=torch.int32) for name, rows in made.items()}
    return columns | {"starts": starts}


def _split(kept: dict[str, Tensor]) -> tuple[Tokens, Tokens]:
    """The host's inputs, and what the tokens stand for."""
    starts = kept.pop("starts")
    places = {name: kept.pop(name) for name in PLACES if name in kept}
    return Tokens(kept, starts), Tokens(places, starts)


# the cache


def cached_tensors(key: str | None, make: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """Tensors from the cache, or made and put there; without a key only made."""
    if key is None:
        return make(), False
    file = cache_folder() / "tokens" / f"{key}.safetensors"
    try:
        return unpack(file)[0], True
    except (OSError, Damaged):
        pass  # not there yet, or damaged: made anew
    made = make()
    with suppress(OSError):  # a cache that cannot be written costs time, not the run
        write_whole(file, pack(made))
    return made, False


def cache_key(tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: Iterable[str | None], how: str) -> str:
    sides = f"{tokenizer.padding_side} {tokenizer.truncation_side}"
    names = " ".join(tokenizer.model_input_names)
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {how} {sides} {names}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    for text, pair in zip(texts, pairs, strict=True):
        second = "none" if pair is None else f"{len(pair)} {pair}"
        digest.update(f"\0{len(text)} {text}\0{second}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a host has positions for, where its config says so."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if positions is None else positions - (2 if config.model_type in COUNT_FROM_PADDING else 0)


def decoder_start(host: PreTrainedModel) -> int:
    """The token that the decoder of an encoder-decoder begins with."""
    for said in (host.generation_config, host.config):
        if (found := getattr(said, "decoder_start_token_id", None)) is not None:
            return int(found)
    return 0
