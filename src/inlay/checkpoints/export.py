"""Write an inlay as a folder of another library."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.checkpoints.foreign.adapterhub import write as adapterhub
from inlay.checkpoints.foreign.adapterhub.heads import CONFIG as HEAD
from inlay.checkpoints.foreign.adapterhub.read import ADAPTER, FUSION
from inlay.checkpoints.foreign.files import Files, Folder, Tensors
from inlay.checkpoints.foreign.peft import write as peft
from inlay.errors import ConfigError, InlayError, nearest
from inlay.host.registry import Inlay, Inlays
from inlay.host.verbs import bare, inlays_of
from inlay.methods import Mixture
from inlay.storage.folders import replacing


class Format(NamedTuple):
    """How inlays are written in the format of another library."""

    write: Callable[[PreTrainedModel, Inlays, Inlay], Files]
    read_back: Callable[[PreTrainedModel, Inlays, Inlay, Folder], Inlay]
    compared: Callable[[PreTrainedModel, Inlays, Inlay], Tensors]
    """What of an inlay has to be the same when it is read back."""


FORMATS = {
    "peft": Format(peft.write, peft.read_back, peft.compared),
    "adapterhub": Format(adapterhub.write, adapterhub.read_back, adapterhub.compared),
}
KNOWN_BY = (ADAPTER[0], FUSION[0], HEAD)
ONLY_IN_TRAINING = {"before_dropout": False, "drop_first": 0, "subset": None}
"""Settings that act only in training and that neither format can store, with the value at which they do nothing."""


def export(host: nn.Module, name: str, path: str | os.PathLike[str], format: Literal["peft", "adapterhub"]) -> Path:
    """Write an inlay as a folder of another library.

    format: "peft" takes LoRA, IA3, prefixes and prompts; "adapterhub", the format of `adapters`, takes bottlenecks,
            Compacter, LoRA, IA3, prefixes, UniPELT and fusions.

    What the format cannot express is refused with the reason. The folder is read back before it gets its name.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}.{nearest(str(format), FORMATS)}")
    if isinstance(inlay.method, Mixture):
        raise ConfigError(
            f"{name!r} is a mixture, which only Inlay knows. Merge it first: inlay.merge(host, {name!r})."
        )
    library = FORMATS[format]
    try:
        files = library.write(model, inlays, inlay)
    except InlayError as error:
        raise ConfigError(f"{name!r} cannot be written as {format}: {error}") from None
    silent = [field for field, nothing in ONLY_IN_TRAINING.items() if getattr(inlay.method, field, nothing) != nothing]
    if silent:
        warnings.warn(f"{name}: {', '.join(silent)} acts only in training, and {format} cannot store it", stacklevel=2)
    with replacing(Path(path), KNOWN_BY) as temporary:
        for file, content in files.items():
            if file.endswith(".json"):
                (temporary / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            else:
                safetensors.torch.save_file(content, temporary / file, metadata={"format": "pt"})
        with torch.random.fork_rng(devices=[]):  # the run's random numbers stay as they are
            again = library.read_back(model, inlays, inlay, Folder(temporary))
            _same(name, *(library.compared(model, inlays, each) for each in (inlay, again)))
    return Path(os.path.abspath(path))


def _same(name: str, written: Tensors, theirs: Tensors) -> None:
    """Refuse what was not read back the same, up to rounding: a bias is a value in peft and a difference here.

    What was trained in single precision is read back in the host's.
    """
    mine = {key: tensor.to(theirs[key].dtype) for key, tensor in written.items() if key in theirs}
    near = {key: 8 * torch.finfo(tensor.dtype).eps for key, tensor in mine.items()}
    differ = [key for key, atol in near.items() if not torch.allclose(mine[key], theirs[key], rtol=0, atol=atol)]
    if differ:
        raise ConfigError(f"{name!r} does not read back the same: {', '.join(sorted(differ))}")
