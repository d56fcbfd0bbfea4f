"""Which modules of a host are its own, are norms, have biases, or belong to its head."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTRIBUTE = "inlays"
"""Where a host has its inlays."""


def own_modules(host: nn.Module) -> Iterator[nn.Module]:
    """A host's modules without those of its inlays, of which there may be many times as many."""
    waiting = [host]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += [child for name, child in module._modules.items() if child is not None and name != ATTRIBUTE]


def has_module(host: nn.Module, path: str) -> bool:
    try:
        host.get_submodule(path)
    except AttributeError:
        return False
    return True


def forward_of(kind: type[nn.Module]) -> Any:
    """The function that a class runs, without the decorators around it."""
    return inspect.unwrap(kind.forward)


def takes_keys(attention: nn.Module) -> bool:
    """Whether an attention calls transformers' attention interface and hands keywords on to it."""
    forward = forward_of(type(attention))
    keywords = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())
    return keywords and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def name_of(host: nn.Module, wanted: nn.Module) -> str:
    """The dotted name of a module of the host; the root's is empty."""
    return next(name for name, module in host.named_modules() if module is wanted)


def norm_modules(host: nn.Module) -> list[str]:
    """Every norm with weights, by its class: LayerNorm, RMSNorm, T5LayerNorm, Qwen3RMSNorm …"""
    return [
        name for name, module in host.named_modules()
        if type(module).__name__.endswith("Norm") and any(True for _ in module.parameters(recurse=False))
    ]  # fmt: skip


def biased_modules(host: nn.Module, head: tuple[str, ...] = ()) -> list[str]:
    """Every module whose output has a bias added; in a host without any (T5, Llama), its linear maps and norms."""
    leaves = {name: m for name, m in host.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    biased = [name for name, module in leaves.items() if isinstance(getattr(module, "bias", None), nn.Parameter)]
    if any(not inside(name, head) for name in biased):
        return biased
    norms = set(norm_modules(host))
    return [name for name, module in leaves.items() if isinstance(module, nn.Linear) or name in norms]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these or below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def head_modules(host: PreTrainedModel, base: str) -> tuple[str, ...]:
    """All that stands between the last hidden states and the logits, in order; the last one makes the logits."""
    if base:
        pooler = [f"{base}.pooler"] if getattr(host.base_model, "pooler", None) is not None else []
        return (*pooler, *(n for n, m in host.named_children() if n != base and any(True for _ in m.parameters())))
    output = host.get_output_embeddings()
    if output is not None:
        return (name_of(host, output),)
    return tuple(name for name, _ in host.named_children() if name in ("qa_outputs", "classifier", "score"))


def last_word(path: str) -> str:
    """The own name of a module, without those it lies in."""
    return path.rpartition(".")[2]


def last_linear(module: nn.Module) -> tuple[str, nn.Linear] | None:
    """The last linear map of a module, which in a head makes the logits, and its name there."""
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return found[-1] if found else None
