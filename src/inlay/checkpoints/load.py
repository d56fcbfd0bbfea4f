"""Load a folder of Inlay or of another library: each reader is asked in turn whether it knows the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.checkpoints.foreign.adapterhub import read as adapterhub
from inlay.checkpoints.foreign.files import Folder
from inlay.checkpoints.foreign.peft import read as peft
from inlay.checkpoints.manifest import MANIFEST
from inlay.checkpoints.ours import load_ours
from inlay.host.setup import Setup
from inlay.host.verbs import bare
from inlay.storage.folders import reading

Reader = Callable[[PreTrainedModel, Folder, str | None, bool, bool], str | Setup]
"""(host, folder, name, pickled, head) → the name or setup to activate."""
FOREIGN: tuple[Callable[[Folder], Reader | None], ...] = (peft.reader_of, adapterhub.reader_of)
"""Each looks at a folder's files and returns the reader for it, or None."""


def load(
    host: nn.Module, path: str | os.PathLike[str], *,
    name: str | None = None, head: bool = True, any_members: bool = False, any_host: bool = False,
    pickled: bool = False,
) -> str | Setup:  # fmt: skip
    """Set a saved inlay into a host, under its own or another name; returns the name. One error lists all mismatches.

    Folders of `adapters` and `peft` are recognised by their files and read too. For a whole setup of `adapters`, the
    setup to activate is returned instead of a name.

    head:        False leaves out the saved head, so that an inlay of any kind of task can be a member of a fusion.
    any_members: accept other members than those that a fusion was trained with; they have to be on the host.
    any_host:    accept a host of the same shape with other weights than the one that it was trained on.
    pickled:     also read the `.bin` files of those libraries, as tensors only: nothing in them is executed.
    """
    model = bare(host)
    with reading(Path(path)) as folder, torch.random.fork_rng(devices=[]):  # the run's random numbers stay as they are
        if not (folder / MANIFEST).exists():
            foreign = Folder(folder)
            for reader_of in FOREIGN:
                if (read := reader_of(foreign)) is not None:
                    return read(model, foreign, name, pickled, head)
        return load_ours(model, folder, name, any_members, any_host, head)
