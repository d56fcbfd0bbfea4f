"""Read a folder of peft.

Which modules have a LoRA is told by the keys, and checked against target_modules as peft reads them. `fan_in_fan_out`
is ignored: the host's own module says whether its weight is transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from inlay.anatomy.modules import inside
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import misfit
from inlay.checkpoints.foreign.files import Folder, Tensors, blaming, check_size, read_tensors, shown
from inlay.checkpoints.foreign.heads import logits_weight
from inlay.checkpoints.foreign.keys import filled
from inlay.checkpoints.foreign.patterns import Patterns
from inlay.checkpoints.foreign.peft import prompts_prefixes_ia3
from inlay.checkpoints.foreign.peft.keys import (
    LEAVES,
    ROOT,
    as_differences,
    host_bias,
    key_table,
    places_of,
    whole_places,
    without_copies,
    without_host_tensors,
    without_saved,
)
from inlay.checkpoints.foreign.peft.options import BIASES, CONFIG, PICKLE, SAFE, Bias, PeftOptions, read_options
from inlay.checkpoints.foreign.peft.targets import by_pattern, host_modules, saved_by, target_problems
from inlay.errors import ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay, key_of
from inlay.host.verbs import free_name, registering
from inlay.methods import LoRA
from inlay.methods.lora import LowRankChange


def reader_of(folder: Folder) -> Callable[[PreTrainedModel, Folder, str | None, bool, bool], str] | None:
    """What reads a folder of peft, whose config has a `peft_type`."""
    there = folder.has(CONFIG) and not folder.has("adapter_setup.json")
    return load if there and "peft_type" in folder.object(CONFIG) else None


def load(host: PreTrainedModel, folder: Folder, name: str | None, pickled: bool, with_head: bool) -> str:
    """Set an inlay into a host, under the name given or the folder's."""
    name = folder.path.resolve().name if name is None else name
    free_name(host, name)
    with registering(host) as inlays:
        inlays.admit(host, read(host, inlays.anatomy, folder, name, pickled, with_head))
    return name


def read(
    host: PreTrainedModel, anatomy: Anatomy, folder: Folder, name: str, pickled: bool, with_head: bool = True
) -> Inlay:  # fmt: skip
    """The inlay of a folder, not yet on the host."""
    if folder.object(CONFIG).get("peft_type") in prompts_prefixes_ia3.KINDS:
        return prompts_prefixes_ia3.read(host, anatomy, folder, name, pickled, with_head)
    wanted = read_options(folder)
    found = without_copies(read_tensors(folder.path, SAFE, PICKLE, pickled), folder)
    if not with_head:
        found = without_saved(found, wanted.modules_to_save or (), ROOT)
    places = whole_places(anatomy)
    modules = _lora_modules(found, places, folder)
    bias = BIASES[wanted.bias] if _has_biases(wanted, modules, host, anatomy) else "none"
    with blaming(folder.path):
        if problems := target_problems(wanted, modules, places, anatomy.head):
            raise misfit(folder.path, problems)
        check_size(f"r = {wanted.r}", wanted.r, found)
        saved = _saved_modules(wanted, modules, host, anatomy)
        head = _head(host, anatomy, saved, found) if saved and with_head else None
        draft = Inlay(name, _method(wanted, modules, places, bias), head).fill(host, anatomy, "meta")
        table = key_table(draft, anatomy, host, saved)
        found = without_host_tensors(found, host, table)
        values = as_differences(host, anatomy, found, modules, saved)
        inlay = filled(draft, table, values, host, anatomy, folder.path)
        if lost := below_own_head(inlay, anatomy):
            _move_into_copies(inlay, lost, anatomy)
            rest = [path for path in modules if places[path] not in lost]
            inlay.method = _method(wanted, rest, places, bias)
    return inlay


def _lora_modules(found: Tensors, places: Mapping[str, Place], folder: Folder) -> list[str]:
    """The modules that have a LoRA, in the host's order."""
    named = {
        key.removeprefix(ROOT).removesuffix(f".{leaf}") for key in found for leaf in LEAVES if key.endswith(f".{leaf}")
    }
    odd = [f"it changes {shown(path)}, which is no linear map of this host" for path in sorted(named - places.keys())]
    odd += [
        f"it changes the embeddings, which an inlay leaves alone: {shown(key)}"
        for key in sorted(found) if ".lora_embedding_" in key
    ]  # fmt: skip
    if odd:
        raise misfit(folder.path, odd)
    if not named:
        raise misfit(folder.path, ["it has no lora_A and lora_B"])
    return [path for path in places if path in named]


