"""Whether a saved inlay fits: its host, members and tensors are compared with those that are there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.modules import ATTRIBUTE
from inlay.anatomy.survey import Anatomy
from inlay.errors import CheckpointError
from inlay.host.offload import in_pieces, quantised
from inlay.host.registry import Inlay, Inlays
from inlay.storage.tensor_file import content_digest

SLICE = 512
"""Numbers of each compared weight."""
COMPARED = (torch.float32, torch.float64, torch.bfloat16)


def misfit(folder: Path, problems: list[str]) -> CheckpointError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return CheckpointError(f"{folder} does not fit this host; nothing was changed:\n{listed}")


def check_memory(wanted: int, what: str) -> None:
    """Refuse what no memory of this machine holds, before any of it is taken."""
    there = physical_memory()
    if there is not None and wanted > there:
        raise CheckpointError(
            f"{what} would take {wanted / 1e9:,.1f} GB of memory; this machine has {there / 1e9:,.1f}."
        )


def physical_memory() -> int | None:
    """All memory that this machine has, in bytes; Windows does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, whole: where tensors are in pieces, all processes have to come here."""
    whole: Any = lambda tensor: tensor.full_tensor() if in_pieces(tensor) else tensor
    return {key: whole(tensor) for key, tensor in tensors.items()}


def check_whole(inlay: Inlay, host: PreTrainedModel, anatomy: Anatomy) -> None:
    """Refuse what FSDP1 leaves of an inlay between two passes: smaller tensors or empty ones, which cannot be gathered.

    A process that is alone has no pieces, and nothing is asked.
    """
    found = inlay.tensors()
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if alone or any(map(in_pieces, found.values())):
        return
    with torch.random.fork_rng(devices=[]):  # the run's random numbers stay as they are
        whole = Inlay(inlay.name, inlay.method, inlay.head, inlay.norms).fill(host, anatomy, device="meta").tensors()
    if pieces := sorted(key for key, tensor in found.items() if tensor.shape != whole[key].shape):
        raise CheckpointError(
            f"{inlay.name!r} is not saved: of {', '.join(pieces[:4])} this process has only a piece, as FSDP leaves "
            f"parameters between two passes. Save within `with FullyShardedDataParallel.summon_full_params(host):`, "
            f"which all processes have to enter."
        )


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
        "weights": host_fingerprint(host),
    }


def host_fingerprint(host: PreTrainedModel) -> str | None:
    """A digest of a few slices of the host's weights: its embeddings, and its first, middle and last layers.

    Taken in bfloat16, so that a host that is opened in half precision is the same host. None where the weights cannot
    be compared: quantised, in float16, elsewhere than here or only a piece of them here, or with an inlay folded into
    them.
    """
    inlays = getattr(host, ATTRIBUTE, None)
    if inlays is not None and inlays.folded is not None:
        return None
    body: Any = host.base_model  # without the head, which may be new
    layers: list[Tensor] = [
        weight for name, weight in body.named_parameters()
        if re.search(r"\.\d+\.", name) and not name.startswith(f"{ATTRIBUTE}.") and weight.dim() > 1
    ]  # fmt: skip
    words = getattr(host.get_input_embeddings(), "weight", None)
    chosen = layers[:2] + layers[len(layers) // 2 :][:2] + layers[-2:] + ([words] if isinstance(words, Tensor) else [])
    plain = lambda w: not (w.is_meta or in_pieces(w) or quantised(w)) and w.dtype in COMPARED and w.numel()
    if not chosen or not all(map(plain, chosen)):
        return None
    slices = [weight.detach().reshape(-1)[:SLICE].to("cpu", torch.bfloat16) for weight in chosen]
    return content_digest({str(i): part for i, part in enumerate(slices)})


def host_mismatches(saved: dict[str, Any], here: dict[str, Any], any_host: bool = False) -> list[str]:
    problems = [
        f"it was made for a host with {what} {saved.get(what)!r}, this one has {here[what]!r}"
        for what in ("family", "hidden_size", "layers", "heads") if saved.get(what) != here[what]
    ]  # fmt: skip
    then, now = saved.get("weights"), here["weights"]
    if not problems and not any_host and None not in (then, now) and then != now:
        problems.append(
            f"its host ({saved.get('name') or 'not named'}) had other weights than this one "
            f"({here['name'] or 'not named'}), so that what it learned is of no use here "
            f"(`any_host` loads all the same)"
        )
    return problems


def names_here(saved: dict[str, str], inlays: Inlays) -> dict[str, str]:
    """Each member's name on this host. It may have been renamed; then its weights identify it."""
    found = {m: m for m, wanted in saved.items() if m in inlays and identity(inlays[m]) == wanted}
    if len(found) < len(saved):
        others: dict[str, list[str]] = {}
        for inlay in inlays:
            if inlay.name not in found:
                others.setdefault(identity(inlay), []).append(inlay.name)  # several may have the same weights
        found |= {m: others[wanted].pop(0) for m, wanted in saved.items() if m not in found and others.get(wanted)}
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
    now = fingerprint(gathered(inlay.tensors()))
    return inlay.origin[0] if inlay.origin is not None and inlay.origin[1] == now else now


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    return content_digest(tensors)


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The tensors that hold numbers which are not finite."""
    return sorted(key for key, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all()))


def tensor_mismatches(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    problems = [f"tensor {key} is missing" for key in wanted.keys() - found.keys()]
    problems += [f"tensor {key} is not expected" for key in found.keys() - wanted.keys()]
    problems += [
        f"tensor {key} has shape {tuple(found[key].shape)}, expected {tuple(wanted[key].shape)}"
        for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape
    ]  # fmt: skip
    problems += [
        f"tensor {key} holds {found[key].dtype}, expected floating-point numbers"
        for key in wanted.keys() & found.keys()
        if wanted[key].is_floating_point() and not found[key].is_floating_point()
    ]  # fmt: skip
    return sorted(problems)
