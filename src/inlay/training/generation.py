"""Let a host write: batches of like length, the same text for a row whatever stands beside it.

    texts = write(host, codec, split)                       every row, in order
    write_rows(host, codec, split, rows)                    the same with the spaces at their ends, and how each ended
    write(host, codec, split, on_text=print)                one row, piece by piece as it is written

Decoders are given their prompts padded on the left. Sampling adds noise of a row's own to its logits and takes the
likeliest word (the Gumbel trick), so that a row's text follows from the seed and the row's number alone:

    argmax(logits / temperature + g),  g = −log(−log u),  u uniform       is a draw from softmax(logits / temperature)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inlay.errors import ConfigError
from inlay.host.verbs import evaluating, reads_whole_texts
from inlay.training.batching import reading_batches
from inlay.training.codec import Codec, EncodedSplit
from inlay.training.joined import JoinedFeatures
from inlay.training.recipe import Generation
from inlay.training.tokens import Features, Tokens, decoder_start, on_device, positions_of

BATCH = 64
"""Sequences that are written at once; with beams fewer rows."""
NEW_TOKENS = 8
"""Room beyond the longest expected answer."""
USUAL_ROOM = 64
"""Tokens of an answer where nothing else says how long it may be."""


@dataclass(frozen=True)
class WrittenText:
    """A text that a host wrote, and how it ended."""

    text: str
    """With the spaces at its ends."""
    read: int
    """Tokens that the host read for it."""
    tokens: int
    """Tokens that it wrote, special ones and that of the end included."""
    ended: bool
    """Whether the host ended it; otherwise there was no room for more."""


def write(
    host: PreTrainedModel,
    codec: Codec,
    split: EncodedSplit,
    *,
    on_text: Callable[[str], None] | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[str]:
    """What the active setup answers to each row, in the order of the rows. The host is left in the mode it was in.

    on_text: is given each piece of the text as it is written; for a single row, without beams.
    """
    rows, answer = range(len(split.examples)), _from_the_first_word(on_text) if on_text is not None else None
    return [one.text.strip() for one in write_rows(host, codec, split, rows, on_text=answer, watch=watch)]


def _from_the_first_word(on_text: Callable[[str], None]) -> Callable[[str], None]:
    """Hands pieces of a text on, without the spaces before it."""
    begun = False

    def hand_on(piece: str) -> None:
        nonlocal begun
        piece = piece if begun else piece.lstrip()
        if piece:
            begun = True
            on_text(piece)

    return hand_on


@torch.no_grad()
def write_rows(
    host: PreTrainedModel,
    codec: Codec,
    split: EncodedSplit,
    rows: Sequence[int],
    *,
    on_text: Callable[[str], None] | None = None,
    on_step: Callable[[], None] | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[WrittenText]:
    """What it writes for some of the rows, in their order, with all spaces, and how each text ended.

    on_step: is called after each token; where it raises, nothing more is written.
    """
    features, made = asked(split), dict[int, WrittenText]()
    with evaluating(host):
        for batch in reading_batches(features.lengths[list(rows)], rows_at_once(codec.generation)):
            some = [rows[i] for i in batch]
            inputs = on_device(features.collate(some), host.device)
            inputs.pop("labels", None)
            made |= zip(some, written(host, codec, split, inputs, some, on_text, on_step), strict=True)
            if watch is not None:
                watch(len(some))
    return [made[row] for row in rows]


def asked(split: EncodedSplit) -> Features:
    """The rows as they are asked: without their answers, where these stand in the same sequence."""
    return split.features.asked() if isinstance(split.features, JoinedFeatures) else split.features


def rows_at_once(generation: Generation) -> int:
    return max(1, BATCH // generation.beams)


def written(
    host: PreTrainedModel, codec: Codec, split: EncodedSplit, batch: dict[str, Tensor], rows: Sequence[int],
    on_text: Callable[[str], None] | None = None, on_step: Callable[[], None] | None = None,
) -> list[WrittenText]:  # fmt: skip
    """The texts of one batch."""
    how = codec.generation
    more: dict[str, Any] = {}
    if on_text is not None:
        if len(rows) > 1 or how.beams > 1:
            raise ConfigError("only one text at a time can be shown as it is written, and without beams.")
        more["streamer"] = Pieces(codec.tokenizer, on_text, skip_prompt=codec.decoder)
    steps = _no_repeats(how, batch["input_ids"].shape[1] if codec.decoder else 0)
    if how.sampling:
        steps += _by_chance(how, rows, host.device)
    more["logits_processor"] = LogitsProcessorList(steps)
    if on_step is not None:
        more["stopping_criteria"] = StoppingCriteriaList([EachStep(on_step)])
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    room = room_for(codec, split)
    positions = positions_of(host.config) if codec.decoder else None
    if positions is not None:
        room = max(1, min(room, positions - batch["input_ids"].shape[1]))
    settings = settings_for(host, codec, room)
    made = cast(Any, host).generate(**given, generation_config=settings, **more)
    made = made[:, batch["input_ids"].shape[1] if codec.decoder else 1 :]  # others begin with the decoder's start
    texts = codec.tokenizer.batch_decode(made, skip_special_tokens=True)
    read = batch["attention_mask"].sum(1).tolist()
    return [
        WrittenText(text, seen, *ending(ids, settings))
        for text, seen, ids in zip(texts, read, made.tolist(), strict=True)
    ]


def ending(ids: list[int], settings: GenerationConfig) -> tuple[int, bool]:
    """How many of these tokens the host wrote (padding may follow), and whether it ended the text itself."""
    ends = cast(list[int], settings.eos_token_id or [])
    tokens = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
    if tokens is None:
        return len(ids), False
    return tokens, settings.forced_eos_token_id is None or tokens < cast(int, settings.max_new_tokens)


def room_for(codec: Codec, split: EncodedSplit) -> int:
    """How many tokens an answer may have: what the settings say, or the longest right answer's and a few more."""
    if codec.generation.max_new_tokens is not None:
        return codec.generation.max_new_tokens
    return longest_answer(split) + NEW_TOKENS if split.features.targets is not None else USUAL_ROOM + NEW_TOKENS


