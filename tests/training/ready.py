"""A tiny host with a task set in, just before its first step."""

from __future__ import annotations

import torch

import inlay
from inlay.data import Data, prepare
from inlay.training.codec import Language
from inlay.training.modes import begin
from inlay.training.workbench import form_of, open_host, own_head


def ready(small, mode="inlay", seed=0, method=None, members=(), host="bert"):
    prepared = prepare(Data(train=small / "train.jsonl", validation=small / "validation.jsonl"))
    torch.manual_seed(seed)
    model, tokenizer = open_host(str(small / host), prepared.task)
    form = form_of(prepared.task, model.config)
    language = Language(prepared.task, form, tokenizer, 64)
    begin(
        model,
        "own",
        mode,
        own_head(prepared.task, form, model),
        method=method or inlay.Pfeiffer(reduction=2),
        members=members,
    )
    return model, language, language.split(prepared.train), language.split(prepared.validation)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
