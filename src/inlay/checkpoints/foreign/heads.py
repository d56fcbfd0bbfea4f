"""What both libraries have in common: how they name a host, and heads that are copies of the host's own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from inlay.anatomy.modules import last_linear
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.host.offload import present
from inlay.host.registry import Inlay, key_of


def host_name(host: PreTrainedModel) -> str | None:
    """What a host was opened by, as both libraries note it."""
    return str(getattr(host.config, "name_or_path", "") or "") or None


def logits_weight(host: PreTrainedModel, anatomy: Anatomy) -> str | None:
    """The dotted name of the weight that makes the logits, if a linear map makes them."""
    found = last_linear(host.get_submodule(anatomy.head[-1])) if anatomy.head else None
    return None if found is None else ".".join(filter(None, (anatomy.head[-1], found[0], "weight")))


def is_tied(host: PreTrainedModel) -> bool:
    """Whether the weight that makes the logits is that of the embeddings."""
    output = host.get_output_embeddings()
    return output is not None and output.weight is host.get_input_embeddings().weight


def is_host_copy(inlay: Inlay, host: PreTrainedModel, place: Place) -> bool:
    """Whether an inlay's own copy of a head's module still has the host's values."""
    mine, module = inlay.parts[key_of(place.id)].state_dict(), host.get_submodule(place.module)
    with present(module):
        theirs = module.state_dict()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key].cpu(), theirs[key].cpu()) for key in mine)
