"""Ranking the labels' likelihoods against generation, on T5 hosts of random weights.

    python benchmarks/ranking.py [--repeats 5] [--rows 64] [--tokens 64]

Each host answers the same rows by both ways, for two and for three labels. Two cases of generation: `free`, as a host
of random weights writes, up to the limit; and `brief`, which is made to end after the label's own tokens, as a host does
that has learned to say labels: the least that generation can cost. The ratio is generation's time over ranking's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf

from inlay.training.ranking import _together

HOSTS = {
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000},
    "flan-t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128},
}
LABEL = 2
"""Tokens of a label, its end included."""
ROOM = LABEL + 8
"""New tokens at most, as `inlay eval` allows."""


def _generated(host: Any, batch: dict[str, torch.Tensor], tokens: int) -> None:
    """Exactly this many tokens, the likeliest ones."""
    host.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.rows} rows of {options.tokens} tokens, one thread, the least of {options.repeats} times")
    print(f"{'host':<16}{'labels':>7}{'ranking':>12}{'brief':>10}{'ratio':>8}{'free':>10}{'ratio':>8}")
    for name, sizes in HOSTS.items():
        torch.manual_seed(0)
        config = hf.T5Config(
            **sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0, tie_word_embeddings=False
        )
        host = hf.T5ForConditionalGeneration(config).eval()
        ids = torch.randint(10, sizes["vocab_size"], (options.rows, options.tokens))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for labels in (2, 3):
            tokens = [[[10 + n, 1] for n in range(labels)]] * options.rows
            ranking, brief, free = least(
                options.repeats,
                lambda host=host, batch=batch, tokens=tokens: _together(host, batch, tokens),
                partial(_generated, host, batch, LABEL),
                partial(_generated, host, batch, ROOM),
            )  # fmt: skip
            row = f"{name:<16}{labels:>7}{ranking * 1e3:>9.0f} ms{brief * 1e3:>7.0f} ms{brief / ranking:>8.2f}"
            print(f"{row}{free * 1e3:>7.0f} ms{free / ranking:>8.2f}")


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
