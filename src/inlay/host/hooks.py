"""Hooks: let the maths act on a host's modules, without replacing one of them.

    BranchInput   catches r where a branch begins
    Site          one host module whose output the active setup may change
    Entry         the host and its base model as a whole: what has to be known before the first layer and after the last

All of them are modules without parameters that live in the host's tree, beside the inlays. Their hooks are bound
methods and not closures, so that a `deepcopy` of the host has hooks of its own. What acts is read from the `Active`
plan of the thread that runs the host; what one hook catches waits in a `Slot` for another: per thread, and no longer
than the branch.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from inlay.anatomy.places import BranchEnd
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.setup import Setup
from inlay.methods.acting import Draw, Seen, Step


@dataclass(frozen=True)
class Plan:
    """A setup, resolved: what each hook does. An error while it is made changes nothing."""

    setup: Setup = None
    steps: Mapping[str, Step] = field(default_factory=dict)
    """Host module to what is made of its output; elsewhere the host is left alone."""
    keeps: frozenset[str] = frozenset()
    """Modules whose input is read by a step at a later module of the same branch."""
    lasts: frozenset[str] = frozenset()
    """The last module of each branch at which something acts: what was caught for it is let go there."""
    branches: frozenset[str] = frozenset()
    """The branches where something acts."""
    rows: int | None = None
    """The batch that Rows is made for."""
    pools: bool = False
    """Whether a head pools the hidden states itself."""
    per_token: bool = False
    """Whether a head gives logits for every token."""
    draws: tuple[tuple[nn.Module, Draw], ...] = ()
    """The inlays that act, and what each leaves to chance in a training step."""


class PerThread(threading.local):
    """State of its own for each thread; copies and pickles start anew."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class Slot(PerThread):
    """Holds one tensor between two hooks."""

    def __init__(self) -> None:
        self.value: Tensor | None = None  # there from the start: torch.compile guards on what an object has

    def put(self, value: Tensor | None) -> None:
        self.value = value


class OwnPlan(PerThread):
    """The plan of the setup that this thread activated last, if it ever did."""

    def __init__(self) -> None:
        self.plan: Plan | None = None


