"""Open a host for a task: the transformers class that its form of answer needs, and its tokenizer.

form       answers with                        host class
labels     a label or a number                 AutoModelForSequenceClassification
choice     one of the row's choices            AutoModelForMultipleChoice
text       generated text                      AutoModelForSeq2SeqLM
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from inlay.data.task import Task
from inlay.errors import InlayError
from inlay.host.heads import Head

Form = Literal["labels", "choice", "text"]
GENERATORS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Families that answer every task in text, as they were trained."""


def form_of(task: Task, config: Any) -> Form:
    """How a host of this configuration answers a task."""
    if task.kind == "text" or config.model_type in GENERATORS:
        if not config.is_encoder_decoder:
            raise InlayError(f"{task.name} asks for text, which needs a host such as T5, not {config.model_type}.")
        return "text"
    return "choice" if task.kind == "choice" else "labels"


def open_config(name: str) -> Any:
    """A host's configuration, by the name or folder of the host."""
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InlayError(
            f"no host {name!r}: neither a folder with a config.json nor a model that the hub would give. {reason}"
        ) from None


def open_host(name: str, task: Task) -> tuple[PreTrainedModel, Any]:
    """The host and its tokenizer."""
    config = open_config(name)
    form = form_of(task, config)
    auto: Any = {
        "labels": transformers.AutoModelForSequenceClassification,
        "choice": transformers.AutoModelForMultipleChoice,
        "text": transformers.AutoModelForSeq2SeqLM,
    }[form]
    outputs = {"num_labels": max(1, len(task.labels))} if form == "labels" else {}
    try:
        host = auto.from_pretrained(name, dtype=torch.float32, **outputs)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InlayError(f"the host {name!r} cannot be opened for {task.kind}: {reason}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if host.config.get_text_config().pad_token_id is None:
        host.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return host, tokenizer


def longest_input(host: PreTrainedModel, tokenizer: Any, wanted: int) -> int:
    """The most tokens that the host, its tokenizer and the user allow."""
    positions = getattr(host.config.get_text_config(), "max_position_embeddings", None)
    limits = [wanted, int(min(tokenizer.model_max_length, 1 << 30))]
    if positions is not None:
        limits.append(positions - 2 if host.config.model_type in ("roberta", "xlm-roberta") else positions)
    return min(limits)


def own_head(task: Task, form: Form, host: PreTrainedModel, layers: int = 1, dropout: float = 0.1) -> Head | None:
    """The head an inlay gets for a task: mean pooling, or the last token of decoders; text hosts keep their own."""
    if form == "text":
        return None
    kind = host.config.model_type
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    pooling: Literal["last", "mean"] | None = "last" if decoder else "mean"
    if host.config.is_encoder_decoder:
        pooling, layers = None, 1  # such hosts pick a token of the decoder's themselves
    labels = None if form == "choice" else task.labels or 1
    return Head(labels=labels, pooling=pooling, layers=layers, dropout=dropout)
