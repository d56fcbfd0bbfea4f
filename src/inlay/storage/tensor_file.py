"""One safetensors file that proves itself: a digest over its tensors and its notes stands in its header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

DIGEST = "sha256"


class Damaged(Exception):
    """The file is there, and is not what was written."""


def pack(tensors: Mapping[str, Tensor], **notes: str) -> bytes:
    """The file's content."""
    whole = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, metadata={**notes, DIGEST: content_digest(whole, notes)})


def unpack(path: Path, *, signed: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and notes. signed: a file without a digest, as earlier versions wrote it, is damaged too."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            notes = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise Damaged(str(error)) from None
    wanted = notes.pop(DIGEST, None)
    old = wanted is None and not signed and len(notes) <= 1  # nothing but the position of a run
    if not old and wanted != content_digest(tensors, notes):
        raise Damaged("its content does not match its sha256")
    return tensors, notes


def content_digest(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> str:
    """A digest of notes, names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    if notes:
        found.update(json.dumps(dict(notes), sort_keys=True).encode())
    for key, tensor in sorted(tensors.items()):
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