class Active(nn.Module):
    """What acts: in each thread what it activated itself, otherwise what any thread activated last."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnPlan()
        self.latest = Plan()

    @property
    def plan(self) -> Plan:
        return self.own.plan or self.latest

    def switch(self, plan: Plan) -> None:
        self.own.plan = self.latest = plan


class Hooked(nn.Module):
    """A module without parameters whose methods are hooks on the host's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[RemovableHandle] = []

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def is_hooked(host: nn.Module) -> bool:
    """Whether some module of the host carries a hook of Inlay's."""
    hooks = (hook for m in host.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return any(isinstance(getattr(hook, "__self__", None), Hooked) for hook in hooks)


class BranchInput(Hooked):
    """One branch: its residual, and the inputs of the modules at its end, for the length of the branch."""

    def __init__(self, host: nn.Module, name: str, end: BranchEnd, active: Active) -> None:
        super().__init__()
        self.name = name
        self.active = (active,)  # in a tuple: it is the host's, not the branch's own
        self.at = end.residual[1]
        self.residual = Slot()
        self.inputs = {module: Slot() for module in end.modules}
        branch = host.get_submodule(end.residual[0])
        self.handles.append(branch.register_forward_pre_hook(self.catch, with_kwargs=True))

    def catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.name in self.active[0].plan.branches:
            self.residual.put((*args, *kwargs.values())[self.at])

    def earlier(self) -> dict[str, Tensor]:
        return {module: slot.value for module, slot in self.inputs.items() if slot.value is not None}

    def clear(self) -> None:
        self.residual.put(None)
        for slot in self.inputs.values():
            slot.put(None)


class Site(Hooked):
    """One host module at which some inlay has a module."""

    def __init__(self, host: nn.Module, path: str, active: Active, branch: BranchInput | None) -> None:
        super().__init__()
        self.path = path
        self.active = (active,)
        self.branch = (branch,)
        self.handles.append(host.get_submodule(path).register_forward_hook(self.act))

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        plan, branch = self.active[0].plan, self.branch[0]
        step = plan.steps.get(self.path)
        if branch is None:
            return None if step is None else step(output, Seen(args))
        if self.path in plan.keeps:
            branch.inputs[self.path].put(args[0])
        if step is None:
            return None
        seen = Seen(args, branch.residual.value, earlier=branch.earlier() if plan.keeps else {})
        if self.path in plan.lasts:
            branch.clear()
        return step(output, seen)


class HeadSite(Site):
    """A module of the head: it also sees the last hidden states and which tokens are real."""

    def __init__(self, host: nn.Module, path: str, active: Active, entry: Entry) -> None:
        super().__init__(host, path, active, None)
        self.hidden, self.mask = entry.hidden, entry.mask
        self.picks = type(host).__name__.endswith("ForSequenceClassification")
        """Whether the host keeps the logits of one token, where it has some for each: decoders do."""

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        plan = self.active[0].plan
        step = plan.steps.get(self.path)
        if step is None:
            return None
        made = step(output, Seen(args, hidden=self.hidden.value, mask=self.mask.value))
        if plan.per_token and self.picks and output.dim() == 3:  # whichever token is picked, it brings all of them
            made = made.flatten(1).unsqueeze(1).expand(-1, output.shape[1], -1)  # (B, T, T · labels)
        return made


class Entry(Hooked):
    """Hooks on the whole host and its base model."""

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, active: Active, branches: nn.ModuleDict) -> None:
        super().__init__()
        self.active, self.branches = (active,), (branches,)
        self.hidden, self.mask = Slot(), Slot()
        self.inputs = list(inspect.signature(host.forward).parameters)
        self.handles += [
            host.register_forward_pre_hook(self.enter, with_kwargs=True),
            host.get_submodule(anatomy.base).register_forward_pre_hook(self.begin),
            host.get_submodule(anatomy.base).register_forward_hook(self.between, always_call=True),
            host.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self.active[0].plan
        if plan.rows is not None:
            self._check_rows(plan.rows, args, kwargs)
        if plan.pools:
            self.mask.put(self._given("attention_mask", args, kwargs))

    def begin(self, base: nn.Module, args: tuple[Any, ...]) -> None:
        for inlay, draw in self.active[0].plan.draws:
            if inlay.training:
                draw.draw()

    def between(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if output is None:  # the host failed on the way: nobody takes what was caught
            for branch in self.branches[0].values():
                assert isinstance(branch, BranchInput)
                branch.clear()
        elif self.active[0].plan.pools:
            self.hidden.put(output[0])  # the last hidden states (B, T, D)

    def leave(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        plan = self.active[0].plan
        if not plan.pools:
            return None
        hidden = self.hidden.value
        self.hidden.put(None)
        self.mask.put(None)
        return _unpacked(output, hidden.shape[1]) if plan.per_token and hidden is not None else None

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs or name not in self.inputs:
            return kwargs.get(name)
        at = self.inputs.index(name)
        return args[at] if at < len(args) else None

    def _check_rows(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"):
            given = self._given(name, args, kwargs)
            if given is not None:
                if given.shape[0] != rows:
                    raise SetupError(
                        f"Rows is set for a batch of {rows} rows, but this batch has {given.shape[0]}. Activate "
                        f"Rows with one part per row; with beams or other repeated rows give each=<repeats> as well."
                    )
                return


def _unpacked(output: Any, tokens: int) -> Any:
    """The host's output with logits (B, T, labels), where it picked a token that had brought all of them."""
    if isinstance(output, tuple):  # return_dict=False: the logits are the first that are not a loss
        at = next(i for i, value in enumerate(output) if value.dim())
        return (*output[:at], _per_token(output[at], tokens), *output[at + 1 :])
    if getattr(output, "logits", None) is not None:
        output.logits = _per_token(output.logits, tokens)
    return output


def _per_token(logits: Tensor, tokens: int) -> Tensor:
    return logits.unflatten(-1, (tokens, -1)) if logits.dim() == 2 else logits
