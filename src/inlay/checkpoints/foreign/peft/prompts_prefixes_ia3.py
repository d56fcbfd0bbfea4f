"""Prompts, prefixes and IA3 of peft, both ways.

    PROMPT_TUNING   prompt_embeddings (P, D); twice as many for an encoder-decoder, of which the encoder's come first
    PREFIX_TUNING   prompt_embeddings (P, L · 2 · W): a key and a value for each layer; real tokens move by P positions
    IA3             base_model.model.<module>.ia3_l (D_out, 1), or (1, D_in) where the input is rescaled

Refused, because peft computes something else: prompts on encoders, whose classifiers read the prompt's first token
there, and prefixes on encoder-decoders, where the prefix has positions of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from inlay.anatomy.modules import last_word
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import copy_into, misfit, not_finite, tensor_mismatches
from inlay.checkpoints.foreign.files import (
    Files,
    Folder,
    JsonObject,
    Tensors,
    blaming,
    check_size,
    options,
    read_tensors,
    shown,
)
from inlay.checkpoints.foreign.heads import host_name, logits_weight
from inlay.checkpoints.foreign.peft.heads import check_head, head_tensors, saved_modules
from inlay.checkpoints.foreign.peft.keys import ROOT, places_of, whole_places, without_saved
from inlay.checkpoints.foreign.peft.options import CLASSIFIER, CONFIG, NOTES, PICKLE, SAFE, task_type
from inlay.checkpoints.foreign.peft.targets import saved_by, without_a_scale
from inlay.config import Config
from inlay.errors import ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay
from inlay.methods import IA3, Method, Prefix, Prompt

KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "IA3")
VECTORS = "prompt_embeddings"
CLASSIFIERS = ("classifier", "score")
"""What peft saves of every classifier, beside a prompt or a prefix."""


class InFrontOptions(Config):
    """PromptTuningConfig and PrefixTuningConfig of peft 0.21."""

    peft_type: str
    num_virtual_tokens: int = Field(ge=1)
    token_dim: Annotated[int | None, Field(ge=1)] = None
    num_layers: Annotated[int | None, Field(ge=1)] = None
    num_attention_heads: int | None = None
    num_transformer_submodules: Annotated[int | None, Field(ge=1, le=2)] = None
    modules_to_save: tuple[str, ...] | None = None
    # only said of training and its start: what is saved is what they gave
    encoder_hidden_size: int | None = None
    prefix_projection: bool = False
    init_weights: Any = None
    prompt_tuning_init: str | None = None
    prompt_tuning_init_text: Any = None
    tokenizer_name_or_path: Any = None
    tokenizer_kwargs: Any = None
    prompt_tuning_init_state_dict_path: Any = None


class IA3Options(Config):
    """IA3Config of peft 0.21. Which modules are rescaled, and where, is told by the keys and their shapes."""

    peft_type: str
    target_modules: tuple[str, ...] | str | None = None
    feedforward_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    modules_to_save: tuple[str, ...] | None = None
    fan_in_fan_out: bool = False
    init_ia3_weights: bool = True


def read(
    host: PreTrainedModel, anatomy: Anatomy, folder: Folder, name: str, pickled: bool, with_head: bool = True
) -> Inlay:  # fmt: skip
    """The inlay of a folder, not yet on the host."""
    told = {key: value for key, value in folder.object(CONFIG).items() if key not in NOTES}
    kind = str(told.get("peft_type"))
    found = read_tensors(folder.path, SAFE, PICKLE, pickled)
    root = ROOT if kind == "IA3" else "base_model."
    with blaming(folder.path):
        if kind == "IA3":
            scaling = options(IA3Options, told, folder / CONFIG)
            saving = scaling.modules_to_save or ()
            method, values, used = _ia3(anatomy, folder, found, scaling)
        else:
            wanted = options(InFrontOptions, told, folder / CONFIG)
            saving = (*(wanted.modules_to_save or ()), *CLASSIFIERS)
            make = _prompt if kind == "PROMPT_TUNING" else _prefix
            method, values = make(anatomy, wanted, _vectors(wanted, found, folder))
            used = {VECTORS}
        if not with_head:
            found = without_saved(found, saving, root)
        head, saved, kept = _head(host, anatomy, found, root) if with_head else (None, {}, set())
        draft = Inlay(name, method, head).fill(host, anatomy, "meta")
        own = {key: tensor for key, tensor in draft.tensors().items() if not key.startswith("head.")}
        problems = tensor_mismatches(own, values)
        problems += [f"tensor {shown(key)} is not expected" for key in sorted(found.keys() - used - kept)]
        problems += [f"tensor {shown(key)} has numbers that are not finite" for key in not_finite(found)]
        if problems:
            raise misfit(folder.path, problems)
        return _filled(host, anatomy, folder, draft, values, saved)


def _filled(
    host: PreTrainedModel, anatomy: Anatomy, folder: Folder, draft: Inlay, values: Tensors, saved: Tensors
) -> Inlay:  # fmt: skip
    """The draft's inlay with the tensors of the file; what the file does not have of a head is the host's own."""
    with torch.random.fork_rng(devices=[]):
        inlay = Inlay(draft.name, draft.method, draft.head).fill(host, anatomy)
    here = {key: tensor.clone() for key, tensor in inlay.tensors().items() if key.startswith("head.")}
    if problems := tensor_mismatches(here, here | saved):
        raise misfit(folder.path, problems)
    copy_into(inlay, here | saved | values)
    return inlay


def _vectors(wanted: InFrontOptions, found: Tensors, folder: Folder) -> Tensor:
    """What stands in front, as the file has it."""
    check_size(f"num_virtual_tokens = {wanted.num_virtual_tokens}", wanted.num_virtual_tokens, found)
    vectors = found.get(VECTORS)
    if vectors is None or vectors.dim() != 2:
        raise misfit(folder.path, [f"it has no {VECTORS}"])
    return vectors


def _prompt(anatomy: Anatomy, wanted: InFrontOptions, vectors: Tensor) -> tuple[Method, Tensors]:
    _check_decoder(anatomy)
    length, stacks = wanted.num_virtual_tokens, wanted.num_transformer_submodules or len(anatomy.depth)
    own = vectors[:length] if vectors.shape[0] == stacks * length else vectors
    return Prompt(length=length), {"tokens.table.weight": own}


def _check_decoder(anatomy: Anatomy) -> None:
    """Refuse a prompt on an encoder alone."""
    if "decoder" not in anatomy.depth:
        raise ConfigError("peft lets an encoder's classifier read the prompt's first token, and Inlay the text's")


def _prefix(anatomy: Anatomy, wanted: InFrontOptions, vectors: Tensor) -> tuple[Method, Tensors]:
    places = _layers(anatomy)
    parts = vectors.chunk(len(places), 1) if vectors.shape[1] % len(places) == 0 else (vectors,) * len(places)
    method = Prefix(length=wanted.num_virtual_tokens, shift=True)
    return method, {f"{p.id}.table.weight": part for p, part in zip(places, parts, strict=True)}


def _layers(anatomy: Anatomy) -> list[Place]:
    if len(anatomy.depth) > 1:
        raise ConfigError("in an encoder-decoder peft gives the prefix positions of its own, which Inlay does not")
    return anatomy.attention_places("self_attention")


def _ia3(
    anatomy: Anatomy, folder: Folder, found: Tensors, wanted: IA3Options
) -> tuple[Method, Tensors, set[str]]:  # fmt: skip
    whole = whole_places(anatomy)
    inputs = {place.module: place for place in anatomy.places.values() if place.acts == "input"}
    values: Tensors = {}
    problems = []
    chosen: dict[str, Place] = {}
    used = {key for key in found if key.startswith(ROOT) and key.endswith(".ia3_l")}
    for key in sorted(used):
        path, tensor = key.removeprefix(ROOT).removesuffix(".ia3_l"), found[key]
        place = (inputs if tensor.dim() == 2 and tensor.shape[0] == 1 else whole).get(path)
        if place is None:
            problems.append(f"it rescales {shown(path)}, which Inlay cannot on this host")
            continue
        values[f"{place.id}.scale.weight"] = tensor.flatten()
        chosen[place.id] = place
    if not used:
        problems.append("it has no ia3_l")
    paths = [key.removeprefix(ROOT).removesuffix(".ia3_l") for key in used]
    excluded, saved = wanted.exclude_modules or (), wanted.modules_to_save or ()
    problems += [
        f"{path} is among the target_modules, but its tensors are missing"
        for path in without_a_scale(wanted.target_modules or (), excluded, saved, whole, paths)
    ]
    if problems:
        raise misfit(folder.path, problems)
    kinds = dict.fromkeys(place.kind for place in chosen.values())
    method = IA3(
        outputs=tuple(kind for kind in kinds if not kind.endswith(".input")),
        inputs=tuple(kind.removesuffix(".input") for kind in kinds if kind.endswith(".input")),
        leave_out=anatomy.layers_without(chosen.values()),
    )
    if missing := [place.id for place in method.places(anatomy) if place.id not in chosen]:
        raise misfit(folder.path, [f"it rescales {', '.join(kinds)}, but not {', '.join(missing)}"])
    return method, values, used


def _head(host: PreTrainedModel, anatomy: Anatomy, found: Tensors, root: str) -> tuple[Head | None, Tensors, set[str]]:
    """The host's head as the file has it: with its labels, its tensors by our names, and their keys."""
    keys, own = {}, {}
    for place in anatomy.of_kind("head"):
        for leaf, tensor in host.get_submodule(place.module).state_dict().items():
            if (key := f"{root}{place.module}.{leaf}") in found:
                keys[f"{place.id}.{leaf}"], own[f"{place.id}.{leaf}"] = key, tensor.cpu()
    used = set(keys.values())
    if all(torch.equal(found[theirs], own[ours].to(found[theirs].dtype)) for ours, theirs in keys.items()):
        return None, {}, used  # the host's own, or none
    name = logits_weight(host, anatomy)
    weight = found.get(f"{root}{name}")
    outputs = None if name is None else host.get_parameter(name).shape[0]
    head = Head() if weight is None or weight.shape[0] == outputs else Head(labels=weight.shape[0])
    return head, {ours: found[theirs] for ours, theirs in keys.items()}, used


