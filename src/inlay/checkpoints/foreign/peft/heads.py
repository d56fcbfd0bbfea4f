"""An inlay's own head in the files of peft, which saves only modules that the host has."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from inlay.anatomy.modules import last_word
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.files import Tensors
from inlay.checkpoints.foreign.heads import is_host_copy
from inlay.checkpoints.foreign.peft.targets import saved_by
from inlay.errors import ConfigError
from inlay.host.registry import Inlay, key_of


def check_head(inlay: Inlay) -> None:
    """Refuse what peft cannot save beside its own tensors."""
    if inlay.norms:
        raise ConfigError(f"it owns layer norms, which {inlay.method.kind} of peft does not have")
    if inlay.head is not None and inlay.head.pooling is not None:
        raise ConfigError("it has a pooling head, which the host does not have; peft saves only modules of the host")


def saved_modules(inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel) -> list[str]:
    """The head's modules to save: the output layer, others that are no longer the host's, and what ends like them."""
    own = [place for place in anatomy.of_kind("head") if inlay.part(place) is not None]
    needed = [p.module for p in own if p.module == anatomy.head[-1] or not is_host_copy(inlay, host, p)]
    return saved_by([last_word(path) for path in needed], [place.module for place in own])


def head_tensors(inlay: Inlay, anatomy: Anatomy, saved: Sequence[str], root: str) -> Tensors:
    return {
        f"{root}{place.module}.{leaf}": tensor
        for place in anatomy.of_kind("head") if place.module in saved
        for leaf, tensor in inlay.parts[key_of(place.id)].state_dict().items()
    }  # fmt: skip
