"""The golden files that the peer libraries made: tools/make_golden.py."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[2] / "golden"
FAMILIES = ("bert", "roberta", "t5", "gpt2", "llama", "bart", "distilbert", "phi", "bert-generation")


def host_of(family: str) -> hf.PreTrainedModel:
    (kind,) = hf.AutoConfig.from_pretrained(GOLDEN / family / "host").architectures
    return getattr(hf, kind).from_pretrained(GOLDEN / family / "host").eval()


def inputs_of(family: str) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in load_file(GOLDEN / family / "inputs.safetensors").items() if name != "bare"
    }


def logits_of(host: hf.PreTrainedModel, family: str) -> Tensor:
    with torch.no_grad():
        return host(**inputs_of(family)).logits


def expected(case: Path) -> dict[str, Tensor]:
    return load_file(case / "expected.safetensors")


def cases(*families: str, without: tuple[str, ...] = ()) -> list[Path]:
    """Every case folder of these families, by name."""
    return [
        case for family in families or FAMILIES for case in sorted((GOLDEN / family).iterdir())
        if case.is_dir() and case.name != "host" and not case.name.startswith(without)
    ]  # fmt: skip


def named(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


def untouched(host: torch.nn.Module) -> bool:
    """Whether a host has nothing of ours: no inlays, no hooks."""
    return not hasattr(host, "inlays") and not any(m._forward_hooks or m._forward_pre_hooks for m in host.modules())
