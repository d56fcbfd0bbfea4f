"""Save and load: a folder of JSON and safetensors, which is verified before anything on the host changes.

    <folder>/inlay.json            what it is: format, method, host, head, labels, versions, digests
             weights.safetensors   <place>.<parameter>, shared.<parameter>
             README.md             a model card for people; not read back

`inlay.storage.folders` writes it whole or not at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import last_linear
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.card import card
from inlay.checkpoints.fitting import (
    bytes_of,
    check_memory,
    check_whole,
    copy_into,
    describe_host,
    fingerprint,
    gathered,
    host_mismatches,
    identity,
    member_mismatches,
    misfit,
    names_here,
    not_finite,
    tensor_mismatches,
)
from inlay.checkpoints.manifest import CARD, FORMAT, MANIFEST, WEIGHTS, Manifest, manifest_in
from inlay.errors import CheckpointError, InlayError
from inlay.host.heads import CHOICE, Head
from inlay.host.offload import check_here, in_pieces
from inlay.host.registry import Inlay, Inlays
from inlay.host.verbs import bare, free_name, inlays_of, registering
from inlay.methods.base import method_from
from inlay.storage.files import digest as _digest
from inlay.storage.folders import replacing
from inlay.storage.plain_json import digest_of, finite


def save(
    host: nn.Module, name: str, path: str | os.PathLike[str], *,
    task: str | None = None, metrics: dict[str, float] | None = None, data: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write an inlay to a folder, whole or not at all. `task` and `metrics` are noted in the manifest and the card.

    data: the whole task and the longest input, as `inlay.runs` notes them, so that the inlay can be used alone.

    Where FSDP has the parameters in pieces (`fully_shard`), every process has to call it, and the first one writes.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    for each in (name, *inlay.method.needs):
        check_here(each, inlays[each])
        check_whole(inlays[each], model, inlays.anatomy)
    manifest = _manifest_of(model, inlay, inlays, task, metrics or {}, data)
    tensors = _apart({key: tensor.detach().cpu().contiguous() for key, tensor in gathered(inlay.tensors()).items()})
    if broken := not_finite(tensors):
        raise CheckpointError(
            f"{name!r} holds numbers that are not finite ({', '.join(broken[:4])}) and is not saved: its training has "
            f"diverged. Train again with a smaller learning rate."
        )
    if not any(map(in_pieces, inlay.tensors().values())):
        return write(Path(path), manifest, tensors, card(manifest, tensors))
    try:
        if torch.distributed.get_rank() == 0:
            write(Path(path), manifest, tensors, card(manifest, tensors))
    finally:
        torch.distributed.barrier()  # all processes have gathered, and go on when the folder is there
    return Path(os.path.abspath(path))


def _manifest_of(
    host: PreTrainedModel, inlay: Inlay, inlays: Inlays, task: str | None, metrics: dict[str, float],
    data: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """The manifest of an inlay, without its files; refused if it cannot be written as JSON."""
    manifest = {
        "format": FORMAT,
        "kind": "inlay",
        "name": inlay.name,
        "method": inlay.method.describe(),
        "host": describe_host(host, inlays.anatomy),
        "head": None if inlay.head is None else inlay.head.described(),
        "norms": inlay.norms,
        "task": task,
        "metrics": finite({key: _as_number(value) for key, value in metrics.items()}),
        "versions": {package: importlib.metadata.version(package) for package in ("inlay", "torch", "transformers")},
        "members": {member: identity(inlays[member]) for member in inlay.method.needs},
    }
    if data is not None:
        manifest["data"] = data
    try:
        digest_of(manifest)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{inlay.name!r} is not saved: task, metrics and data are noted as JSON. {error}"
        ) from None
    return manifest


def _as_number(value: Any) -> Any:
    """A single number of torch or numpy, as metrics often are, as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with memory of its own: the bias of BERT's head for words has two names, and is written twice."""
    owners = {tensor.untyped_storage().data_ptr(): key for key, tensor in tensors.items()}
    mine = {key: owners[tensor.untyped_storage().data_ptr()] == key for key, tensor in tensors.items()}
    return {key: tensor if mine[key] else tensor.clone() for key, tensor in tensors.items()}


