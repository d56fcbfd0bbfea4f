"""A host opened for a task, and everything that training or using it there needs.

    bench = Workbench.open("bert-base-uncased", task)
    name = bench.set_up("rte", "inlay", method=Pfeiffer())
    codec = bench.codec(max_length=256)

mode      trains                                  frozen
inlay     the inlay's modules and its head        the host
fusion    the fusion and its head                 the host and every member
head      a head                                  the host
full      the host and a head                     nothing
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import read_manifest
from inlay.compose.fuse import add_fusion
from inlay.data.task import Task
from inlay.errors import ConfigError, InlayError
from inlay.host.heads import Head
from inlay.host.verbs import add, inlays_of, train
from inlay.methods.base import Method
from inlay.methods.head import HeadOnly
from inlay.training.codec import AnswerForm, Codec, answer_form
from inlay.training.recipe import Mode


def open_config(name: str) -> PretrainedConfig:
    """A host's configuration, by the name or folder of the host."""
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InlayError(
            f"no host {name!r}: neither a folder with a config.json nor a model that the hub would give. "
            f"{_first_line(error)}"
        ) from None


@dataclass(frozen=True)
class Workbench:
    """A host and its tokenizer, opened for one task."""

    host: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    form: AnswerForm
    """How the host answers this task."""

    @classmethod
    def open(cls, name: str, task: Task, config: PretrainedConfig | None = None) -> Workbench:
        """Open a host by its name or folder; `config` is its configuration, where that has been opened already."""
        config = copy.deepcopy(config) if config is not None else open_config(name)
        form = answer_form(task, config)
        if form == "labels":
            config.num_labels = max(1, len(task.labels))
        try:
            host = _class_for(form).from_pretrained(name, config=config, dtype=torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, config=config)
        except (OSError, ValueError) as error:
            raise InlayError(f"the host {name!r} cannot be opened for {task.kind}: {_first_line(error)}") from None
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if host.config.get_text_config().pad_token_id is None:
            host.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        return cls(host, tokenizer, task, form)

    def codec(self, max_length: int = 256) -> Codec:
        """Between the task and the host; inputs are cut at `max_length` tokens, or earlier if the host needs it."""
        return Codec(self.task, self.form, self.tokenizer, self.longest_input(max_length))

    def longest_input(self, wanted: int) -> int:
        """The most tokens that the host, its tokenizer and the user allow."""
        positions = getattr(self.host.config.get_text_config(), "max_position_embeddings", None)
        limits = [wanted, int(min(self.tokenizer.model_max_length, 1 << 30))]
        if positions is not None:
            reserved = 2 if self.host.config.model_type in ("roberta", "xlm-roberta") else 0
            limits.append(positions - reserved)
        return min(limits)

    def head(self, layers: int = 1, dropout: float = 0.1) -> Head | None:
        """A new head for the task: mean pooling, or the last token of decoders; hosts that answer in text have none."""
        if self.form == "text":
            return None
        kind = self.host.config.model_type
        decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        pooling: Literal["last", "mean"] | None = "last" if decoder else "mean"
        if self.host.config.is_encoder_decoder:
            pooling, layers = None, 1  # such hosts pick a token of the decoder's themselves
        labels = None if self.form == "choice" else self.task.labels or 1
        return Head(labels=labels, pooling=pooling, layers=layers, dropout=dropout)

    def set_up(
        self,
        name: str,
        mode: Mode,
        *,
        method: Method | None = None,
        members: Sequence[Path] = (),
        head: Head | None = None,
    ) -> str | None:
        """Set into the host what the mode trains, and let only that train. Returns the inlay's name, if there is one.

        head: its head; without it `self.head()`.
        """
        host, head = self.host, head or self.head()
        if mode == "inlay":
            if method is None:
                raise ConfigError("mode 'inlay' needs a method, for instance 'pfeiffer'.")
            add(host, name, method, head=head)
        elif mode == "fusion":
            if len(members) < 2:
                raise ConfigError(f"a fusion needs at least two members, got {len(members)}.")
            _add_fusion(host, name, _load_members(host, members), head)
        elif head is not None:
            add(host, name, HeadOnly(), head=head)
        elif mode == "head":
            raise ConfigError(
                "this host answers in text with the head it was trained with; there is no head to train alone."
            )
        if mode == "full":
            return _train_everything(host, name if head is not None else None)
        train(host, name)
        return name


def _class_for(form: AnswerForm) -> Any:
    """The transformers class that opens a host for a form of answer."""
    return {
        "labels": transformers.AutoModelForSequenceClassification,
        "choice": transformers.AutoModelForMultipleChoice,
        "text": transformers.AutoModelForSeq2SeqLM,
    }[form]


def _load_members(host: PreTrainedModel, members: Sequence[Path]) -> list[str]:
    """Set members into the host; where another has a member's name already, under that name with a number."""
    names: list[str] = []
    for member in members:
        own = read_manifest(member).name
        free = (name for number in count(1) if (name := own if number == 1 else f"{own[:60]}-{number}") not in names)
        names.append(str(load(host, member, name=next(free))))
    return names


def _add_fusion(host: PreTrainedModel, name: str, members: list[str], head: Head | None) -> None:
    """A fusion starts with the head of its last member, where that has the same labels: the target's own inlay."""
    own = inlays_of(host)[members[-1]].head
    same = own is not None and head is not None and own.names == head.names
    add_fusion(host, name, members, head=None if same else head)


def _train_everything(host: PreTrainedModel, name: str | None) -> str | None:
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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
