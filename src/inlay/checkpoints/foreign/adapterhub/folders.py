"""Folders of the `adapters` library: an adapter, a fusion, or a whole setup, each with or without a head.

    adapter_config.json          adapter.safetensors                 one adapter
    adapter_fusion_config.json   model_adapter_fusion.safetensors    a fusion, whose members are on the host
    head_config.json             model_head.safetensors              beside either, or alone: a head
    adapter_setup.json           <adapter>/ …  <a,b>/                a setup: a folder for each adapter and fusion

An inlay is built and filled beside the host, and comes in when nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import misfit
from inlay.checkpoints.foreign.adapterhub import heads
from inlay.checkpoints.foreign.adapterhub.layout import Keys
from inlay.checkpoints.foreign.adapterhub.methods import (
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
from inlay.checkpoints.foreign.adapterhub.setups import SETUP, read_setup, uppermost
from inlay.checkpoints.foreign.files import Tensors, check_size, options, read_object, read_tensors, reading
from inlay.checkpoints.foreign.keys import poured, scatter
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay, Inlays
from inlay.host.setup import Setup
from inlay.host.verbs import free_name, newcomer
from inlay.methods import Fusion, Method

ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
FUSION = ("adapter_fusion_config.json", "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
VERSION = "adapters.1.3.0"
"""The version whose meaning of every option the written files have."""
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


@dataclass(frozen=True)
class Source:
    """A folder to read, and for whom."""

    host: PreTrainedModel
    inlays: Inlays
    folder: Path
    pickled: bool = False
    spare_head: Path | None = None
    """Where a head is if the folder has none."""

    @property
    def anatomy(self) -> Anatomy:
        return self.inlays.anatomy

    def read(self, name: str) -> Inlay:
        """The inlay of this folder, not yet on the host."""
        with reading(self.folder):
            if (self.folder / ADAPTER[0]).is_file():
                return _read_adapter(self, name)
            if (self.folder / FUSION[0]).is_file():
                return _read_fusion(self, name)
        raise CheckpointError(f"{self.folder} has neither {ADAPTER[0]} nor {FUSION[0]}.")

    def draft(self, name: str, method: Method, head: Head | None) -> Inlay:
        """The inlay that its config describes, without memory."""
        return Inlay(name, method, head).fill(self.host, self.anatomy, "meta")


def reader_of(folder: Path) -> Callable[[PreTrainedModel, Path, str | None, bool], Setup] | None:
    """What reads a folder of `adapters`, by the files in it."""
    if (folder / SETUP).is_file():
        return load_setup
    if (folder / ADAPTER[0]).is_file() or (folder / FUSION[0]).is_file():
        return load
    return load_head if (folder / heads.CONFIG).is_file() else None


def load(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> str:
    """Set an adapter or a fusion into a host."""
    name = _our_name(folder) if name is None else name
    free_name(host, name)
    with newcomer(host) as inlays:
        inlays.admit(host, Source(host, inlays, folder, pickled).read(name))
    return name


def _our_name(folder: Path) -> str:
    """Their name; a fusion is named after its members, with commas, which our names cannot have."""
    file = next(folder / names[0] for names in (ADAPTER, FUSION) if (folder / names[0]).is_file())
    return options(AdapterFile, read_object(file), file).name.replace(",", ".")


def load_head(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> str:
    """Set a head that was saved by itself into a host, as an inlay that is nothing but a head."""
    from inlay.methods.head import HeadOnly

    with newcomer(host) as inlays, reading(folder):
        head = heads.read_head(folder, host, inlays.anatomy, pickled)
        assert head is not None
        name = name or head.name or folder.resolve().name
        free_name(host, name)
        draft = Inlay(name, HeadOnly(), head.head).fill(host, inlays.anatomy, "meta")
        spots = heads.head_spots(draft, inlays.anatomy, head.name)
        inlays.admit(host, poured(draft, spots, head.tensors, host, inlays.anatomy, folder))
    return name


def load_setup(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> Setup:
    """Set all adapters and fusions of a setup into a host, or none of them; the setup is not activated."""
    if name is not None:
        raise CheckpointError(f"{folder} is a whole setup of several adapters, which one name cannot name.")
    setup, members = read_setup(folder / SETUP)
    with newcomer(host) as inlays, _together(inlays) as admit:
        for theirs, ours in members.items():
            free_name(host, ours)
            spare_head = folder if ours == uppermost(setup) else None
            admit(host, Source(host, inlays, folder / theirs, pickled, spare_head).read(ours))
    return setup


@contextmanager
def _together(inlays: Inlays) -> Iterator[Callable[[PreTrainedModel, Inlay], None]]:
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


def _read_adapter(source: Source, name: str) -> Inlay:
    file, tensors, head = _read(source, ADAPTER)
    config = as_trained(file.config, file.version, file.type)
    wanted = options(options_kind(config), config, source.folder / ADAPTER[0])
    _check_sizes(wanted, source.anatomy, tensors)
    draft = source.draft(name, method_of(wanted, source.anatomy), head.head)
    spots = _keys(source, file.name, tensors).spots(draft)
    rules = [spot.key for ours, spot in spots.items() if ours.endswith("rule") and spot.key not in tensors]
    if rules:
        raise ConfigError(f"the PHM rule {rules[0]} is not in the file, and without it no weight can be computed")
    spots |= heads.head_spots(draft, source.anatomy, head.name)
    return poured(draft, spots, tensors | head.tensors, source.host, source.anatomy, source.folder)


def _read_fusion(source: Source, name: str) -> Inlay:
    file, tensors, head = _read(source, FUSION)
    wanted = options(FusionOptions, file.config, source.folder / FUSION[0])
    members = file.adapter_names or tuple(file.name.split(","))
    missing = [f"its member {m!r} is not on this host; load it first" for m in members if m not in source.inlays]
    if missing:
        raise misfit(source.folder, missing)
    dropout = getattr(source.host.config, "attention_probs_dropout_prob", 0.0)
    method, idle = fusion_of(wanted, members, source.inlays, dropout)
    draft = source.draft(name, method, head.head)
    keys = _keys(source, file.name, tensors)
    rooms = tuple(keys.fusion(place, "").key for place in idle)
    acting = {key: tensor for key, tensor in tensors.items() if not key.startswith(rooms)}
    spots = keys.spots(draft) | heads.head_spots(draft, source.anatomy, head.name)
    return poured(draft, spots, acting | head.tensors, source.host, source.anatomy, source.folder)


def _read(source: Source, names: tuple[str, str, str]) -> tuple[AdapterFile, Tensors, heads.ForeignHead]:
    folder, (config, safe, pickle) = source.folder, names
    file = options(AdapterFile, read_object(folder / config), folder / config)
    here = {"model_type": source.anatomy.family, "hidden_size": source.anatomy.width}
    problems = [
        f"it was made for a host with {what} {theirs!r}, this one has {ours!r}"
        for what, ours in here.items() if (theirs := getattr(file, what)) not in (None, ours)
    ]  # fmt: skip
    if problems:
        raise misfit(folder, problems)
    tensors = {_renamed(key): tensor for key, tensor in read_tensors(folder, safe, pickle, source.pickled).items()}
    head = heads.read_head(folder, source.host, source.anatomy, source.pickled)
    if head is None and source.spare_head is not None:
        head = heads.read_head(source.spare_head, source.host, source.anatomy, source.pickled)
    head = head or heads.ForeignHead(None, None, {})
    twice = sorted(tensors.keys() & head.tensors.keys())
    if twice:
        raise misfit(folder, [f"adapter and head both have the tensor {key}" for key in twice])
    return file, tensors, head


def _renamed(key: str) -> str:
    """Keys of the library's first versions."""
    for old in _OLD_NAMES:
        key = key.replace(f".{old}.", ".adapters.")
    return key


def _keys(source: Source, name: str, tensors: Tensors) -> Keys:
    """They write the base model's name in front of the keys, unless the base model was saved by itself."""
    prefixed = any(key.startswith(f"{source.host.base_model_prefix}.") for key in tensors)
    return Keys(source.host, source.anatomy, name, prefixed)


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
    odd = [name for name in (inlay.name, *inlay.method.needs) if "." in name]
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
    return Source(host, inlays, folder).read(inlay.name)
