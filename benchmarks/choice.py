"""What a choice task costs on the host that serves every kind of task, against AutoModelForMultipleChoice.

    python benchmarks/choice.py

Both carry the same inlay and the same head (the pooler and one output). `theirs` is transformers' class for choices,
which takes (rows, choices, tokens), so a row with fewer choices than the batch's most is filled up with texts that
count for nothing. `ours` is a sequence classifier that takes the texts one below the other, and only those that there
are; the numbers are put into (rows, choices) afterwards. `equal`: 4 rows of 4 choices; `mixed`: rows of 2, 3, 4 and 5.
Target: no more than theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from harness import Bench, Builder, Run, Sizes, bert
from torch import Tensor
from torch.nn import functional as F

import inlay
from inlay.host.heads import CHOICE
from inlay.training.evaluate import scores

COUNTS = {"equal": (4, 4, 4, 4), "mixed": (2, 3, 4, 5)}


def multiple_choice(sizes: Sizes) -> Any:
    """transformers' own class with the weights of the benchmarks' host, in the same memory."""
    host = bert(sizes)
    other = transformers.BertForMultipleChoice(host.config)
    weights = dict(host.bert.named_parameters())
    for name, parameter in other.bert.named_parameters():
        parameter.data = weights[name].data
    return other


def texts(counts: Sequence[int], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """(texts, T), which choices each row has (B, C), and the right ones (B,)."""
    ids = torch.randint(5, 30_000, (sum(counts), sizes.tokens), generator=torch.Generator().manual_seed(0))
    there = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
    return ids, there, torch.zeros(len(counts), dtype=torch.int64)


def theirs(counts: Sequence[int], training: bool) -> Builder:
    def build(sizes: Sizes) -> Run:
        host = multiple_choice(sizes)
        inlay.add(host, "task", inlay.Pfeiffer(reduction=16), head=inlay.Head())
        ids, there, labels = texts(counts, sizes)
        filled = ids.new_zeros(*there.shape, sizes.tokens)
        filled[there] = ids
        inputs = {"input_ids": filled, "attention_mask": torch.ones_like(filled)}

        def loss() -> Tensor:
            return F.cross_entropy(host(**inputs).logits.masked_fill(~there, -1e9), labels)

        return _run(host, loss, training)

    return build


def ours(counts: Sequence[int], training: bool) -> Builder:
    def build(sizes: Sizes) -> Run:
        host = bert(sizes)
        inlay.add(host, "task", inlay.Pfeiffer(reduction=16), head=inlay.Head(labels=CHOICE))
        ids, there, labels = texts(counts, sizes)

        def loss() -> Tensor:
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "there": there}
            return F.cross_entropy(scores(host, batch), labels)

        return _run(host, loss, training)

    return build


def _run(host: Any, loss: Any, training: bool) -> Run:
    inlay.train(host, "task")
    if not training:
        host.eval()

    def run() -> None:
        if training:
            loss().backward()
            host.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                loss()

    return run


def main() -> int:
    cases: dict[str, Builder] = {}
    for name, counts in COUNTS.items():
        for phase, training in (("forward", False), ("step", True)):
            cases[f"{name} theirs:{phase}"] = theirs(counts, training)
            cases[f"{name} ours:{phase}"] = ours(counts, training)
    bench = Bench(__doc__, cases)
    for name in COUNTS:
        for phase in ("forward", "step"):
            bench.time(f"{name} ours:{phase}", base=f"{name} theirs:{phase}", target=1.0)
        bench.memory(f"{name} ours:step", base=f"{name} theirs:step", target=1.0)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
