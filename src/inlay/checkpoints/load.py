"""Load any folder that is known here: one list of readers, asked in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.checkpoints.foreign import peft
from inlay.checkpoints.foreign.adapterhub import folders as adapterhub
from inlay.checkpoints.manifest import MANIFEST
from inlay.checkpoints.ours import load_ours
from inlay.host.setup import Setup
from inlay.host.verbs import bare
from inlay.storage.folders import reading

Reader = Callable[[PreTrainedModel, Path, str | None, bool], Setup]
"""(host, folder, name, pickled) → what to activate."""
FOREIGN: tuple[Callable[[Path], Reader | None], ...] = (peft.reader_of, adapterhub.reader_of)
"""Each looks at a folder's files and gives what reads it, or None."""


def load(
    host: nn.Module, path: str | os.PathLike[str], *,
    name: str | None = None, any_members: bool = False, pickled: bool = False,
) -> str | Setup:  # fmt: skip
    """Set a saved inlay into a host, under its own or another name; returns the name. All mismatches come at once.

    Folders of `adapters` and `peft` are known by their files and read too; a whole setup of `adapters` returns the
    setup to activate instead of a name.
    any_members: a fusion needs its members on the host, and the very ones it was trained with unless this is set.
    pickled:     also read the `.bin` files of those libraries, as tensors only: nothing in them is executed.
    """
    model = bare(host)
    with reading(Path(path)) as folder, torch.random.fork_rng(devices=[]):  # it takes nothing from the run's chances
        if not (folder / MANIFEST).exists():
            for reader_of in FOREIGN:
                if (read := reader_of(folder)) is not None:
                    return read(model, folder, name, pickled)
        return load_ours(model, folder, name, any_members)
