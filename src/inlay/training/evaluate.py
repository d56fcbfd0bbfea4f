"""Ask a host: every example once, batched by length, over all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.compose.activations import FusionActivations, fusion_activations
from inlay.training.batching import reading_batches
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.tokens import Tokens

if TYPE_CHECKING:
    from accelerate import Accelerator

BATCH = 64
NEW_TOKENS = 8
"""Room beyond the longest expected answer."""


@torch.no_grad()
def ask(
    host: PreTrainedModel,
    codec: Codec,
    split: EncodedSplit,
    *,
    accelerator: Accelerator | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[Answer]:
    """The active setup's answers, in the order of the examples. The host is left in the state it was in."""
    training = host.training
    host.eval()
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    found: list[tuple[int, Answer]] = []
    try:
        for rows in reading_batches(split.features.lengths, BATCH)[rank::world]:
            batch = {name: tensor.to(host.device) for name, tensor in split.features.collate(rows).items()}
            batch.pop("labels", None)
            said = _generated(host, codec, split, batch) if codec.form == "text" else codec.answers(scores(host, batch))
            found += zip(rows, said, strict=True)
            if watch is not None:
                watch(len(rows))
    finally:
        host.train(training)
    if world > 1:
        from accelerate.utils import gather_object

        found = gather_object(found)
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits; a choice that a row does not have gets the lowest number."""
    there = batch.pop("there", None)
    logits: Tensor = model(**batch).logits
    return logits if there is None else logits.masked_fill(~there, torch.finfo(logits.dtype).min)


def _generated(host: PreTrainedModel, codec: Codec, split: EncodedSplit, batch: dict[str, Tensor]) -> list[Answer]:
    wanted = split.features.targets
    room = int(wanted.lengths.max()) if isinstance(wanted, Tokens) else 64
    made = host.generate(**batch, max_new_tokens=room + NEW_TOKENS, do_sample=False, num_beams=1)  # type: ignore[operator]
    return [codec.decode(text) for text in codec.tokenizer.batch_decode(made, skip_special_tokens=True)]


def attention_on(host: PreTrainedModel, fusion: str, split: EncodedSplit) -> FusionActivations:
    """Mean attention per place and member over the rows' real tokens."""
    batches = []
    for rows in reading_batches(split.features.lengths, BATCH):
        batch = split.features.collate(rows)
        batch.pop("there", None)
        batches.append({name: tensor.to(host.device) for name, tensor in batch.items()})
    return fusion_activations(host, fusion, batches)