def write(host: PreTrainedModel, anatomy: Anatomy, inlay: Inlay) -> Files:
    """The files of a prompt, a prefix or an IA3 inlay."""
    method, task = inlay.method, task_type(host)
    check_head(inlay)
    saved = saved_modules(inlay, anatomy, host) if inlay.head is not None else []
    if isinstance(method, IA3):
        config, found = _write_ia3(anatomy, inlay, method)
        found |= head_tensors(inlay, anatomy, saved, ROOT)
        task = None if task == CLASSIFIER else task  # with it, peft would want a head in every file
    else:
        if saved and task != CLASSIFIER:
            raise ConfigError("beside prompts and prefixes peft saves only the head of a classifier")
        if isinstance(method, Prompt):
            config, found = _write_prompt(host, anatomy, inlay, method)
        else:
            assert isinstance(method, Prefix)
            config, found = _write_prefix(host, anatomy, inlay, method)
        if task == CLASSIFIER:
            found |= _classifier(host, anatomy) | head_tensors(inlay, anatomy, saved, "base_model.")
    notes = {"inference_mode": True, "task_type": task, "modules_to_save": [*map(last_word, saved)] or None}
    notes["base_model_name_or_path"] = host_name(host)
    return {CONFIG: config | notes, SAFE: {k: t.detach().cpu().clone().contiguous() for k, t in found.items()}}


