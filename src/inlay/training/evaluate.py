"""Ask a host: every example once, batched by length, over all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.compose.activations import FusionActivations, fusion_activations
from inlay.compose.ensemble import routing
from inlay.errors import ConfigError
from inlay.host.setup import names_in
from inlay.host.verbs import active, evaluating
from inlay.methods.mixture import Routing
from inlay.training.batching import evenly, reading_batches
from inlay.training.codec import Answer, Codec, EncodedSplit
from inlay.training.generation import asked, rows_at_once, written
from inlay.training.label_words import ClozeFeatures, at_masks, likelihoods, take_masks
from inlay.training.ranking import ranked
from inlay.training.tokens import on_device

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
BATCH = 64


@dataclass(frozen=True)
class Route:
    """How a mixture is evaluated: by the mean of its modules, by single ones, or by several random passes."""

    routing: Literal["merged", "random", "first", "ensemble"] = "merged"
    passes: int = 4
    """Of an ensemble: AdaMix took four."""
    mean: Literal["logits", "probabilities"] = "logits"
    """What an ensemble takes the mean of."""

    @property
    def times(self) -> int:
        return self.passes if self.routing == "ensemble" else 1

    def check(self, codec: Codec) -> None:
        if self.mean == "probabilities" and codec.task.kind not in ("classification", "choice"):
            raise ConfigError(f"{codec.task.kind} has no probabilities to average; use the mean of logits.")
        if self.routing == "ensemble" and codec.form == "text":
            raise ConfigError(
                "an ensemble needs a host with a head; one that answers in text has no logits to average."
            )

    @contextmanager
    def taken(self, host: PreTrainedModel) -> Iterator[None]:
        """For the length of a `with` block, every mixture of the active setup is evaluated like this."""
        with ExitStack() as stack:
            if self.routing != "merged":
                for name in names_in(active(host)) or [""]:
                    how: Routing = "random" if self.routing == "ensemble" else self.routing
                    stack.enter_context(routing(host, name, how))
            yield

    def mean_of(self, logits: list[Tensor]) -> Tensor:
        """Logits of every pass as those of the ensemble."""
        whole = torch.stack(logits)
        if len(logits) > 1 and self.mean == "probabilities" and whole.shape[-1] > 1:
            return whole.double().log_softmax(-1).logsumexp(0) - math.log(len(logits))
        return whole.mean(0)


@torch.no_grad()
def ask(
    host: PreTrainedModel,
    codec: Codec,
    split: EncodedSplit,
    *,
    accelerator: Accelerator | None = None,
    watch: Callable[[int], None] | None = None,
    route: Route | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[Answer]:
    """The active setup's answers, in the order of the examples. The host is left in the state it was in.

    route:   how a mixture is evaluated; without it by the mean of its modules.
    on_step: is called after each token that the host writes; where it raises, nothing more is written.
    """
    route = route or Route()
    route.check(codec)
    found: list[tuple[int, Answer]] = []
    features = asked(split)
    size = rows_at_once(codec.generation) if codec.form == "text" else BATCH
    with evaluating(host), route.taken(host):
        for rows in _own_share(reading_batches(features.lengths, size), accelerator):
            batch = on_device(features.collate(rows), host.device)
            batch.pop("labels", None)
            found += zip(rows, _answered(host, codec, split, rows, batch, route, on_step), strict=True)
            if watch is not None:
                watch(len(rows))
    return [answer for _, answer in sorted(_of_all(found, accelerator), key=lambda pair: pair[0])]


@torch.no_grad()
def loss_on(
    host: PreTrainedModel, codec: Codec, split: EncodedSplit, accelerator: Accelerator | None = None
) -> float:  # fmt: skip
    """The mean loss of labelled rows: it tells states apart that score the same."""
    sums = [(0.0, 0)]
    with evaluating(host):
        for rows in _own_share(reading_batches(split.features.lengths, BATCH), accelerator):
            batch = on_device(split.features.collate(rows), host.device)
            seen = codec.form == "text" and not codec.decoder  # encoder-decoders make their inputs from the labels
            labels = batch["labels"] if seen else batch.pop("labels")
            sums.append((float(codec.loss(scores(host, batch, codec), labels)), split.features.weights(rows)))
    sums = _of_all(sums, accelerator)
    return sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)


def _own_share(batches: list[list[int]], accelerator: Accelerator | None) -> list[list[int]]:
    """The batches that this process runs."""
    return batches if accelerator is None else batches[accelerator.process_index :: accelerator.num_processes]


def _of_all(found: list[T], accelerator: Accelerator | None) -> list[T]:
    """What all processes have found, one after the other."""
    if accelerator is None or accelerator.num_processes == 1:
        return found
    from accelerate.utils import gather_object

    return gather_object(found)


def scores(model: nn.Module, batch: dict[str, Tensor], codec: Codec | None = None) -> Tensor:
    """Logits; those of choices as (B, choices), those at masks as the scores of label words, (B, labels)."""
    has_choice = batch.pop("has_choice", None)
    masks = take_masks(batch)
    logits: Tensor = model(**batch).logits
    if masks:
        assert codec is not None
        assert codec.words is not None
        return at_masks(logits, masks, codec.words)
    return logits if has_choice is None else by_choice(logits, has_choice)


def by_choice(logits: Tensor, has_choice: Tensor) -> Tensor:
    """One number per text, (texts, 1), as (B, choices). A choice that a row does not have gets the lowest number."""
    lowest = torch.full(has_choice.shape, torch.finfo(logits.dtype).min, dtype=logits.dtype, device=logits.device)
    return lowest.masked_scatter(has_choice, logits)


def _answered(
    host: PreTrainedModel, codec: Codec, split: EncodedSplit, rows: list[int], batch: dict[str, Tensor], route: Route,
    on_step: Callable[[], None] | None,
) -> list[Answer]:  # fmt: skip
    """One batch."""
    if codec.form != "text":
        several = [scores(host, dict(batch), codec) for _ in range(route.times)]
        return codec.answers(route.mean_of(several), split, rows)
    if codec.words is not None:
        return codec.answers(likelihoods(host, batch, codec.words, codec.decoder))
    candidates = [codec.candidates(split.examples[row]) for row in rows]
    if codec.answering == "ranking" and all(candidates):
        return ranked(host, codec, batch, [each for each in candidates if each])
    texts = written(host, codec, split, batch, rows, on_step=on_step)
    return [codec.decode(one.text, split.examples[row]) for one, row in zip(texts, rows, strict=True)]


def attention_on(
    host: PreTrainedModel, fusion: str, split: EncodedSplit, at_most: int | None = None
) -> FusionActivations:  # fmt: skip
    """Mean attention per place and member over the real tokens of all rows, or of `at_most` evenly chosen ones."""
    return fusion_activations(host, fusion, batches_of(host, split, at_most))


def batches_of(host: PreTrainedModel, split: EncodedSplit, at_most: int | None = None) -> list[dict[str, Tensor]]:
    """All rows, or `at_most` evenly chosen ones, as batches that the host takes."""
    batches = []
    kept = evenly(len(split.features.lengths), at_most)
    for rows in reading_batches(split.features.lengths[kept], BATCH):
        batch = split.features.collate([kept[row] for row in rows])
        if split.features.kind != "text" or isinstance(split.features, ClozeFeatures):
            batch.pop("labels", None)  # the host itself knows no loss for choices, words, windows and masks
        batch.pop("has_choice", None)
        take_masks(batch)
        batches.append(on_device(batch, host.device))
    return batches
