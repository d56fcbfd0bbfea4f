"""Read a folder of `adapters`. An inlay is built and filled beside the host, and comes in once nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import misfit
from inlay.checkpoints.foreign.adapterhub import heads
from inlay.checkpoints.foreign.adapterhub.layout import Keys
from inlay.checkpoints.foreign.adapterhub.options import (
    FusionOptions,
    LoraOptions,
    PartOptions,
    PrefixOptions,
    as_trained,
    options_kind,
    parts_of,
)
from inlay.checkpoints.foreign.adapterhub.setups import SETUP, check_stacks, fusion_name, read_setup, uppermost
from inlay.checkpoints.foreign.adapterhub.to_inlay import fusion_of, method_of
from inlay.checkpoints.foreign.files import Folder, Tensors, blaming, check_size, options, read_tensors
from inlay.checkpoints.foreign.keys import KeyTable, filled
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay, Inlays
from inlay.host.setup import Setup
from inlay.host.verbs import free_name, registering
from inlay.methods import Method
from inlay.methods.head import HeadOnly

ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
FUSION = ("adapter_fusion_config.json", "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
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
    """A folder to read, and the host to read it for."""

    host: PreTrainedModel
    inlays: Inlays
    folder: Folder
    pickled: bool = False
    spare_head: Folder | None = None
    """Where to look for a head if the folder has none."""
    with_head: bool = True
    """False: heads are left where they are."""

    @property
    def anatomy(self) -> Anatomy:
        return self.inlays.anatomy

    def read(self, name: str, fusion: bool = False) -> Inlay:
        """The inlay of this folder, not yet on the host. `fusion`: read the fusion, even if there is an adapter too."""
        with blaming(self.folder.path):
            if self.folder.has(ADAPTER[0]) and not fusion:
                return _read_adapter(self, name)
            if self.folder.has(FUSION[0]):
                return _read_fusion(self, name)
        raise CheckpointError(f"{self.folder.path} has neither {ADAPTER[0]} nor {FUSION[0]}.")

    def draft(self, name: str, method: Method, head: Head | None) -> Inlay:
        """The inlay that a config describes, on the meta device."""
        return Inlay(name, method, head).fill(self.host, self.anatomy, "meta")

    def filled(self, draft: Inlay, table: KeyTable, tensors: Tensors) -> Inlay:
        return filled(draft, table, tensors, self.host, self.anatomy, self.folder.path)


def reader_of(folder: Folder) -> Callable[[PreTrainedModel, Folder, str | None, bool, bool], Setup] | None:
    """What reads a folder of `adapters`, by the files in it."""
    if folder.has(SETUP):
        return load_setup
    if folder.has(ADAPTER[0]) or folder.has(FUSION[0]):
        return load
    return load_head if folder.has(heads.CONFIG) else None


def load(host: PreTrainedModel, folder: Folder, name: str | None, pickled: bool, with_head: bool) -> str:
    """Set an adapter or a fusion into a host."""
    name = _our_name(folder) if name is None else name
    free_name(host, name)
    with registering(host) as inlays:
        inlays.admit(host, Source(host, inlays, folder, pickled, with_head=with_head).read(name))
    return name


def _our_name(folder: Folder) -> str:
    """An adapter keeps its name; see `fusion_name`."""
    if folder.has(ADAPTER[0]):
        return _file(folder, ADAPTER[0]).name
    return fusion_name(_file(folder, FUSION[0]).name)


def _file(folder: Folder, config: str) -> AdapterFile:
    return options(AdapterFile, folder.object(config), folder / config)


def load_head(host: PreTrainedModel, folder: Folder, name: str | None, pickled: bool, with_head: bool) -> str:
    """Set a head that was saved by itself into a host, as an inlay that is nothing but a head."""
    if not with_head:
        raise CheckpointError(f"{folder.path} is nothing but a head, so nothing is left without it.")
    with registering(host) as inlays, blaming(folder.path):
        head = heads.read_head(folder, host, inlays.anatomy, pickled)
        assert head is not None
        name = name or head.name or folder.path.resolve().name
        free_name(host, name)
        draft = Inlay(name, HeadOnly(), head.head).fill(host, inlays.anatomy, "meta")
        table = heads.head_table(draft, inlays.anatomy, head.name)
        inlays.admit(host, filled(draft, table, head.tensors, host, inlays.anatomy, folder.path))
    return name


def load_setup(host: PreTrainedModel, folder: Folder, name: str | None, pickled: bool, with_head: bool) -> Setup:
    """Set all adapters and fusions of a setup into a host, or none of them; the setup is not activated."""
    if name is not None:
        raise CheckpointError(f"{folder.path} is a whole setup of several adapters, which one name cannot name.")
    setup, members = read_setup(folder)
    with registering(host) as inlays, _together(inlays) as admit:
        for member in members:
            free_name(host, member.name)
            spare_head = folder if member.name == uppermost(setup) else None
            source = Source(host, inlays, Folder(folder / member.folder), pickled, spare_head, with_head)
            admit(host, source.read(member.name, fusion=member.fusion))
        check_stacks(setup, inlays, folder)
    return setup


@contextmanager
def _together(inlays: Inlays) -> Iterator[Callable[[PreTrainedModel, Inlay], None]]:
    """Either all inlays that come in during the block stay, or after an error none of them."""
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
    parts = [as_trained(part, file.version, file.type) for part in parts_of(file.config)]
    wanted: list[PartOptions] = [options(options_kind(part), part, source.folder / ADAPTER[0]) for part in parts]
    for part in wanted:
        _check_sizes(part, source.anatomy, tensors)
    draft = source.draft(name, method_of(wanted, source.anatomy), head.head)
    table = _keys(source, file.name, tensors).table(draft)
    rules = [entry.key for ours, entry in table.items() if ours.endswith("rule") and entry.key not in tensors]
    if rules:
        raise ConfigError(f"the PHM rule {rules[0]} is not in the file, and without it no weight can be computed")
    table |= heads.head_table(draft, source.anatomy, head.name)
    return source.filled(draft, table, tensors | head.tensors)


def _read_fusion(source: Source, name: str) -> Inlay:
    file, tensors, head = _read(source, FUSION)
    wanted = options(FusionOptions, file.config, source.folder / FUSION[0])
    members = file.adapter_names or tuple(file.name.split(","))
    missing = [f"its member {m!r} is not on this host; load it first" for m in members if m not in source.inlays]
    if missing:
        raise misfit(source.folder.path, missing)
    method, idle = fusion_of(wanted, members, source.inlays, source.host)
    draft = source.draft(name, method, head.head)
    keys = _keys(source, file.name, tensors)
    unused = tuple(keys.fusion(place, "").key for place in idle)
    acting = {key: tensor for key, tensor in tensors.items() if not key.startswith(unused)}
    table = keys.table(draft) | heads.head_table(draft, source.anatomy, head.name)
    return source.filled(draft, table, acting | head.tensors)


def _read(source: Source, names: tuple[str, str, str]) -> tuple[AdapterFile, Tensors, heads.ForeignHead]:
    folder, (config, safe, pickle) = source.folder, names
    file = _file(folder, config)
    here = {"model_type": source.anatomy.family, "hidden_size": source.anatomy.width}
    problems = [
        f"it was made for a host with {what} {theirs!r}, this one has {ours!r}"
        for what, ours in here.items() if (theirs := getattr(file, what)) not in (None, ours)
    ]  # fmt: skip
    if problems:
        raise misfit(folder.path, problems)
    tensors = {_renamed(key): tensor for key, tensor in read_tensors(folder.path, safe, pickle, source.pickled).items()}
    head = None
    for there in (folder, source.spare_head) if source.with_head else ():
        if head is None and there is not None:
            head = heads.read_head(there, source.host, source.anatomy, source.pickled)
    head = head or heads.ForeignHead(None, None, {})
    twice = sorted(tensors.keys() & head.tensors.keys())
    if twice:
        raise misfit(folder.path, [f"adapter and head both have the tensor {key}" for key in twice])
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


def _check_sizes(wanted: PartOptions, anatomy: Anatomy, tensors: Tensors) -> None:
    """Refuse a config whose sizes would need more numbers than its file holds."""
    if isinstance(wanted, LoraOptions):
        return check_size(f"r = {wanted.r}", wanted.r, tensors)
    if isinstance(wanted, PrefixOptions):
        if not wanted.flat:
            check_size(f"bottleneck_size = {wanted.bottleneck_size}", wanted.bottleneck_size, tensors)
        return check_size(f"prefix_length = {wanted.prefix_length}", wanted.prefix_length, tensors)
    if wanted.phm_layer:
        check_size(f"phm_rank = {wanted.phm_rank}", wanted.phm_rank, tensors)
        return check_size(f"phm_dim = {wanted.phm_dim}", wanted.phm_dim**3, tensors)
    size = int(anatomy.width // min(wanted.factors()))
    check_size(f"reduction_factor = {wanted.reduction_factor}", size, tensors)