def _write_prompt(
    host: PreTrainedModel, anatomy: Anatomy, inlay: Inlay, method: Prompt
) -> tuple[JsonObject, Tensors]:  # fmt: skip
    _check_decoder(anatomy)
    twice = 2 if len(anatomy.depth) > 1 else 1
    config = _in_front(host, anatomy, "PROMPT_TUNING", method.length, anatomy.places["tokens"].d_out, twice)
    return config, {VECTORS: inlay.tensors()["tokens.table.weight"].repeat(twice, 1)}


def _write_prefix(
    host: PreTrainedModel, anatomy: Anatomy, inlay: Inlay, method: Prefix
) -> tuple[JsonObject, Tensors]:  # fmt: skip
    places, tensors = _layers(anatomy), inlay.tensors()
    if method.reparametrised or method.leave_out or not method.shift:
        raise ConfigError("peft has prefixes in every layer, flat, and moves positions: merge it, and use shift=True")
    config = _in_front(host, anatomy, "PREFIX_TUNING", method.length, places[0].d_out, 1)
    vectors = torch.cat([tensors[f"{place.id}.table.weight"] for place in places], 1)
    return config | {"prefix_projection": False}, {VECTORS: vectors}


def _classifier(host: PreTrainedModel, anatomy: Anatomy) -> Tensors:
    """The host's own head, which beside a prompt or a prefix peft wants in the file of every classifier."""
    return {
        f"base_model.{path}.{leaf}": tensor
        for path in saved_by(CLASSIFIERS, anatomy.head)
        for leaf, tensor in host.get_submodule(path).state_dict().items()
    }


def _in_front(host: PreTrainedModel, anatomy: Anatomy, kind: str, length: int, width: int, modules: int) -> JsonObject:
    text = host.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) if kind == "PREFIX_TUNING" else None
    return {
        "peft_type": kind, "num_virtual_tokens": length, "token_dim": width, "num_layers": max(anatomy.depth.values()),
        "num_attention_heads": heads or text.num_attention_heads, "num_transformer_submodules": modules,
    }  # fmt: skip


def _write_ia3(anatomy: Anatomy, inlay: Inlay, method: IA3) -> tuple[JsonObject, Tensors]:
    found: Tensors = {}
    modules: dict[str, Sequence[int]] = {}
    for place in (place for place in places_of(inlay, anatomy) if place.changes):
        if place.projection is not None and place.projection.parts > 1:
            raise ConfigError(f"{place.id} is a part of a fused module, of which peft can only rescale the whole: qkv")
        tensor = inlay.tensors()[f"{place.id}.scale.weight"]
        shape = (1, -1) if place.acts == "input" else (-1, 1)
        if place.module in modules:
            raise ConfigError(f"peft can rescale either the input or the output of {place.module}")
        modules[place.module] = shape
        found[f"{ROOT}{place.module}.ia3_l"] = tensor.view(shape)
    inputs = sorted(module for module, shape in modules.items() if shape[0] == 1)
    return {"peft_type": "IA3", "target_modules": sorted(modules), "feedforward_modules": inputs}, found
