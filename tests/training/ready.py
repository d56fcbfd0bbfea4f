"""A tiny host with a task set in, just before its first step."""

from __future__ import annotations

import torch

import inlay
from inlay.data import Data, prepare
from inlay.training.workbench import Workbench


def ready(small, mode="inlay", seed=0, method=None, members=(), host="bert"):
    prepared = prepare(Data(train_file=small / "train.jsonl", validation_file=small / "validation.jsonl"))
    torch.manual_seed(seed)
    bench = Workbench.open(str(small / host), prepared.task)
    bench.set_up("own", mode, method=method or inlay.Pfeiffer(reduction=2), members=members)
    codec = bench.codec(64)
    return bench.host, codec, codec.encode(prepared.train), codec.encode(prepared.validation)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
