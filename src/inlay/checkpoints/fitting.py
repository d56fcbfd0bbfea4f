"""Whether a saved inlay fits: its host, members and tensors are compared with those that are there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.errors import CheckpointError
from inlay.host.registry import Inlay, Inlays


def misfit(folder: Path, problems: list[str]) -> CheckpointError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return CheckpointError(f"{folder} does not fit this host; nothing was changed:\n{listed}")


def copy_into(inlay: Inlay, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into an inlay that was just built."""
    with torch.no_grad():
        for key, tensor in inlay.tensors().items():
            tensor.copy_(tensors[key])


def describe_host(host: PreTrainedModel, anatomy: Anatomy) -> dict[str, Any]:
    """What has to be the same in a host that the inlay is loaded into, and the host's name."""
    config = host.config.get_text_config()
    return {
        "family": anatomy.family,
        "hidden_size": anatomy.width,
        "layers": dict(anatomy.depth),
        "heads": getattr(config, "num_attention_heads", None),
        "name": str(getattr(host.config, "name_or_path", "") or ""),
    }


def host_mismatches(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [
        f"it was made for a host with {what} {saved.get(what)!r}, this one has {here[what]!r}"
        for what in ("family", "hidden_size", "layers", "heads") if saved.get(what) != here[what]
    ]  # fmt: skip


def names_here(saved: dict[str, str], inlays: Inlays) -> dict[str, str]:
    """Each member's name on this host. It may have been renamed; then its weights identify it."""
    found = {m: m for m, wanted in saved.items() if m in inlays and identity(inlays[m]) == wanted}
    if len(found) < len(saved):
        others = {identity(inlay): inlay.name for inlay in inlays if inlay.name not in found}
        found |= {m: others.pop(wanted) for m, wanted in saved.items() if m not in found and wanted in others}
    here = {m: found.get(m, m) for m in saved}
    return here if len(set(here.values())) == len(saved) else {m: m for m in saved}


def member_mismatches(saved: dict[str, str], inlays: Inlays, any_members: bool) -> list[str]:
    problems = [f"its member {member!r} is not on this host; load it first" for member in saved if member not in inlays]
    if not any_members:
        problems += [
            f"its member {member!r} is not the one it was trained with: the weights differ "
            f"(any_members=True loads it anyway)"
            for member, wanted in saved.items() if member in inlays and identity(inlays[member]) != wanted
        ]  # fmt: skip
    return problems


def identity(inlay: Inlay) -> str:
    """What identifies a member: the fingerprint of the file it came from, or its own if it has changed since."""
    now = fingerprint(inlay.tensors())
    return inlay.origin[0] if inlay.origin is not None and inlay.origin[1] == now else now


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensor_mismatches(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    problems = [f"tensor {key} is missing" for key in wanted.keys() - found.keys()]
    problems += [f"tensor {key} is not expected" for key in found.keys() - wanted.keys()]
    problems += [
        f"tensor {key} has shape {tuple(found[key].shape)}, expected {tuple(wanted[key].shape)}"
        for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape
    ]  # fmt: skip
    return sorted(problems)