def _has_biases(wanted: PeftOptions, modules: Iterable[str], host: PreTrainedModel, anatomy: Anatomy) -> bool:
    """Whether there are biases to train at all: T5 and Llama have none."""
    paths = modules if wanted.bias == "lora_only" else [place.module for place in anatomy.of_kind("bias", "head_bias")]
    return any(host_bias(host, path) is not None for path in paths)


def _saved_modules(wanted: PeftOptions, modules: Iterable[str], host: PreTrainedModel, anatomy: Anatomy) -> list[str]:
    """The modules of the host's head that the file has copies of; peft lists names that need not exist."""
    saved = saved_by(wanted.modules_to_save or (), [path for path, _ in host_modules(host)])
    odd = [path for path in saved if path not in anatomy.head]
    if odd:
        raise ConfigError(
            f"modules_to_save: Inlay keeps own copies of a head's modules ({', '.join(anatomy.head)}), "
            f"not of {', '.join(odd)}"
        )
    replaced = [path for path in modules if inside(path, saved)]
    if replaced:
        raise ConfigError(f"{', '.join(replaced)} has a LoRA, but lies in a module that modules_to_save replaces")
    return saved


def _head(host: PreTrainedModel, anatomy: Anatomy, saved: Sequence[str], found: Tensors) -> Head:
    """A copy of the host's head, with as many outputs as the file has."""
    name = logits_weight(host, anatomy)
    weight = found.get(f"{ROOT}{name}")
    if name is None or weight is None or anatomy.head[-1] not in saved:
        return Head()
    outputs = host.get_parameter(name).shape[0]
    return Head() if weight.shape[0] == outputs else Head(labels=weight.shape[0])


def _method(wanted: PeftOptions, modules: Sequence[str], places: Mapping[str, Place], bias: Bias) -> LoRA:
    chosen, patterns = [places[path] for path in modules], Patterns()
    ranks = {places[path].id: by_pattern(wanted.rank_pattern, path, wanted.r, patterns) for path in modules}
    alphas = {places[path].id: by_pattern(wanted.alpha_pattern, path, wanted.lora_alpha, patterns) for path in modules}
    return LoRA(
        rank=wanted.r, alpha=wanted.lora_alpha, dropout=wanted.lora_dropout, rank_stabilised=wanted.use_rslora,
        targets=_targets(chosen, places.values()), bias=bias,
        ranks={place: rank for place, rank in ranks.items() if rank != wanted.r},
        alphas={place: alpha for place, alpha in alphas.items() if alpha != wanted.lora_alpha},
    )  # fmt: skip


def _targets(chosen: Sequence[Place], places: Iterable[Place]) -> tuple[str, ...]:
    """Roles where all places of a role are chosen, single places otherwise."""
    everybody: dict[str, set[str]] = {}
    for place in places:
        everybody.setdefault(place.kind, set()).add(place.id)
    ids = {place.id for place in chosen}
    return tuple(dict.fromkeys(place.kind if everybody[place.kind] <= ids else place.id for place in chosen))


def below_own_head(inlay: Inlay, anatomy: Anatomy) -> list[Place]:
    """Places inside a module of the host that the inlay's own head replaces, where a change would have no effect."""
    if inlay.head is None:
        return []
    return [
        place for place in places_of(inlay, anatomy)
        if place.changes and place.module not in anatomy.head and inside(place.module, anatomy.head)
    ]  # fmt: skip


def _move_into_copies(inlay: Inlay, lost: Sequence[Place], anatomy: Anatomy) -> None:
    """peft saves single modules of a head, but an own head copies all: add changes of the others to their copies."""
    for place in lost:
        above = next(p for p in anatomy.of_kind("head") if inside(place.module, [p.module]))
        copy: Any = inlay.parts[key_of(above.id)].get_submodule(place.module.removeprefix(f"{above.module}."))
        part: Any = inlay.parts[key_of(place.id)]
        with torch.no_grad():
            if isinstance(part, LowRankChange):
                copy.weight += part.weight()
                del inlay.parts[key_of(place.id)]
            elif copy.bias is not None:
                copy.bias += part.bias
                part.bias.zero_()