def load_ours(
    host: PreTrainedModel, folder: Path, name: str | None,
    any_members: bool = False, any_host: bool = False, with_head: bool = True,
) -> str:  # fmt: skip
    """Set a saved inlay into a host, with or without its head; returns its name."""
    manifest, tensors = read(folder)
    whole = fingerprint(tensors)
    if not with_head:
        manifest = manifest.model_copy(update={"head": None})
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("head.")}
        if not tensors:
            raise CheckpointError(f"{folder} is nothing but a head, so nothing is left without it.")
    name = manifest.name if name is None else name
    free_name(host, name)
    with registering(host) as inlays, torch.random.fork_rng(devices=[]):
        problems = host_mismatches(manifest.host, describe_host(host, inlays.anatomy), any_host)
        here = names_here(manifest.members, inlays)
        members = {here[member]: wanted for member, wanted in manifest.members.items()}
        problems += member_mismatches(members, inlays, any_members)
        try:
            head = None if manifest.head is None else _head(manifest.head, tensors, host, inlays.anatomy)
            method = method_from(manifest.method)
            if set(method.needs) != set(manifest.members):
                problems.append("its settings and its manifest name different members")
            else:
                method = method.renamed(here)
            inlays.check_members(tuple(member for member in members if member in inlays))
            draft = Inlay(name, method, head, manifest.norms).fill(host, inlays.anatomy, device="meta")
            problems += tensor_mismatches(draft.tensors(), tensors)
            check_memory(bytes_of([*draft.parameters(), *draft.buffers()]), "it")
        except InlayError as error:
            problems.append(str(error))
        except (RuntimeError, OverflowError, MemoryError) as error:  # torch about sizes that no tensor has
            problems.append(f"it cannot be built: {str(error).splitlines()[0]}")
        if problems:
            raise misfit(folder, problems)
        inlay = Inlay(name, method, head, manifest.norms).fill(host, inlays.anatomy)
        copy_into(inlay, tensors)
        inlay.origin = whole, fingerprint(inlay.tensors())
        inlays.admit(host, inlay)
    return name


def _head(saved: dict[str, Any], tensors: dict[str, Tensor], host: PreTrainedModel, anatomy: Anatomy) -> Head:
    """The saved head. Choice heads once left their outputs to the host's class, which is another one now."""
    head = Head(**saved)
    if head.pooling is None or head.names is not None or not anatomy.head:
        return head
    outputs = [tensor.shape[0] for key, tensor in tensors.items() if key.startswith("head.") and tensor.dim() == 2]
    own = last_linear(host.get_submodule(anatomy.head[-1]))
    if outputs and own is not None and outputs[-1:] == [1] and own[1].out_features != 1:
        return head.model_copy(update={"labels": CHOICE})
    return head


def write(folder: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], text: str) -> Path:
    """Write the folder; it is complete on disk before it gets its name."""
    with replacing(folder, (MANIFEST,)) as temporary:
        (temporary / CARD).write_text(text, encoding="utf-8")
        safetensors.torch.save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        whole = manifest | {"files": {WEIGHTS: _digest(temporary / WEIGHTS)}}
        whole["sha256"] = digest_of(whole)
        (temporary / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(os.path.abspath(folder))


def read(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Manifest and tensors of a folder, both verified by their digests."""
    manifest = manifest_in(folder)
    problems = []
    for file, digest in manifest.files.items():
        if Path(file).name != file:
            problems.append(f"{file} is not a plain file name")
        elif not (folder / file).is_file():
            problems.append(f"{file} is missing")
        elif _digest(folder / file) != digest:
            problems.append(f"{file} is cut or altered: its sha256 is not the one in {MANIFEST}")
    if WEIGHTS not in manifest.files:
        problems.append(f"{MANIFEST} names no {WEIGHTS}")
    if problems:
        raise CheckpointError(f"{folder} is not whole:\n" + "\n".join(f"  - {p}" for p in problems))
    check_memory((folder / WEIGHTS).stat().st_size, str(folder / WEIGHTS))
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        broken = not_finite(tensors)  # shapes that no tensor can have are noticed here
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from None
    if broken:
        raise CheckpointError(
            f"{folder / WEIGHTS} holds numbers that are not finite ({', '.join(broken[:4])}): "
            f"its training has diverged."
        )
    return manifest, tensors
