"""Run a twin of a host on a few tokens and record what every module is given and gives; for `probe.py`.

The host itself is never run: a twin shares its weights, and has modules, buffers and hooks of its own.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.places import Branch

B, T, T_DECODER = 2, 5, 3
"""Rows and tokens of the dummy batch; a decoder has fewer, so that what comes from the encoder shows by its length."""
FLAT = (B * T, B * T_DECODER)
Rewrite = Callable[[Tensor], Tensor]
Known = dict[str, dict[str, Branch]]


class Unsure(Exception):
    """Why there is no certain answer; and what is known all the same, by the stack's path and the kind of branch."""

    def __init__(self, reason: str, known: Known | None = None) -> None:
        super().__init__(reason)
        self.known = known or {}


@dataclass
class Call:
    """One call of one module. Of its tensors those of shape (B, T, …) are kept: copies, as hosts may add in place."""

    path: str
    module: nn.Module
    start: int
    inputs: tuple[Tensor | None, ...]
    """Positional, then by name: as a site counts them."""
    on_rows: bool
    """Some input has one entry per row of the batch."""
    end: int = -1
    output: Tensor | None = None
    plain: bool = False
    """The output is a tensor and nothing else, so that a hook can change it."""

    @property
    def is_norm(self) -> bool:
        simple = len(self.inputs) == 1 and not any(True for _ in self.module.children())
        return simple and "norm" in type(self.module).__name__.lower()


class Enough(Exception):
    """All that was asked for has been seen."""


class Recorder:
    """Hooks on every module of a twin: the calls in the order in which they begin."""

    def __init__(self, changes: Mapping[str, Rewrite], until: str) -> None:
        self.changes, self.until = changes, until
        self.calls: list[Call] = []
        self.inside: list[Call] = []
        self.clock = itertools.count()

    def watch(self, twin: nn.Module) -> None:
        for path, module in twin.named_modules():
            module._forward_pre_hooks.clear()  # what others hooked on is not the host's anatomy
            module._forward_hooks.clear()
            module.register_forward_pre_hook(
                lambda m, a, k, p=path: self.enter(p, m, (*a, *k.values())), with_kwargs=True
            )
            module.register_forward_hook(lambda m, a, out, p=path: self.leave(p, out))

    def enter(self, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows = any(isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] in (B, *FLAT) for x in inputs)
        self.inside.append(Call(path, module, next(self.clock), tuple(map(_kept, inputs)), rows))
        self.calls.append(self.inside[-1])

    def leave(self, path: str, output: Any) -> Any:
        if path in self.changes:
            output = self.changes[path](output)
        call = self.inside.pop()
        call.plain = isinstance(output, Tensor)
        call.output = _kept(output[0] if isinstance(output, (tuple, list)) and output else output)
        call.end = next(self.clock)
        if path == self.until:
            raise Enough
        return output


def record(
    host: PreTrainedModel, changes: Mapping[str, Rewrite] | None = None, last: int = 0, until: str = ""
) -> list[Call]:
    """Run a twin of the base model, up to a module, and record every call.

    changes: what to make of the outputs of modules. last: 1 for another last token.
    """
    if any(p.is_meta for p in host.parameters()):
        raise Unsure(
            "its weights are on the meta device, so that it cannot be run. Load them first; "
            "and to count parameters, give inlay.count the loaded host instead of a config"
        )
    recorder = Recorder(changes or {}, until)
    devices = sorted({p.device.index for p in host.parameters() if p.is_cuda})
    try:
        twin = copy.deepcopy(host.base_model, {id(p): p for p in host.parameters()}).eval()
        recorder.watch(twin)
        with torch.no_grad(), torch.random.fork_rng(devices):
            twin(**_tokens(host, last))
    except Enough:
        pass
    except Exception as error:
        raise Unsure(f"it could not be run on {B}x{T} dummy tokens ({type(error).__name__}: {error})") from error
    return recorder.calls


def _tokens(host: PreTrainedModel, last: int) -> dict[str, Tensor]:
    embeddings = host.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)

    def ids(length: int) -> Tensor:
        some = torch.arange(length) + embeddings.shape[0] // 2  # far from the special tokens at either end
        some[-1] += last
        rows = some.repeat(B, 1)
        rows[1, 0] += length + 1  # another first token, to see who attends to it
        return (rows % embeddings.shape[0]).to(embeddings.device)

    return {"input_ids": ids(T)} | ({"decoder_input_ids": ids(T_DECODER)} if has_decoder(host) else {})


def has_decoder(host: PreTrainedModel) -> bool:
    inputs = inspect.signature(host.base_model.forward).parameters
    return getattr(host.config, "is_encoder_decoder", False) and "decoder_input_ids" in inputs


def _kept(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dim() == 2 and value.shape[0] in FLAT:  # OPT lays rows and tokens together in its ffn
        value = value.unflatten(0, (B, -1))
    return value.detach().clone() if value.dim() == 3 and value.shape[0] == B else None


def nudge(h: Tensor) -> Tensor:
    """Another h at the last token; the others stay, to see whether they depend on it."""
    tokens = h.reshape(B, -1, h.shape[-1]).clone()
    tokens[:, -1] += tokens[:, -1].roll(1, -1)
    return tokens.view_as(h)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and bool((a == b).all())


def first_call(calls: list[Call], path: str) -> Call:
    return next(call for call in calls if call.path == path)


def tensor_in(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
