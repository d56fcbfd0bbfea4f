"""The heads of `adapters`: a copy of the host's own, or one of the library's, `heads.<name>.<i>`.

    heads.<name>   0 dropout   1 linear   2 act   3 dropout   4 linear

The numbers are those of our pooled head, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.adapterhub.layout import ROOMS
from inlay.checkpoints.foreign.files import Tensors, check_size, only, options, read_object, read_tensors
from inlay.checkpoints.foreign.keys import Spot
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import Head, Problem
from inlay.host.registry import Inlay, key_of

CONFIG, SAFE, PICKLE = "head_config.json", "model_head.safetensors", "pytorch_model_head.bin"
HeadType = Literal["classification", "multilabel_classification"]
_PROBLEMS: dict[HeadType, Problem | None] = {
    "multilabel_classification": "multi_label_classification",
    "classification": None,
}


class HeadFile(Config):
    """head_config.json."""

    config: dict[str, Any] | None
    name: str | None = None
    hidden_size: int | None = None
    model_class: str = ""
    model_name: str | None = None
    model_type: str | None = None
    label2id: dict[str, int] | None = None
    num_labels: int | None = None
    version: str | None = None


class HeadOptions(Config):
    """A head of the library's own."""

    head_type: HeadType
    num_labels: int = Field(ge=1)
    layers: int = Field(ge=1)
    activation_function: str
    label2id: dict[str, int] | None = None
    use_pooler: Annotated[
        bool, only(False, why="a head of its own reads a token's last hidden state, without the host's pooler")
    ] = False
    bias: Annotated[bool, only(True, why="the output layer has a bias here")] = True
    dropout_prob: Annotated[float, Field(ge=0, lt=1)] | None = None


@dataclass(frozen=True)
class ForeignHead:
    """A head as it was read; or that there is none."""

    head: Head | None
    name: str | None
    """None: it is a copy of the host's own head."""
    tensors: Tensors


def read_head(folder: Path, host: PreTrainedModel, anatomy: Anatomy, pickled: bool) -> ForeignHead | None:
    """The head beside an adapter or a fusion, if there is one."""
    if not (folder / CONFIG).is_file():
        strays = [file for file in (SAFE, PICKLE) if (folder / file).exists()]
        if strays:
            raise CheckpointError(f"{folder} has {strays[0]}, but no {CONFIG} that says what it is.")
        return None
    file = options(HeadFile, read_object(folder / CONFIG), folder / CONFIG)
    tensors = read_tensors(folder, SAFE, PICKLE, pickled)
    if file.config is None:
        return ForeignHead(_copied(file, host, anatomy, tensors), None, tensors)
    wanted = options(HeadOptions, file.config, folder / CONFIG)
    check_size("its head", wanted.num_labels + (wanted.layers - 1) * anatomy.width**2, tensors)
    return ForeignHead(_pooled(wanted, host, anatomy), file.name or "", tensors)


def _copied(file: HeadFile, host: PreTrainedModel, anatomy: Anatomy, tensors: Tensors) -> Head:
    """Label names are only names of outputs if there are as many."""
    names = _label_names(file.label2id)
    outputs = (
        tensors.get(f"{anatomy.head[-1]}.{_output_layer(host, anatomy)}weight".replace("..", "."))
        if anatomy.head
        else None
    )
    if outputs is None or outputs.dim() != 2:
        return Head()
    if names is not None and len(names) == outputs.shape[0]:
        return Head(labels=names)
    return Head() if file.num_labels != outputs.shape[0] else Head(labels=file.num_labels)


def _output_layer(host: PreTrainedModel, anatomy: Anatomy) -> str:
    """Name and dot of the linear map that makes the logits, inside the last head module; empty if it is that module."""
    linears = [name for name, m in host.get_submodule(anatomy.head[-1]).named_modules() if isinstance(m, nn.Linear)]
    return f"{linears[-1]}." if linears and linears[-1] else ""


