"""Which key of a peft file is which tensor of an inlay.

A bias is a value in peft, and in an inlay the difference to the host's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.modules import inside
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.files import Folder, Tensors
from inlay.checkpoints.foreign.keys import FileKey, KeyTable
from inlay.checkpoints.foreign.peft.options import SAFE
from inlay.checkpoints.foreign.peft.targets import saved_by
from inlay.errors import CheckpointError
from inlay.host.registry import Inlay, key_of

ROOT = "base_model.model."
LEAVES = {"lora_A.weight": "down.weight", "lora_B.weight": "up.weight"}
"""The ends of their keys of a LoRA, and of ours."""


def whole_places(anatomy: Anatomy) -> dict[str, Place]:
    """Every projection that is a whole module, by that module."""
    return {p.module: p for p in anatomy.places.values() if p.projection is not None and p.projection.parts == 1}


def places_of(inlay: Inlay, anatomy: Anatomy) -> list[Place]:
    return [anatomy.places[place_id] for place_id in inlay.place_ids()]


def bias_key(module: str, wrapped: Collection[str], host: PreTrainedModel) -> FileKey:
    """The key of a module's bias; a module with a LoRA is wrapped. BERT's output layer has its bias under two names."""
    mine, bias = f"{module}.bias", getattr(host.get_submodule(module), "bias", None)
    again = [name for name, p in host.named_parameters(remove_duplicate=False) if p is bias and name != mine]
    key = f"{ROOT}{module}.base_layer.bias" if module in wrapped else f"{ROOT}{mine}"
    return FileKey(key, copies=(f"{ROOT}{again[0]}",) if again else ())


def host_bias(host: PreTrainedModel, module: str) -> Tensor | None:
    bias = getattr(host.get_submodule(module), "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def key_table(inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel, saved: Sequence[str]) -> dict[str, FileKey]:
    """Their key of each tensor. A bias that the host does not have stays zero here and has no key there."""
    places = places_of(inlay, anatomy)
    wrapped = {place.module for place in places if place.projection is not None}
    found: dict[str, FileKey] = {}
    for place in places:
        if place.kind == "head":
            leaves = inlay.parts[key_of(place.id)].state_dict() if place.module in saved else {}
            found |= {f"{place.id}.{leaf}": FileKey(f"{ROOT}{place.module}.{leaf}") for leaf in leaves}
        elif place.projection is None:
            if host_bias(host, place.module) is not None and not inside(place.module, saved):
                found[f"{place.id}.bias"] = bias_key(place.module, wrapped, host)
        else:
            found |= {
                f"{place.id}.{ours}": FileKey(f"{ROOT}{place.module}.{theirs}") for theirs, ours in LEAVES.items()
            }
    return found


def without_copies(found: Tensors, folder: Folder) -> Tensors:
    """With trained biases peft writes those of a saved head three times; the plain key is the one that acts."""
    kept: Tensors = {}
    for key, tensor in found.items():
        plain = re.sub(r"\.modules_to_save(\.default)?\.", ".", key)
        if ".original_module." in key and key.replace(".original_module.", ".") in found:
            continue
        if plain != key and plain in found and not torch.equal(found[plain], tensor):
            raise CheckpointError(f"{folder / SAFE}: {plain} and {key} should be the same.")
        kept[plain] = tensor
    return kept


def without_saved(found: Tensors, names: Sequence[str], root: str) -> Tensors:
    """Without the modules that modules_to_save names: the head."""

    def is_saved(key: str) -> bool:
        words = key.removeprefix(root).split(".")
        return bool(saved_by(names, (".".join(words[:end]) for end in range(1, len(words)))))

    return {key: tensor for key, tensor in found.items() if not is_saved(key)}


def without_host_tensors(found: Tensors, host: PreTrainedModel, table: KeyTable) -> Tensors:
    """Without what peft writes beside a LoRA of the output layer though it is the host's: that layer and embeddings."""
    tensors = (*host.named_parameters(remove_duplicate=False), *host.named_buffers())
    own = {path: tensor.detach() for path, tensor in tensors}
    ours = {key for entry in table.values() for key in entry.keys}

    def is_hosts(key: str, tensor: Tensor) -> bool:
        mine = own.get(key.removeprefix(ROOT).replace(".base_layer.", "."))
        return mine is not None and mine.shape == tensor.shape and torch.equal(mine.cpu(), tensor.to(mine.dtype))

    return {key: tensor for key, tensor in found.items() if key in ours or not is_hosts(key, tensor)}


def as_differences(
    host: PreTrainedModel, anatomy: Anatomy, found: Tensors, wrapped: Sequence[str], saved: Sequence[str]
) -> Tensors:
    """The file's tensors, with trained biases as differences to the host's."""
    changed = dict(found)
    for place in anatomy.of_kind("bias", "head_bias"):
        bias = host_bias(host, place.module)
        if bias is not None and not inside(place.module, saved):
            for key in bias_key(place.module, wrapped, host).keys:
                if key in found and bias.shape == found[key].shape:
                    wide = torch.promote_types(torch.promote_types(found[key].dtype, bias.dtype), torch.float32)
                    changed[key] = found[key].to(bias.device, wide) - bias
    return changed