def longest_answer(split: EncodedSplit) -> int:
    """Tokens of a split's longest right answer."""
    wanted = split.features.targets
    if isinstance(split.features, JoinedFeatures):
        return split.features.longest_answer
    return int(wanted.lengths.max()) if isinstance(wanted, Tokens) else USUAL_ROOM


def settings_for(host: PreTrainedModel, codec: Codec, room: int) -> GenerationConfig:
    """Our settings alone: those of the host's own generation config, such as sampling or beams, are not used."""
    how, own = codec.generation, host.generation_config
    start = decoder_start(host) if host.config.is_encoder_decoder else None
    beams = {"length_penalty": how.length_penalty} if how.beams > 1 else {}
    ends = getattr(own, "eos_token_id", None)
    ends = {codec.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    return GenerationConfig(
        max_new_tokens=room,
        num_beams=how.beams,
        do_sample=False,
        pad_token_id=codec.tokenizer.pad_token_id,
        eos_token_id=sorted(cast(set[int], ends)) or None,
        bos_token_id=codec.tokenizer.bos_token_id,
        decoder_start_token_id=start,
        forced_bos_token_id=getattr(own, "forced_bos_token_id", None),
        forced_eos_token_id=getattr(own, "forced_eos_token_id", None),
        use_cache=not reads_whole_texts(host),
        **beams,
    )


class Pieces(TextStreamer):
    """Hands each finished piece of a text to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


class EachStep(StoppingCriteria):
    """Calls a function after each token, and stops no text by itself."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.on_step = on_step

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.on_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class OfTheAnswer(LogitsProcessor):
    """A logits processor that is shown the answer's tokens alone, without the prompt and its padding."""

    def __init__(self, step: LogitsProcessor, prompt: int) -> None:
        self.step, self.prompt = step, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.step(input_ids[:, self.prompt :], scores)


def _no_repeats(how: Generation, prompt: int) -> list[LogitsProcessor]:
    """An answer may copy from its prompt, but does not say the same twice."""
    return [OfTheAnswer(NoRepeatNGramLogitsProcessor(how.no_repeat_ngram), prompt)] if how.no_repeat_ngram else []


def _by_chance(how: Generation, rows: Sequence[int], device: torch.device) -> list[LogitsProcessor]:
    """Temperature, top-k and top-p, then each row's own noise, with which the likeliest word is a draw."""
    steps: list[LogitsProcessor] = [TemperatureLogitsWarper(how.sampling)]
    steps += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    return [*steps, Noise(how.sampling_seed, rows, device)]


class Noise(LogitsProcessor):
    """Gumbel noise, for each row from a generator of its own."""

    def __init__(self, seed: int, rows: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.own = [torch.Generator().manual_seed((seed * 1_000_003 + row) % (1 << 63)) for row in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tiny = torch.finfo(torch.float64).tiny
        drawn = torch.stack([torch.rand(scores.shape[1], generator=one, dtype=torch.float64) for one in self.own])
        return scores.double() - (-drawn.clamp(min=tiny).log()).clamp(min=tiny).log().to(self.device)
