"""The golden files that the peer libraries made: tools/make_golden.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

import inlay
from tests.hosts import untouched

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


def copied(case: str, to: Path) -> Path:
    """A case that may be changed."""
    return Path(shutil.copytree(GOLDEN / case, to / "case"))


def refused(folder: Path, match: str, family: str = "bert", **options: Any) -> str:
    """The message of a refusal that leaves the host as it was."""
    host = host_of(family)
    with pytest.raises(inlay.InlayError, match=match) as caught:
        inlay.load(host, folder, **options)
    assert untouched(host)
    return str(caught.value)


def pour(host: torch.nn.Module, name: str, folder: Path) -> None:
    """Put the tensors of a checkpoint into an inlay of the same form."""
    theirs = host.inlays[inlay.load(host, folder, name=f"{name}-theirs")].tensors()
    ours = host.inlays[name].tensors()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        tensor.copy_(theirs[key])
    inlay.remove(host, f"{name}-theirs")
