"""Folders of the `adapters` library: an adapter, a fusion, or a whole setup, each with or without a head.

adapter_config.json          adapter.safetensors                 one adapter
adapter_fusion_config.json   model_adapter_fusion.safetensors    a fusion, whose members are on the host
head_config.json             model_head.safetensors              beside either: a head
adapter_setup.json           <adapter>/ …  <a,b>/                a setup: a folder for each adapter and fusion
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inlay.anatomy import Anatomy
from inlay.checkpoint import misfit
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError, InlayError
from inlay.host import free_name, newcomer
from inlay.interop import adapterhub_heads as heads
from inlay.interop.adapterhub_methods import (
    BottleneckOptions,
    FusionOptions,
    LoraOptions,
    as_trained,
    fusion_of,
    fusion_options,
    method_of,
    options_kind,
    options_of,
)
from inlay.interop.files import Tensors, check_size, options, read_object, read_tensors
from inlay.interop.rooms import Keys
from inlay.interop.spots import Spot, built, scatter
from inlay.methods import Fusion
from inlay.registry import Inlay, Inlays
from inlay.setup import Average, Setup, Stack

ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
FUSION = ("adapter_fusion_config.json", "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
SETUP = "adapter_setup.json"
VERSION = "adapters.1.3.0"
"""The version whose meaning of every option the written files have."""
DEEPEST_SETUP = 8
_OLD_NAMES = (
    "attention_text_task_adapters",
    "attention_text_lang_adapters",
    "layer_text_task_adapters",
    "layer_text_lang_adapters",
)


class AdapterFile(Config):
    """adapter_config.json; adapter_fusion_config.json also has the members' names."""

    config: dict[str, Any]
    name: str
    adapter_names: tuple[str, ...] | None = None
    hidden_size: int | None = None
    model_class: str | None = None
    model_name: str | None = None
    model_type: str | None = None
    version: str | None = None
    config_id: str | None = None
    type: str | None = None


