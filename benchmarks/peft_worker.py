"""The peer's cases of other_ways.py: `peft` 0.21.2. Started by the harness, as peer_worker.py is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Builder, Sizes, bare_cases, batch, bert, forward, serve, step
from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig, get_peft_model

CONFIGS: dict[str, Callable[[], Any]] = {
    "prompt": lambda: PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=20),
    "prefix": lambda: PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=20),
    "ia3": lambda: IA3Config(
        task_type="SEQ_CLS",
        target_modules=r".*\.(key|value)|.*layer\.\d+\.output\.dense",
        feedforward_modules=r".*layer\.\d+\.output\.dense",  # its input is rescaled, as inlay.IA3 does
    ),
}


def build(name: str, phase: Callable[..., Any]) -> Builder:
    def made(sizes: Sizes) -> Any:
        torch.manual_seed(0)
        host = bert(sizes)
        return phase(get_peft_model(host, CONFIGS[name]()), batch(host, sizes))

    return made


CASES: dict[str, Builder] = bare_cases()
for name in CONFIGS:
    CASES |= {f"{name}:forward": build(name, forward), f"{name}:step": build(name, step)}

if __name__ == "__main__":
    serve(CASES)
