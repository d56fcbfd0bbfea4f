"""The heads of `adapters`: a copy of the host's own, or one of the library's, `heads.<name>.<i>`.

    heads.<name>   0 dropout   1 linear   2 act   3 dropout   4 linear

The numbers are those of our pooled head, too. Theirs for tags and for questions read every token, as ours with
pooling="tokens"; the two outputs of the latter are the first and the last token of the answer. Theirs for choices gives
one number per text, as ours does, and has to know how many choices a row has: they put that many numbers side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.foreign.adapterhub.layout import LAYOUTS
from inlay.checkpoints.foreign.files import Folder, JsonObject, Tensors, check_size, only, options, read_tensors
from inlay.checkpoints.foreign.heads import is_host_copy, is_tied, logits_weight
from inlay.checkpoints.foreign.keys import FileKey
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import CHOICE, SPAN, Head, Problem
from inlay.host.registry import Inlay

CONFIG, SAFE, PICKLE = "head_config.json", "model_head.safetensors", "pytorch_model_head.bin"
HeadType = Literal["classification", "multilabel_classification", "tagging", "question_answering", "multiple_choice"]
_PROBLEMS: dict[HeadType, Problem | None] = {
    "multilabel_classification": "multi_label_classification",
    "classification": None,
}
PER_TOKEN: tuple[HeadType, ...] = ("tagging", "question_answering")
OWN_OPTIONS: dict[HeadType, set[str]] = {
    "classification": {"num_labels", "use_pooler", "bias"},
    "multilabel_classification": {"num_labels", "use_pooler", "bias"},
    "multiple_choice": {"num_choices", "use_pooler"},
    "tagging": {"num_labels"},
    "question_answering": {"num_labels"},
}
"""What heads of one type have and others do not."""
_TIED = "It is tied to the host's embeddings, so that in `adapters` another output layer changes those too"


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
    num_labels: int | None = Field(default=None, ge=1)
    num_choices: int | None = Field(default=None, ge=2)
    layers: int = Field(ge=1)
    activation_function: str
    label2id: dict[str, int] | None = None
    use_pooler: Annotated[
        bool, only(False, why="a head of its own reads a token's last hidden state, without the host's pooler")
    ] = False
    bias: Annotated[bool, only(True, why="the output layer has a bias here")] = True
    dropout_prob: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _says_how_many(self) -> HeadOptions:
        needed = "num_choices" if self.head_type == "multiple_choice" else "num_labels"
        if getattr(self, needed) is None:
            raise ValueError(f"a head of the type {self.head_type} needs {needed}")
        return self

    @property
    def outputs(self) -> int:
        """Numbers per text or token."""
        return self.num_labels if self.num_labels is not None and self.head_type != "multiple_choice" else 1


@dataclass(frozen=True)
class ForeignHead:
    """A head as it was read; all fields are empty if there is none."""

    head: Head | None
    name: str | None
    """None: it is a copy of the host's own head."""
    tensors: Tensors


def read_head(folder: Folder, host: PreTrainedModel, anatomy: Anatomy, pickled: bool) -> ForeignHead | None:
    """The head beside an adapter or a fusion, if there is one."""
    if not folder.has(CONFIG):
        strays = [file for file in (SAFE, PICKLE) if (folder / file).exists()]
        if strays:
            raise CheckpointError(f"{folder.path} has {strays[0]}, but no {CONFIG} that says what it is.")
        return None
    file = options(HeadFile, folder.object(CONFIG), folder / CONFIG)
    tensors = read_tensors(folder.path, SAFE, PICKLE, pickled)
    if file.config is None:
        tensors = _without_host_buffers(tensors, host)
        return ForeignHead(_copied(file, host, anatomy, tensors), None, tensors)
    wanted = options(HeadOptions, file.config, folder / CONFIG)
    check_size("its head", wanted.outputs + (wanted.layers - 1) * anatomy.width**2, tensors)
    return ForeignHead(_pooled(wanted, host, anatomy), file.name or "", tensors)


def host_buffers(host: PreTrainedModel) -> Tensors:
    """Buffers that `adapters` saves with the host's own head: BART's final_logits_bias."""
    return dict(host.named_buffers(recurse=False))


def _without_host_buffers(tensors: Tensors, host: PreTrainedModel) -> Tensors:
    """Without the host's buffers, which an inlay cannot change and which therefore have to be the same."""
    mine = host_buffers(host).items()
    shared = {key: buffer.cpu() for key, buffer in mine if key in tensors and tensors[key].shape == buffer.shape}
    other = [key for key, buffer in shared.items() if not torch.equal(buffer, tensors[key].to(buffer.dtype))]
    if other:
        raise ConfigError(f"{', '.join(other)} differs from the host's, and an inlay cannot change it")
    return {key: tensor for key, tensor in tensors.items() if key not in shared}


def _copied(file: HeadFile, host: PreTrainedModel, anatomy: Anatomy, tensors: Tensors) -> Head:
    """The label names of the file are those of the outputs only if there are as many of them."""
    names = _label_names(file.label2id)
    weight = logits_weight(host, anatomy)
    outputs = None if weight is None else tensors.get(weight)
    if weight is None or outputs is None or outputs.dim() != 2:
        return Head()
    own = host.get_parameter(weight).detach().cpu()
    if is_tied(host) and outputs.shape == own.shape and not torch.equal(outputs.to(own.dtype), own):
        raise ConfigError(f"{weight} differs from the host's. {_TIED}")
    if names is not None and len(names) == outputs.shape[0]:
        return Head(labels=names)
    return Head() if file.num_labels != outputs.shape[0] else Head(labels=file.num_labels)