def load(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> str:
    """Set an adapter or a fusion into a host."""
    read, file = (_read_adapter, ADAPTER[0]) if (folder / ADAPTER[0]).is_file() else (_read_fusion, FUSION[0])
    name = _our_name(folder / file) if name is None else name
    free_name(host, name)
    with newcomer(host) as inlays:
        inlays.admit(host, read(host, inlays, folder, name, pickled))
    return name


def load_head(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> str:
    """Set a head that was saved by itself into a host, as an inlay that is nothing but a head."""
    from inlay.learning.headonly import HeadOnly

    with newcomer(host) as inlays:
        head = heads.read_head(folder, host, inlays.anatomy, pickled)
        assert head is not None
        name = name or head.name or folder.resolve().name
        free_name(host, name)
        inlay = Inlay(name, HeadOnly(), head.head)
        inlays.admit(
            host,
            built(host, inlays.anatomy, inlay, lambda i: _head_spots(i, inlays.anatomy, head), head.tensors, folder),
        )
    return name


def _our_name(file: Path) -> str:
    """Their name; a fusion is named after its members, with commas, which our names cannot have."""
    return options(AdapterFile, read_object(file), file).name.replace(",", ".")


def load_setup(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> Setup:
    """Set all adapters and fusions of a setup into a host, or none of them; the setup is not activated."""
    file = folder / SETUP
    if name is not None:
        raise CheckpointError(
            f"{folder} is a whole setup of several adapters, which one name cannot name. Leave name out."
        )
    found = read_object(file)
    odd = found.keys() - {"adapter_setup", "head_setup", "version"}
    if odd:
        raise CheckpointError(f"{file} has unknown options: {', '.join(sorted(odd))}.")
    members: dict[str, str] = {}
    setup = _parse(found.get("adapter_setup"), file, members, DEEPEST_SETUP)
    top = _top(setup)
    with newcomer(host) as inlays, _together(inlays) as admit:
        for theirs, ours in members.items():
            free_name(host, ours)
            read = _read_fusion if (folder / theirs / FUSION[0]).is_file() else _read_adapter
            admit(host, read(host, inlays, folder / theirs, ours, pickled, spare_head=folder if ours == top else None))
    return setup


@contextmanager
def _together(inlays: Inlays) -> Iterator[Any]:
    """All inlays that come in here stay, or after an error none."""
    new: list[str] = []

    def admit(host: PreTrainedModel, inlay: Inlay) -> None:
        inlays.admit(host, inlay)
        new.append(inlay.name)

    try:
        yield admit
    except BaseException:
        for name in new:
            inlays.dismiss(name)
        raise


def _parse(block: Any, file: Path, members: dict[str, str], depth: int) -> Setup:
    """A composition block as a setup; `members` collects their folders with our names, fusions after their members."""
    if (
        not isinstance(block, dict)
        or not isinstance(block.get("children"), list)
        or not block["children"]
        or depth == 0
    ):
        raise CheckpointError(f"{file} has a composition block that is not readable: {str(block)[:200]}.")
    kind, children = block.get("type"), block["children"]
    if kind == "single":
        return _member(children[0], file, members)
    parts = [_parse(child, file, members, depth - 1) for child in children]
    if kind == "Stack":
        return parts[0] if len(parts) == 1 else Stack(*parts)
    if kind == "Average":
        weights = (block.get("kwargs") or {}).get("weights")
        return Average(*parts, weights=weights)
    if kind == "Fuse" and all(isinstance(part, str) for part in parts):
        return _member(",".join(map(str, parts)), file, members)
    raise CheckpointError(
        f"{file}: a {kind!r} of {', '.join(map(repr, parts))} has no counterpart; "
        f"Inlay reads Stack, Average and Fuse of adapters."
    )


def _member(theirs: Any, file: Path, members: dict[str, str]) -> str:
    if not isinstance(theirs, str) or Path(theirs).name != theirs or theirs in ("", ".", ".."):
        raise CheckpointError(f"{file} names {theirs!r}, which is not the name of a folder beside it.")
    return members.setdefault(theirs, theirs.replace(",", "."))


def _top(setup: Setup) -> Setup:
    while isinstance(setup, Stack):
        setup = setup.parts[-1]
    return setup


def _read_adapter(
    host: PreTrainedModel, inlays: Inlays, folder: Path, name: str, pickled: bool, spare_head: Path | None = None
) -> Inlay:  # fmt: skip
    file, tensors, head = _read(host, inlays.anatomy, folder, ADAPTER, pickled, spare_head)
    try:
        config = as_trained(file.config, file.version)
        wanted = options(options_kind(config), config, folder / ADAPTER[0])
        _check_sizes(wanted, inlays.anatomy, tensors)
        inlay = Inlay(name, method_of(wanted, inlays.anatomy), head.head if head else None)
        keys = _keys(host, inlays.anatomy, file.name, tensors)
    except ConfigError as error:
        raise misfit(folder, [str(error)]) from None

    def spots(inlay: Inlay) -> dict[str, Spot]:
        found = keys.spots(inlay) | _head_spots(inlay, inlays.anatomy, head)
        rules = [spot.key for ours, spot in found.items() if ours.endswith("rule") and spot.key not in tensors]
        if rules:
            raise CheckpointError(
                f"the PHM rule {rules[0]} is not in the file, and without it no weight can be computed"
            )
        return found

    return built(host, inlays.anatomy, inlay, spots, tensors | (head.tensors if head else {}), folder)


def _read_fusion(
    host: PreTrainedModel, inlays: Inlays, folder: Path, name: str, pickled: bool, spare_head: Path | None = None
) -> Inlay:  # fmt: skip
    file, tensors, head = _read(host, inlays.anatomy, folder, FUSION, pickled, spare_head)
    wanted = options(FusionOptions, file.config, folder / FUSION[0])
    members = [member.replace(",", ".") for member in file.adapter_names or file.name.split(",")]
    missing = [
        f"its member {member!r} is not on this host; load it first" for member in members if member not in inlays
    ]
    if missing:
        raise misfit(folder, missing)
    try:
        method, idle = fusion_of(wanted, members, inlays, getattr(host.config, "attention_probs_dropout_prob", 0.0))
        keys = _keys(host, inlays.anatomy, file.name, tensors)
    except InlayError as error:
        raise misfit(folder, [str(error)]) from None
    acting = {
        key: tensor
        for key, tensor in tensors.items()
        if not any(key.startswith(keys.fusion(place, "").key) for place in idle)
    }
    inlay = Inlay(name, method, head.head if head else None)
    return built(
        host, inlays.anatomy, inlay, lambda made: keys.spots(made) | _head_spots(made, inlays.anatomy, head),
        acting | (head.tensors if head else {}), folder,
    )  # fmt: skip


def _read(
    host: PreTrainedModel, anatomy: Anatomy, folder: Path, names: tuple[str, str, str], pickled: bool,
    spare_head: Path | None,
) -> tuple[AdapterFile, Tensors, heads.ForeignHead | None]:  # fmt: skip
    config, safe, pickle = names
    file = options(AdapterFile, read_object(folder / config), folder / config)
    here = {"model_type": anatomy.family, "hidden_size": anatomy.width}
    problems = [
        f"it was made for a host with {what} {theirs!r}, this one has {ours!r}"
        for what, ours in here.items() if (theirs := getattr(file, what)) not in (None, ours)
    ]  # fmt: skip
    if problems:
        raise misfit(folder, problems)
    tensors = {_renamed(key): tensor for key, tensor in read_tensors(folder, safe, pickle, pickled).items()}
    head = heads.read_head(folder, host, anatomy, pickled)
    if head is None and spare_head is not None:
        head = heads.read_head(spare_head, host, anatomy, pickled)
    twice = tensors.keys() & (head.tensors.keys() if head else set())
    if twice:
        raise CheckpointError(f"{folder}: adapter and head both have the tensors {', '.join(sorted(twice))}.")
    return file, tensors, head


def _renamed(key: str) -> str:
    """Keys of the library's first versions."""
    for old in _OLD_NAMES:
        key = key.replace(f".{old}.", ".adapters.")
    return key


def _keys(host: PreTrainedModel, anatomy: Anatomy, name: str, tensors: Tensors) -> Keys:
    """They write the base model's name in front of the keys, unless the base model was saved by itself."""
    prefixed = any(key.startswith(f"{host.base_model_prefix}.") for key in tensors)
    return Keys(host, anatomy, name, prefixed)


def _head_spots(inlay: Inlay, anatomy: Anatomy, head: heads.ForeignHead | None) -> dict[str, Spot]:
    return heads.head_spots(inlay, anatomy, head.name) if head else {}


def _check_sizes(wanted: BottleneckOptions | LoraOptions, anatomy: Anatomy, tensors: Tensors) -> None:
    """A few numbers of a config decide how much is allocated: none may ask for more than the file holds."""
    if isinstance(wanted, LoraOptions):
        return check_size(f"r = {wanted.r}", wanted.r, tensors)
    if wanted.phm_layer:
        check_size(f"phm_rank = {wanted.phm_rank}", wanted.phm_rank, tensors)
        return check_size(f"phm_dim = {wanted.phm_dim}", wanted.phm_dim**3, tensors)
    size = int(anatomy.width // min(wanted.factors()))
    check_size(f"reduction_factor = {wanted.reduction_factor}", size, tensors)


def write(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> dict[str, Any]:
    """The files of an inlay in their format, by name."""
    odd = [name for name in (inlay.name, *getattr(inlay.method, "members", ())) if "." in name]
    if odd:
        raise ConfigError(
            f"`adapters` cannot have a dot in a name: {', '.join(odd)}. "
            f"Save it, and load it under another: inlay.load(…, name=…)"
        )
    anatomy = inlays.anatomy
    common = {
        "hidden_size": anatomy.width,
        "model_class": type(host).__name__,
        "model_name": str(getattr(host.config, "name_or_path", "") or "") or None,
        "model_type": anatomy.family,
        "version": VERSION,
    }
    files: dict[str, Any] = {}
    if isinstance(inlay.method, Fusion):
        name, members = ",".join(inlay.method.members), list(inlay.method.members)
        config = fusion_options(inlay, inlays).model_dump(mode="json")
        keys = Keys(host, anatomy, name)
        files[FUSION[0]] = common | {"name": name, "adapter_names": members, "config": config}
        files[FUSION[1]] = _idle_layers(inlay, inlays, keys) | scatter(keys.spots(inlay), inlay.tensors())
    else:
        wanted = options_of(inlay, anatomy)
        gone = {"invertible_adapter"} | ({"architecture"} if isinstance(wanted, BottleneckOptions) else set())
        files[ADAPTER[0]] = common | {"name": inlay.name, "config": wanted.model_dump(mode="json", exclude=gone)}
        files[ADAPTER[1]] = scatter(Keys(host, anatomy, inlay.name).spots(inlay), inlay.tensors())
    if inlay.head is not None:
        head_name, files[heads.CONFIG] = heads.head_file(inlay, host, anatomy, common)
        files[heads.SAFE] = scatter(heads.head_spots(inlay, anatomy, head_name), inlay.tensors())
    return files


def _idle_layers(inlay: Inlay, inlays: Inlays, keys: Keys) -> Tensors:
    """Where no member acts they keep a fusion's weights all the same, and miss them when they are not there."""
    assert isinstance(inlay.method, Fusion)
    _, idle = fusion_of(FusionOptions(), inlay.method.members, inlays, 0.0)
    like = next(iter(inlay.parts.values())).state_dict()
    return {
        keys.fusion(place, leaf).key: torch.zeros_like(tensor, device="cpu")
        for place in idle
        for leaf, tensor in like.items()
    }


def read_back(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, folder: Path) -> Inlay:
    """What a written folder gives when it is read, not yet on the host."""
    read = _read_fusion if isinstance(inlay.method, Fusion) else _read_adapter
    return read(host, inlays, folder, inlay.name, False)