def _pooled(wanted: HeadOptions, host: PreTrainedModel, anatomy: Anatomy) -> Head:
    rooms = ROOMS.get(anatomy.family)
    if rooms is None or rooms.flexible is None:
        raise ConfigError(
            f"the heads of `adapters` for {anatomy.family} read an end-of-text token, which has no counterpart here."
        )
    config: Any = host.config
    usual = next(
        (
            p
            for p in (getattr(config, "classifier_dropout", None), getattr(config, "hidden_dropout_prob", None))
            if p is not None
        ),
        0.0,
    )
    return Head(
        labels=_label_names(wanted.label2id) or wanted.num_labels, pooling=rooms.pooling, layers=wanted.layers,
        activation=wanted.activation_function.lower(),
        dropout=usual if wanted.dropout_prob is None else wanted.dropout_prob,
        problem=_PROBLEMS[wanted.head_type],
    )  # fmt: skip


def _label_names(label2id: dict[str, int] | None) -> tuple[str, ...] | None:
    if not label2id:
        return None
    if sorted(label2id.values()) != list(range(len(label2id))):
        raise CheckpointError(f"label2id should number its labels from 0, got {label2id}.")
    return tuple(sorted(label2id, key=label2id.__getitem__))


def head_spots(inlay: Inlay, anatomy: Anatomy, name: str | None) -> dict[str, Spot]:
    """Spots for the tensors of a head; `name` None is a copy of the host's, whose pooler they do not save."""
    found = {}
    for place in anatomy.of_kind("head"):
        if (part := inlay.part(place)) is not None and not (name is None and _below(place, anatomy)):
            for leaf in part.state_dict():
                theirs = f"{place.module}.{leaf}" if name is None else f"heads.{name}.{leaf.removeprefix('layers.')}"
                found[f"{place.id}.{leaf}"] = Spot(theirs)
    return found


def _below(place: Place, anatomy: Anatomy) -> bool:
    return bool(anatomy.base) and place.module.startswith(f"{anatomy.base}.")


def unchanged(inlay: Inlay, host: PreTrainedModel, place: Place) -> bool:
    """Whether an own copy of a head's module still holds the host's values."""
    mine, theirs = inlay.parts[key_of(place.id)].state_dict(), host.get_submodule(place.module).state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key].cpu(), theirs[key].cpu()) for key in mine)


def head_file(
    inlay: Inlay, host: PreTrainedModel, anatomy: Anatomy, common: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """The head's name (None: the host's own) and head_config.json for an inlay that has a head."""
    head = inlay.head
    assert head is not None
    names = head.names
    if head.pooling is None:
        trained = [p.module for p in anatomy.of_kind("head") if _below(p, anatomy) and not unchanged(inlay, host, p)]
        if trained:
            raise ConfigError(
                f"its own copy of {', '.join(trained)} was trained, and `adapters` does not save that with a head"
            )
        if names is None:
            names = tuple(str(label) for _, label in sorted((getattr(host.config, "id2label", None) or {}).items()))
        label2id = {label: i for i, label in enumerate(names)}
        own = {
            "config": None,
            "name": None,
            "model_class": type(host).__name__,
            "label2id": label2id,
            "num_labels": len(names),
        }
        return None, common | own
    rooms = ROOMS[anatomy.family]
    if rooms.flexible is None or head.pooling != rooms.pooling:
        read = f"the {rooms.pooling} token" if rooms.flexible else "an end-of-text token"
        raise ConfigError(f"its head pools {head.pooling!r}; a head of `adapters` on {anatomy.family} reads {read}")
    if names is None or (head.problem_type == "regression" and len(names) > 1):
        raise ConfigError(
            "its head has no labels of its own, or several outputs for regression; `adapters` cannot say that"
        )
    config = HeadOptions(
        head_type=next(theirs for theirs, ours in _PROBLEMS.items() if ours in (None, head.problem_type)),
        num_labels=len(names), layers=head.layers, activation_function=head.activation, dropout_prob=head.dropout,
        label2id={label: i for i, label in enumerate(names)},
    )  # fmt: skip
    return inlay.name, common | {
        "config": config.model_dump(mode="json"),
        "name": inlay.name,
        "model_class": rooms.flexible,
    }
