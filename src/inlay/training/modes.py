"""What trains: one inlay, a fusion over members, a head only, or everything.

mode      trains                                  frozen
inlay     the inlay's modules and its head        the host
fusion    the fusion and its head                 the host and every member
head      a head                                  the host
full      the host and a head                     nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from transformers import PreTrainedModel

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import read_manifest
from inlay.compose.fuse import add_fusion
from inlay.errors import ConfigError
from inlay.host.heads import Head
from inlay.host.verbs import add, inlays_of, train
from inlay.methods.base import Method
from inlay.methods.head import HeadOnly
from inlay.training.recipe import Mode


def begin(
    host: PreTrainedModel,
    name: str,
    mode: Mode,
    head: Head | None,
    *,
    method: Method | None = None,
    members: Sequence[Path] = (),
) -> str | None:
    """Set into the host what the mode trains, and let it train. Returns the inlay's name, if there is one."""
    if mode == "inlay":
        if method is None:
            raise ConfigError("mode 'inlay' needs a method, for instance 'pfeiffer'.")
        add(host, name, method, head=head)
    elif mode == "fusion":
        if len(members) < 2:
            raise ConfigError(f"a fusion needs at least two members, got {len(members)}.")
        _fusion(host, name, _loaded(host, members), head)
    elif head is not None:
        add(host, name, HeadOnly(), head=head)
    elif mode == "head":
        raise ConfigError(
            "this host answers in text with the head it was trained with; there is no head to train alone."
        )
    if mode == "full":
        return _everything(host, name if head is not None else None)
    train(host, name)
    return name


def _loaded(host: PreTrainedModel, members: Sequence[Path]) -> list[str]:
    """Set members into the host; where another has a member's name already, under that name with a number."""
    names: list[str] = []
    for member in members:
        own = read_manifest(member).name
        free = (name for number in count(1) if (name := own if number == 1 else f"{own[:60]}-{number}") not in names)
        names.append(str(load(host, member, name=next(free))))
    return names


def _fusion(host: PreTrainedModel, name: str, members: list[str], head: Head | None) -> None:
    """A fusion starts with the head of its last member, where that has the same labels: the target's own inlay."""
    own = inlays_of(host)[members[-1]].head
    same = own is not None and head is not None and own.names == head.names
    add_fusion(host, name, members, head=None if same else head)


def _everything(host: PreTrainedModel, name: str | None) -> str | None:
    """The whole host and the own head. What the own head stands in for does not train: no gradient reaches it."""
    if name is None:
        host.requires_grad_(True).train()
        return None
    train(host, name)
    idle = inlays_of(host).anatomy.head
    for path, parameter in host.named_parameters():
        if not any(path.startswith(f"{module}.") for module in idle):
            parameter.requires_grad_(True)
    return name
