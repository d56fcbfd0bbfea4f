"""Classification by label words: a template asks, and the label whose word the host finds likeliest is the answer.

    masked language models    "A fine film. It was <mask>."      log p(great | text)  at the mask
    decoders                  "A fine film. It was"              log p(great | text)  as what comes next
    encoder-decoders          the same to the encoder            log p(great | text)  as what the decoder begins with

A word of n tokens has n masks, or n steps; its score is the sum of its tokens' log-probabilities, or their mean. Words
of different lengths need different numbers of masks, so a row is one sequence for each length that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inlay.data.task import Task
from inlay.errors import ConfigError
from inlay.training.tokens import Features, Tokens, decoder_start, flat

Together = Literal["one", "sum", "mean"]
"""How the tokens of a word count: there may be only one, or they are summed, or averaged."""


@dataclass(frozen=True)
class LabelWords:
    """The labels' words as tokens."""

    ids: tuple[tuple[int, ...], ...]
    together: Together = "sum"
    before: tuple[int, ...] = ()
    """Encoder-decoders: what every answer begins with, such as BART's <s>."""

    @property
    def lengths(self) -> list[int]:
        """The different numbers of tokens, from the smallest."""
        return sorted({len(word) for word in self.ids})

    def scores(self, likely: Sequence[Tensor]) -> Tensor:
        """(B, labels) from the log-probabilities (B, n, vocabulary) at the n places of every length n, in order."""
        at = dict(zip(self.lengths, likely, strict=True))
        return torch.stack([self._score(at[len(word)], word) for word in self.ids], 1)

    def _score(self, likely: Tensor, word: tuple[int, ...]) -> Tensor:
        each = torch.stack([likely[:, place, token] for place, token in enumerate(word)], 1)  # (B, n)
        return each.mean(1) if self.together == "mean" else each.sum(1)


def label_words(
    task: Task, tokenizer: PreTrainedTokenizerBase, form: Literal["mask", "decoder", "text", "labels"]
) -> LabelWords:
    """The words of a task's labels as the tokenizer cuts them; whatever is wrong with any of them is said at once."""
    masked = form == "mask"
    shape = (task.cloze if masked else task.template) or ""
    space = " " if form != "text" and shape.partition("{target}")[0].endswith(" ") else ""
    if len(task.label_words) != len(task.labels):
        raise ConfigError(
            f"label_words has {len(task.label_words)} words for {len(task.labels)} labels ({', '.join(task.labels)}). "
            f"Give one for each, in this order."
        )
    cut = [tokenizer(space + word, add_special_tokens=False)["input_ids"] for word in task.label_words]
    problems = []
    for word, ids in zip(task.label_words, cut, strict=True):
        if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
            problems.append(f"the label word {word!r} is not in the host's vocabulary")
        elif task.label_tokens == "one" and len(ids) > 1:
            pieces = " ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
            problems.append(
                f"the label word {word!r} is {len(ids)} tokens of this host ({pieces}), but label_tokens asks for one; "
                f"choose another word, or label_tokens sum or mean"
            )
    if len({tuple(ids) for ids in cut}) < len(cut):
        problems.append(f"two labels have the same tokens: {', '.join(task.label_words)}")
    if masked and tokenizer.mask_token_id is None:
        problems.append("this host has no mask token to fill in; use a masked language model, a decoder or T5")
    if problems:
        raise ConfigError("\n".join(problems))
    return LabelWords(tuple(map(tuple, cut)), task.label_tokens, _beginning(tokenizer) if form == "text" else ())


