"""Write an inlay as the files of peft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inlay.anatomy.modules import inside, last_word
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.files import Files, Folder, JsonObject, Tensors
from inlay.checkpoints.foreign.heads import host_name
from inlay.checkpoints.foreign.peft import prompts_prefixes_ia3
from inlay.checkpoints.foreign.peft.heads import check_head, head_tensors, saved_modules
from inlay.checkpoints.foreign.peft.keys import ROOT, bias_key, host_bias, places_of
from inlay.checkpoints.foreign.peft.lora_pair import LoraPair, lora_pairs
from inlay.checkpoints.foreign.peft.options import BIASES, CLASSIFIER, CONFIG, SAFE, PeftOptions, task_type
from inlay.checkpoints.foreign.peft.read import below_own_head, read
from inlay.checkpoints.foreign.peft.targets import target_names
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, Inlays
from inlay.methods import IA3, LoRA, Prefix, Prompt

V = TypeVar("V")


def write(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> Files:
    """The files of an inlay in peft's format, by name."""
    if isinstance(inlay.method, IA3 | Prefix | Prompt):
        return prompts_prefixes_ia3.write(host, inlays.anatomy, inlay)
    anatomy, method = inlays.anatomy, _lora(inlay)
    pairs = lora_pairs(inlay, anatomy, host)
    saved = saved_modules(inlay, anatomy, host)
    _check_saved(inlay, anatomy, pairs, saved)
    tensors = {key: tensor for path, pair in pairs.items() for key, tensor in pair.tensors(path).items()}
    tensors |= _biases(inlay, anatomy, host, pairs, saved) | head_tensors(inlay, anatomy, saved, ROOT)
    return {
        CONFIG: _config(method, pairs, saved, host),
        SAFE: {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()},
    }


def read_back(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, folder: Folder) -> Inlay:
    """What a written folder gives when it is read, not yet on the host."""
    return read(host, inlays.anatomy, folder, inlay.name, False)


def compared(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> Tensors:
    """What has to be the same when it is read back. The LoRAs of one module, q and qkv, are one afterwards."""
    if not isinstance(inlay.method, LoRA):
        return inlay.tensors()
    places = places_of(inlay, inlays.anatomy)
    changed = tuple(f"{place.id}." for place in places if place.projection is not None)
    rest = {key: tensor for key, tensor in inlay.tensors().items() if not key.startswith(changed)}
    pairs = lora_pairs(inlay, inlays.anatomy, host)
    return rest | {key: tensor for path, pair in pairs.items() for key, tensor in pair.tensors(path).items()}


def _lora(inlay: Inlay) -> LoRA:
    """The inlay's method, if peft has all that the inlay has."""
    method = inlay.method
    if not isinstance(method, LoRA):
        raise ConfigError(
            f"peft has no counterpart of the method {method.kind!r}; it knows LoRA, IA3, Prefix and Prompt"
        )
    check_head(inlay)
    return method


def _check_saved(inlay: Inlay, anatomy: Anatomy, pairs: Mapping[str, LoraPair], saved: Sequence[str]) -> None:
    copied = {*saved, *(place.module for place in below_own_head(inlay, anatomy))}
    both = [path for path in pairs if inside(path, copied)]
    if both:
        raise ConfigError(f"it changes {', '.join(both)} and has its own copy of it; peft can do only one of the two")


def _biases(
    inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel, wrapped: Collection[str], saved: Sequence[str]
) -> Tensors:
    """The host's biases plus our differences."""
    found: Tensors = {}
    for place in places_of(inlay, anatomy):
        if place.kind in ("bias", "head_bias") and not inside(place.module, saved):
            bias, change = host_bias(host, place.module), inlay.tensors()[f"{place.id}.bias"]
            if bias is not None:
                found |= dict.fromkeys(bias_key(place.module, wrapped, host).keys, bias + change)
            elif change.any():
                raise ConfigError(
                    f"it gives {place.module} a bias, which the host does not have; "
                    f"peft trains only biases that are there"
                )
    return found


def _config(method: LoRA, pairs: Mapping[str, LoraPair], saved: Sequence[str], host: PreTrainedModel) -> JsonObject:
    ranks = {path: pair.rank for path, pair in pairs.items()}
    alphas = {path: pair.alpha(method.rank_stabilised) for path, pair in pairs.items()}
    rank, alpha = _most_frequent(ranks.values()), _most_frequent(alphas.values())
    config = PeftOptions(
        peft_type="LORA", r=rank, lora_alpha=alpha, lora_dropout=method.dropout,
        use_rslora=method.rank_stabilised,
        bias=next(theirs for theirs, ours in BIASES.items() if ours == method.bias),
        target_modules=target_names(list(pairs), host),
        modules_to_save=tuple(map(last_word, saved)) or None,
        rank_pattern={path: there for path, there in ranks.items() if there != rank},
        alpha_pattern={path: there for path, there in alphas.items() if there != alpha},
        fan_in_fan_out=all(isinstance(host.get_submodule(path), Conv1D) for path in pairs),
    )  # fmt: skip
    return config.model_dump(mode="json", exclude_defaults=True) | {
        "r": config.r,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "bias": config.bias,
        "inference_mode": True,
        "base_model_name_or_path": host_name(host),
        "task_type": None if (task := task_type(host)) == CLASSIFIER else task,  # a LoRA's file may have no head
    }


def _most_frequent(values: Collection[V]) -> V:
    """One rank and one alpha for as many modules as possible: many servers of peft's files know no patterns."""
    return Counter(values).most_common(1)[0][0]