def _pooled(wanted: HeadOptions, host: PreTrainedModel, anatomy: Anatomy) -> Head:
    layout = LAYOUTS.get(anatomy.family)
    if layout is None or layout.flexible is None:
        raise ConfigError(
            f"the heads of `adapters` for {anatomy.family} read an end-of-text token, which has no counterpart here."
        )
    if wanted.head_type == "question_answering" and wanted.outputs != len(SPAN):
        raise ConfigError(f"a head for questions has two outputs, start and end; this one has {wanted.outputs}")
    config: Any = host.config
    usual = [getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout_prob")]
    dropout = next((p for p in (wanted.dropout_prob, *usual) if p is not None), 0.0)
    fixed = {"question_answering": SPAN, "multiple_choice": CHOICE}
    names = fixed.get(wanted.head_type) or _label_names(wanted.label2id)
    return Head(
        labels=names or wanted.outputs, pooling="tokens" if wanted.head_type in PER_TOKEN else layout.pooling,
        layers=wanted.layers, activation=wanted.activation_function.lower(),
        dropout=dropout, problem=_PROBLEMS.get(wanted.head_type), choices=wanted.num_choices,
    )  # fmt: skip


def _label_names(label2id: dict[str, int] | None) -> tuple[str, ...] | None:
    if not label2id:
        return None
    if sorted(label2id.values()) != list(range(len(label2id))):
        raise CheckpointError(f"label2id should number its labels from 0, got {label2id}.")
    return tuple(sorted(label2id, key=label2id.__getitem__))


def head_table(inlay: Inlay, anatomy: Anatomy, name: str | None) -> dict[str, FileKey]:
    """Their keys of a head's tensors. `name` None: a copy of the host's head, whose pooler they do not save."""
    found = {}
    for place in anatomy.of_kind("head"):
        if (part := inlay.part(place)) is not None and not (name is None and _below(place, anatomy)):
            for leaf in part.state_dict():
                theirs = f"{place.module}.{leaf}" if name is None else f"heads.{name}.{leaf.removeprefix('layers.')}"
                found[f"{place.id}.{leaf}"] = FileKey(theirs)
    return found


def _below(place: Place, anatomy: Anatomy) -> bool:
    return bool(anatomy.base) and place.module.startswith(f"{anatomy.base}.")


def head_file(
    inlay: Inlay, host: PreTrainedModel, anatomy: Anatomy, common: JsonObject
) -> tuple[str | None, JsonObject]:
    """The name in the keys (None: it is a copy of the host's head) and head_config.json of an inlay's own head."""
    assert inlay.head is not None
    if inlay.head.pooling is None:
        return None, common | _copy_file(inlay, inlay.head, host, anatomy)
    return inlay.name, common | _pooled_file(inlay.name, inlay.head, anatomy)


def _copy_file(inlay: Inlay, head: Head, host: PreTrainedModel, anatomy: Anatomy) -> JsonObject:
    trained = [p.module for p in anatomy.of_kind("head") if _below(p, anatomy) and not is_host_copy(inlay, host, p)]
    if trained:
        raise ConfigError(
            f"its own copy of {', '.join(trained)} was trained, and `adapters` does not save that with a head"
        )
    if is_tied(host) and not is_host_copy(inlay, host, [*anatomy.of_kind("head")][-1]):
        raise ConfigError(f"its own copy of {anatomy.head[-1]} was trained. {_TIED}")
    names = head.names
    if names is None:
        names = tuple(str(label) for _, label in sorted((getattr(host.config, "id2label", None) or {}).items()))
    return {
        "config": None,
        "name": None,
        "model_class": type(host).__name__,
        "label2id": {label: i for i, label in enumerate(names)},
        "num_labels": len(names),
    }


def _pooled_file(name: str, head: Head, anatomy: Anatomy) -> JsonObject:
    layout, names = LAYOUTS[anatomy.family], head.names
    if layout.flexible is None or head.pooling not in (layout.pooling, "tokens"):
        read = f"the {layout.pooling} token" if layout.flexible else "an end-of-text token"
        raise ConfigError(f"its head pools {head.pooling!r}; a head of `adapters` on {anatomy.family} reads {read}")
    if names is None or (head.problem_type == "regression" and len(names) > 1):
        raise ConfigError(
            "its head has no labels of its own, or several outputs for regression; `adapters` cannot say that"
        )
    kind = _head_type(head)
    choice = kind == "multiple_choice"
    if choice and head.choices is None:
        raise ConfigError(
            "its head gives each choice a number, and `adapters` has to know how many choices every row has. "
            "Say it when the inlay is added: inlay.Head(…, choices=5); `inlay train` does where all rows have as many"
        )
    config = HeadOptions(
        head_type=kind, num_labels=len(names), num_choices=head.choices, layers=head.layers,
        activation_function=head.activation, dropout_prob=head.dropout,
        label2id={f"LABEL_{i}": i for i in range(head.choices or 0)} if choice else {n: i for i, n in enumerate(names)},
    )  # fmt: skip
    unknown = set().union(*OWN_OPTIONS.values()) - OWN_OPTIONS[kind]
    return {"config": config.model_dump(mode="json", exclude=unknown), "name": name, "model_class": layout.flexible}


def _head_type(head: Head) -> HeadType:
    if head.names == CHOICE:
        return "multiple_choice"
    if not head.per_token:
        return next(theirs for theirs, ours in _PROBLEMS.items() if ours in (None, head.problem_type))
    if head.problem_type != "single_label_classification":
        raise ConfigError(f"its head gives every token {head.problem_type}; `adapters` only knows labels there")
    return "question_answering" if head.names == SPAN else "tagging"