def _beginning(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The special tokens before a text, as targets are made with them."""
    empty, one = tokenizer("")["input_ids"], tokenizer("a")["input_ids"]
    end = next((i for i, (a, b) in enumerate(zip(empty, one, strict=False)) if a != b), len(empty))
    return tuple(empty[:end])


# masked language models


@dataclass(frozen=True)
class ClozeFeatures(Features):
    """Texts with masks where the answer stands: for each row one sequence per length of label words."""

    masks: tuple[Tensor, ...] = field(default_factory=tuple)
    """For every length n: where the n masks of each row's sequence are, (rows, n)."""

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Inputs, `labels` where they are known, and `masks_0`, `masks_1` …: (B, n) of every length."""
        index = torch.tensor(rows)
        made = self.inputs.padded(self.sequences(rows), self.pads)
        made["attention_mask"] = made.pop("mask")
        made |= {f"masks_{i}": places[index] for i, places in enumerate(self.masks)}
        return made | ({"labels": self.targets[index]} if isinstance(self.targets, Tensor) else {})


def cloze_features(
    texts: Sequence[tuple[str, str]], targets: Sequence[int] | None, tokenizer: PreTrainedTokenizerBase,
    max_length: int, words: LabelWords,
) -> ClozeFeatures:  # fmt: skip
    """Tokenise what stands before and after the answer, with masks between; long texts lose their outer ends."""
    ids: list[list[int]] = []
    masks: list[list[list[int]]] = [[] for _ in words.lengths]
    mask = tokenizer.mask_token or ""
    for row, (before, after) in enumerate(texts):
        for kind, length in enumerate(words.lengths):
            found = list(tokenizer(before + mask * length + after, return_attention_mask=False)["input_ids"])
            if found.count(tokenizer.mask_token_id) != length:
                raise ConfigError(f"row {row + 1} has the host's mask token {mask} in its own text. Take it out.")
            if length + tokenizer.num_special_tokens_to_add() > max_length:
                raise ConfigError(f"max_length is {max_length}, which leaves no room beside the answer's masks.")
            found = _shortened(found, tokenizer, max_length)
            masks[kind].append([at for at, token in enumerate(found) if token == tokenizer.mask_token_id])
            ids.append(found)
    made = flat({"input_ids": ids})
    starts = made.pop("starts")
    owns = torch.arange(len(texts) + 1) * len(words.lengths)
    pads = {"input_ids": int(tokenizer.pad_token_id or 0)}
    wanted = torch.tensor(targets) if targets is not None else None
    places = tuple(torch.tensor(each) for each in masks)
    return ClozeFeatures(Tokens(made, starts), owns, wanted, pads, kind="text", masks=places)


def _shortened(ids: list[int], tokenizer: PreTrainedTokenizerBase, most: int) -> list[int]:
    """At most this many tokens: the longer side of the masks loses those at its outer end."""
    if len(ids) <= most:
        return ids
    special = set(tokenizer.all_special_ids)
    begin, end = int(ids[0] in special), len(ids) - int(ids[-1] in special)  # special tokens at the ends stay
    at = [i for i, token in enumerate(ids) if token == tokenizer.mask_token_id]
    left, right = at[0] - begin, end - 1 - at[-1]
    cut_left = cut_right = 0
    for _ in range(len(ids) - most):
        if left - cut_left >= right - cut_right:
            cut_left += 1
        else:
            cut_right += 1
    return ids[:begin] + ids[begin + cut_left : end - cut_right] + ids[end:]


def take_masks(batch: dict[str, Tensor]) -> list[Tensor]:
    """Where the masks of a batch are, (B, n) of every length, taken out of it: no host reads that."""
    return [batch.pop(name) for name in list(batch) if name.startswith("masks_")]


def at_masks(logits: Tensor, masks: Sequence[Tensor], words: LabelWords) -> Tensor:
    """(B, labels): the scores of the label words, from the logits (B · lengths, T, vocabulary) of a masked model."""
    kinds = len(words.lengths)
    likely = []
    for kind, places in enumerate(masks):
        own = logits[kind::kinds]
        rows = torch.arange(len(own), device=own.device).unsqueeze(1)
        likely.append(own[rows, places].float().log_softmax(-1))
    return words.scores(likely)


# decoders and encoder-decoders


def likelihoods(host: PreTrainedModel, batch: dict[str, Tensor], words: LabelWords, decoder: bool) -> Tensor:
    """(B, labels): the scores of the label words as what comes after each prompt, or as what a decoder begins with.

    Words that differ in their last token only, as all words of one token do, are read off one forward.
    """
    given: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    rows = len(given["input_ids"])
    model: Any = host
    states = None if decoder else model.get_encoder()(**given)
    likely: dict[tuple[int, ...], Tensor] = {}  # (B, n, vocabulary) of each beginning, of n - 1 tokens
    for begin in dict.fromkeys(word[:-1] for word in words.ids):
        tokens = torch.tensor([begin], dtype=torch.long, device=host.device).expand(rows, -1)
        if decoder:  # prompts are padded on the left: the word stands at the same place in all rows
            ids = torch.cat([given["input_ids"], tokens], 1)
            mask = torch.cat([given["attention_mask"], torch.ones_like(tokens)], 1)
            position = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
            logits = logits[:, -len(begin) - 1 :]
        else:
            start = torch.tensor([[decoder_start(host), *words.before]], device=host.device).expand(rows, -1)
            logits = model(
                encoder_outputs=states, attention_mask=given["attention_mask"], use_cache=False,
                decoder_input_ids=torch.cat([start, tokens], 1),
            ).logits[:, len(words.before) :]  # fmt: skip
        likely[begin] = logits.float().log_softmax(-1)
    return torch.cat([LabelWords((word,), words.together).scores([likely[word[:-1]]]) for word in words.ids], 1)
