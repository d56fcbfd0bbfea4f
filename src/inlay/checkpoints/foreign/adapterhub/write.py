"""Write an inlay as the files of `adapters`."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from inlay.checkpoints.foreign.adapterhub import heads
from inlay.checkpoints.foreign.adapterhub.layout import Keys
from inlay.checkpoints.foreign.adapterhub.options import BottleneckOptions, FusionOptions, PartOptions
from inlay.checkpoints.foreign.adapterhub.read import ADAPTER, FUSION, Source
from inlay.checkpoints.foreign.adapterhub.to_adapters import fusion_options, options_of
from inlay.checkpoints.foreign.adapterhub.to_inlay import fusion_of
from inlay.checkpoints.foreign.files import Files, Folder, JsonObject, Tensors
from inlay.checkpoints.foreign.heads import host_name
from inlay.checkpoints.foreign.keys import scatter
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, Inlays
from inlay.methods import Fusion

VERSION = "adapters.1.3.0"
"""The version that gives every option of the written files its meaning."""


def write(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> Files:
    """The files of an inlay in their format, by name."""
    odd = [name for name in (inlay.name, *inlay.method.needs) if "." in name]
    if odd:
        raise ConfigError(
            f"`adapters` cannot have a dot in a name: {', '.join(odd)}. "
            f"Save it, and load it under another name: inlay.load(…, name=…)"
        )
    common: JsonObject = {
        "hidden_size": inlays.anatomy.width,
        "model_class": type(host).__name__,
        "model_name": host_name(host),
        "model_type": inlays.anatomy.family,
        "version": VERSION,
    }
    made = _fusion_files if isinstance(inlay.method, Fusion) else _adapter_files
    files = made(host, inlays, inlay, common)
    if inlay.head is not None:
        head_name, files[heads.CONFIG] = heads.head_file(inlay, host, inlays.anatomy, common)
        tensors = scatter(heads.head_table(inlay, inlays.anatomy, head_name), inlay.tensors())
        files[heads.SAFE] = tensors | (heads.host_buffers(host) if head_name is None else {})
    return files


def read_back(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, folder: Folder) -> Inlay:
    """What a written folder gives when it is read, not yet on the host."""
    return Source(host, inlays, folder).read(inlay.name)


def compared(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> Tensors:
    """What has to be the same when it is read back: every tensor."""
    return inlay.tensors()


def _adapter_files(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, common: JsonObject) -> Files:
    configs = [_as_json(part) for part in options_of(inlay, inlays.anatomy)]
    config = configs[0] if len(configs) == 1 else {"architecture": "union", "configs": configs}
    return {
        ADAPTER[0]: common | {"name": inlay.name, "config": config},
        ADAPTER[1]: scatter(Keys(host, inlays.anatomy, inlay.name).table(inlay), inlay.tensors()),
    }


def _as_json(wanted: PartOptions) -> JsonObject:
    gone = {"invertible_adapter"} | ({"architecture"} if isinstance(wanted, BottleneckOptions) else set())
    return wanted.model_dump(mode="json", exclude=gone)


def _fusion_files(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, common: JsonObject) -> Files:
    assert isinstance(inlay.method, Fusion)
    name, members = ",".join(inlay.method.members), list(inlay.method.members)
    config = fusion_options(inlay, inlays, host).model_dump(mode="json")
    keys = Keys(host, inlays.anatomy, name)
    return {
        FUSION[0]: common | {"name": name, "adapter_names": members, "config": config},
        FUSION[1]: _idle_layers(inlay, inlays, keys, host) | scatter(keys.table(inlay), inlay.tensors()),
    }


def _idle_layers(inlay: Inlay, inlays: Inlays, keys: Keys, host: PreTrainedModel) -> Tensors:
    """They keep a fusion's weights even where no member acts, and report them as missing if they are not in a file."""
    assert isinstance(inlay.method, Fusion)
    _, idle = fusion_of(FusionOptions(), inlay.method.members, inlays, host)
    like = next(iter(inlay.parts.values())).state_dict()
    return {
        keys.fusion(place, leaf).key: torch.zeros_like(tensor, device="cpu")
        for place in idle
        for leaf, tensor in like.items()
    }
