"""Gradient checkpointing: a layer that is computed again acts as it did in its pass.

    pass        host ── checkpoint(Again(layer))          Again notes what the layer sees
    backward            checkpoint ── Again ── layer      and puts it in place while the layer runs once more

By then another setup may be active, another batch may have been run, chance may have been drawn anew, and the thread
may be another one: on GPUs autograd has threads of its own. `Remembering` stands around the function that checkpoints
a layer, which transformers keeps with the layer. It costs nothing where nothing is checkpointed.

Up to transformers 5.22 a layer is repeated together with its hooks, from 5.23 on without them. What such hooks put in
place for the length of the layer is `Around` it, and is put in place again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.host.keys import name_attention
from inlay.host.plan import Active, Passing, Plan, Slot
from inlay.methods.acting import Draw

ATTRIBUTE = "_gradient_checkpointing_func"
"""Where transformers keeps the function that checkpoints a layer."""
CHANCE = threading.RLock()
"""Threads share what was drawn, so only one at a time may go back to earlier draws."""


@dataclass(frozen=True)
class Moment:
    """All that a layer sees of the pass in which it runs."""

    plan: Plan
    held: tuple[tuple[Slot | Passing, Any], ...]
    """What earlier hooks have left for it: masks of real tokens, keys and values, weights."""
    drawn: tuple[tuple[Draw, Any], ...]
    """What was left to chance."""

    @classmethod
    def of(cls, plan: Plan, active: Active) -> Moment:
        held = tuple((slot, slot.value) for slot in active.held)
        drawn = tuple((draw, draw.drawn()) for _, draw in plan.draws)
        return cls(plan, held, tuple(pair for pair in drawn if pair[1] is not None))

    def put_back(self) -> None:
        for slot, value in self.held:
            slot.put(value)
        for draw, drawn in self.drawn:
            draw.take(drawn)


class Around:
    """Base of sites whose hooks on a layer put something in place while the layer runs."""

    def around(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Put it in place for the length of a `with` block."""
        raise NotImplementedError


class Again:
    """One call of a layer: whenever it is repeated, the layer sees what it saw first."""

    def __init__(self, call: Callable[..., Any], active: Active, layer: nn.Module) -> None:
        self.call, self.active, self.layer = call, active, layer
        self.first: Moment | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.first is None:
            self.first = Moment.of(self.active.plan, self.active)
            return self.call(*args, **kwargs)
        with seeing(self.first, self.active), attending(self.first.plan, self.active, self.layer), ExitStack() as hooks:
            for hook in self.layer._forward_pre_hooks.values():
                if isinstance(owner := getattr(hook, "__self__", None), Around):
                    hooks.enter_context(owner.around(self.layer))
            return self.call(*args, **kwargs)


@contextmanager
def seeing(moment: Moment, active: Active) -> Iterator[None]:
    """For the length of a `with` block this thread is at an earlier moment; torch may end it with an exception."""
    with CHANCE if moment.drawn else nullcontext():
        own, now = active.own.value, Moment.of(moment.plan, active)
        active.own.put(moment.plan)
        moment.put_back()
        try:
            yield
        finally:
            active.own.put(own)
            now.put_back()


@contextmanager
def attending(plan: Plan, active: Active, layer: nn.Module) -> Iterator[None]:
    """Let a layer attend by our functions, if the plan needs it and the active setup does not."""
    if not plan.attends:
        yield
        return
    threads, thread = active.attending.threads, threading.current_thread()
    named, before = active.attends(), threads.get(thread, False)
    threads[thread] = True
    if not named:
        name_attention(layer, True)
    try:
        yield
    finally:
        threads[thread] = before
        if not active.attends():
            name_attention(layer, False)


class Remembering:
    """Around the function that checkpoints a layer."""

    def __init__(self, original: Callable[..., Any], active: Active, layer: nn.Module) -> None:
        self.original, self.active, self.layer = original, active, layer

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled is recomputed without our hooks
            return self.original(call, *args, **kwargs)
        return self.original(Again(call, self.active, self.layer), *args, **kwargs)


def checkpointable(host: nn.Module) -> tuple[nn.Module, ...]:
    """The modules for which transformers can turn gradient checkpointing on."""
    return tuple(module for module in host.modules() if hasattr(module, "gradient_checkpointing"))


def original_function(layer: nn.Module) -> Any:
    """The function that checkpoints a layer, as transformers or a user gave it; None: it never was."""
    function: Any = getattr(layer, ATTRIBUTE, None)
    return function.original if isinstance(function, Remembering) else function


def remember(layers: tuple[nn.Module, ...], active: Active) -> None:
    """Let the layers that are checkpointed remember their passes."""
    for layer in layers:
        if layer.gradient_checkpointing:
            function: Any = getattr(layer, ATTRIBUTE, None)
            if function is not None and not isinstance(function, Remembering):
                setattr(layer, ATTRIBUTE, Remembering(function, active, layer))


def forget(layers: tuple[nn.Module, ...]) -> None:
    """Leave the layers as transformers made them."""
    for layer in layers:
        if isinstance(getattr(layer, ATTRIBUTE, None), Remembering):
            setattr(layer, ATTRIBUTE, original_function(layer))


def checkpoint_layers(host: PreTrainedModel) -> None:
    """Turn gradient checkpointing on, by the name that this version of transformers has for it."""
    enable = getattr(host, "activation_checkpointing_enable", None) or host.gradient_checkpointing_enable
    enable({"use_reentrant": False})
