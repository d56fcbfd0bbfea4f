"""Ranking the labels' likelihoods against generation, on T5 hosts of random weights.

    python benchmarks/ranking.py [--repeats 5] [--rows 1 32] [--tokens 16]

Each host answers the same rows by both ways: two and three labels of three tokens, as T5 writes an index, and three of
six, as it writes "not_entailment". Two cases of generation: `brief`, which ends after the label's own tokens, as a host
that has learned to say labels does: the least that generation can cost; and `free`, up to the limit of `inlay eval`, as
a host writes that has not. Columns: generation's time over ranking's, and `work`, the same ratio of multiply-adds.

    ranking     encoder + cross-attention's keys and values + d · nodes of the tree
    brief       encoder + cross-attention's keys and values + d · tokens of the label
    bound       brief / (encoder + keys and values): what a way that decides for nothing would reach

A tree of two labels has more nodes than a label has tokens, so `work` is below 1 for brief: there ranking can only save
passes, not arithmetic. It is twice as fast where the host does not stop at a label, or where passes are dear.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers as hf

from inlay.training.ranking import _together, tree_of

HOSTS = {
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000},
    "flan-t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128},
}
CASES = ((2, 3), (3, 3), (3, 6))
"""Labels, and the tokens of each, its end included."""
ROOM = 8
"""What `inlay eval` allows beyond the longest label."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"rows of {options.tokens} tokens, one thread, CPU time, the least of {options.repeats} turns")
    print(f"{'':32}{'brief / ranking':>25}{'free / ranking':>17}")
    print(f"{'host':<15}{'rows':>5}{'labels':>7}{'ms':>5}{'time':>9}{'work':>8}{'bound':>8}{'time':>9}{'work':>8}")
    for name, sizes in HOSTS.items():
        torch.manual_seed(0)
        config = hf.T5Config(
            **sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0, tie_word_embeddings=False
        )
        host = hf.T5ForConditionalGeneration(config).eval()
        work = work_of(host, options.tokens)
        for rows in options.rows:
            ids = torch.randint(10, sizes["vocab_size"], (rows, options.tokens))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for labels, length in CASES:
                tokens = [label(n, length) for n in range(labels)]
                ranking, brief, free = least(
                    options.repeats,
                    lambda host=host, batch=batch, tokens=tokens, rows=rows: _together(host, batch, [tokens] * rows),
                    lambda host=host, batch=batch, length=length: write(host, batch, length),
                    lambda host=host, batch=batch, length=length: write(host, batch, length + ROOM),
                )
                nodes = len(tree_of(tokens, 0).inputs)
                counts = [work.once + work.token * count for count in (nodes, length, length + ROOM)]
                row = f"{name:<15}{rows:>5}{labels:>3} x {length}{ranking * 1e3:>6.0f}"
                row += f"{brief / ranking:>8.2f}{counts[1] / counts[0]:>8.2f}{counts[1] / work.once:>8.2f}"
                print(f"{row}{free / ranking:>9.2f}{counts[2] / counts[0]:>8.2f}", flush=True)


class Work(NamedTuple):
    """Multiply-adds with weights for one row; those of attention itself are few for short texts and left out."""

    once: int
    """The encoder, and the keys and values that the decoder makes of its states."""
    token: int
    """One token in the decoder, with its logits."""


def work_of(host: hf.T5ForConditionalGeneration, tokens: int) -> Work:
    encoder = sum(weight.numel() for weight in host.encoder.block.parameters() if weight.dim() == 2)
    decoder = sum(weight.numel() for weight in host.decoder.block.parameters() if weight.dim() == 2)
    cross = [block.layer[1].EncDecAttention for block in host.decoder.block]
    once = sum(attention.k.weight.numel() + attention.v.weight.numel() for attention in cross)
    return Work(tokens * (encoder + once), decoder - once + host.lm_head.weight.numel())


def label(n: int, length: int) -> list[int]:
    """An index is the mark of a word, which all have in common, its digit and the end; words have nothing in common."""
    return [3, 10 + n, 1] if length == 3 else [*range(10 * n + 10, 10 * n + 9 + length), 1]


def write(host: hf.T5ForConditionalGeneration, batch: dict[str, torch.Tensor], tokens: int) -> object:
    """Generation of exactly so many tokens."""
    return host.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


@torch.no_grad()
def least(repeats: int, *ways: Callable[[], object]) -> list[float]:
    """The least CPU time of each, measured in turns."""
    best = [float("inf")] * len(ways)
    for repeat in range(repeats + 1):
        for n, way in enumerate(ways):
            began = time.process_time()
            way()
            if repeat:  # the first turn warms up
                best[n] = min(best[n], time.process_time() - began)
    return best


if __name__ == "__main__":
    main()
