"""Hosts whose weights are not simply there.

They are elsewhere until a module runs, and accelerate brings them (device_map="auto", cpu_offload); or they are
quantised, as whole numbers or as tensors of a class of their own (bitsandbytes, torchao).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import SetupError

HOOK = "_hf_hook"
MOVING = (HOOK, "_old_forward", "forward")
"""What accelerate puts into a module that it moves."""


def computes_on(host: nn.Module, weight: nn.Parameter) -> torch.device:
    """The device on which a weight's module computes: where the weight is, or where accelerate brings it."""
    if weight.is_meta:
        for module in host.modules():
            device: Any = getattr(getattr(module, HOOK, None), "execution_device", None)
            if device is not None and any(own is weight for own in module._parameters.values()):
                return torch.device(device)
    return weight.device


def offloaded(host: nn.Module) -> bool:
    """Whether weights of the host are elsewhere."""
    return any(_is_away(module) for module in host.modules())


def quantised(weight: Tensor) -> bool:
    """Whether a weight is kept as something else than the numbers that it stands for."""
    plain = type(weight) in (nn.Parameter, Tensor) or in_pieces(weight)
    return not plain or not weight.is_floating_point() or weight.dtype.itemsize < 2


def in_pieces(tensor: Tensor) -> bool:
    """Whether each process has a piece of a tensor, as FSDP2 and tensor parallelism leave it."""
    distributed = sys.modules.get("torch.distributed.tensor")  # who has never imported it has no such tensors
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _is_away(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, HOOK, None), "offload", False))


def check_here(name: str, inlay: nn.Module) -> None:
    """Refuse to read an inlay that was offloaded with its host: there are no numbers to read."""
    if any(parameter.is_meta for parameter in inlay.parameters()):
        raise SetupError(
            f"{name!r} cannot be read: it was offloaded with its host, so its weights are not here until that runs. "
            f"Do this before offloading the host, or offload the host before adding inlays."
        )


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Have a module's weights here, and nothing in it that moves them, while something reads or copies it."""
    with ExitStack() as stack:
        for each in filter(_is_away, module.modules()):
            hook, own = getattr(each, HOOK), vars(each)
            hook.pre_forward(each)
            stack.callback(hook.post_forward, each, None)
            stack.callback(own.update, {name: own.pop(name) for name in MOVING if name in own})
        yield
