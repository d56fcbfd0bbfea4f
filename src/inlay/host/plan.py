"""A setup, resolved: what each hook does, and which plan acts in which thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inlay.host.front import InFront
from inlay.host.keys import Segment
from inlay.host.setup import Setup
from inlay.methods.acting import Draw, PerThread, Step


@dataclass(frozen=True)
class Plan:
    """A setup, resolved: what each hook does. An error while it is made changes nothing."""

    setup: Setup = None
    steps: Mapping[str, Step] = field(default_factory=dict)
    """Host module to what is made of its output; elsewhere the host is left alone."""
    keys: Mapping[str, InFront] = field(default_factory=dict)
    """Attention to the keys and values in front of its own."""
    tokens: InFront | None = None
    """The embedded tokens in front of the host's own."""
    weights: tuple[tuple[nn.Module, float], ...] = ()
    """Modules that give changes of the host's weights, and how much of each."""
    shifts: tuple[int, ...] = (0,)
    """By how many positions the tokens move: of all rows, or of each part of the batch."""
    attends: bool = False
    """Whether the host has to attend by our functions."""
    inputs: Mapping[str, Step] = field(default_factory=dict)
    """Host module to what is made of its input."""
    keeps: frozenset[str] = frozenset()
    """Modules whose input is read by a step at a later module of the same branch."""
    lasts: frozenset[str] = frozenset()
    """The last module of each branch at which something acts: what was caught for it is let go there."""
    branches: frozenset[str] = frozenset()
    """The branches where something acts."""
    layers: frozenset[str] = frozenset()
    """The layers whose input something reads at the end of their last branch."""
    whole_texts: bool = False
    """Whether something attends to the other tokens of a text, so that no cache can stand for them."""
    rows: int | None = None
    """The batch that Rows is made for."""
    masks: bool = False
    """Whether something reads whole texts and has to know which tokens are real."""
    pools: bool = False
    """Whether a head pools the hidden states itself."""
    per_token: bool = False
    """Whether a head gives logits for every token."""
    draws: tuple[tuple[nn.Module, Draw], ...] = ()
    """The inlays that act, and what each leaves to chance in a training step."""


class Slot(PerThread[Tensor]):
    """Holds one tensor between two hooks."""


class Passing(PerThread[Any]):
    """Holds anything between two hooks."""


class OwnPlan(PerThread[Plan]):
    """The plan of the setup that this thread activated last, if it ever did."""


class Attending:
    """Which threads need our attention functions; a copy begins with what its maker has."""

    def __init__(self, attends: bool = False) -> None:
        self.threads: weakref.WeakKeyDictionary[threading.Thread, bool] = weakref.WeakKeyDictionary()
        self.threads[threading.current_thread()] = attends

    def __deepcopy__(self, memo: dict[int, Any]) -> Attending:
        return Attending(any(self.threads.values()))

    def __reduce__(self) -> tuple[type[Attending], tuple[bool]]:
        return Attending, (any(self.threads.values()),)


class Active(nn.Module):
    """What acts: in each thread what it activated itself, otherwise what any thread activated last."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnPlan()
        self.latest = Plan()
        self.attending = Attending()
        self.held: list[Slot | Passing] = []
        """What hooks leave for all layers of a pass."""

    @property
    def plan(self) -> Plan:
        return self.own.value or self.latest

    def switch(self, plan: Plan) -> None:
        self.own.put(plan)
        self.latest = plan
        self.attending.threads[threading.current_thread()] = plan.attends

    def forget_threads(self) -> None:
        """Let every thread run what is activated next, and not what it activated itself before."""
        self.own, self.attending = OwnPlan(), Attending()

    def attends(self) -> bool:
        """Whether some thread's setup needs our attention functions, which do for the others what their own would."""
        return any(needed for thread, needed in list(self.attending.threads.items()) if thread.is_alive())


class Prompted:
    """The keys and values of tokens in front of a causal decoder, by the attention that made them."""

    def __init__(self, plan: Plan, visible: Tensor | None) -> None:
        self.plan, self.visible = plan, visible
        self.learns = torch.is_grad_enabled()
        """Whether a training step has made them: the weights are others when it is over."""
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.done = False

    def catch(self, path: str) -> list[tuple[Tensor, Tensor]]:
        return self.found.setdefault(path, [])

    def segment(self, path: str) -> Segment:
        return Segment(*self.found[path][0], self.visible)
