"""Hooks: let the maths act on a host's modules, without replacing one of them.

    BranchInput   catches r where a branch begins
    Site          one host module whose output the active setup may change
    InputSite     one host module whose input it may change
    KeySite       one attention, which is handed keys and values to put in front of its own
    TokenSite     the stack that begins with the embedded tokens, in front of which others are put
    WeightSite    the host's weights, which others stand in for while a part of it runs
    Entry         the host and its base model as a whole: what has to be known before the first layer and after the last

All of them are modules without parameters that live in the host's tree, beside the inlays. Their hooks are bound
methods and not closures, so that a `deepcopy` of the host has hooks of its own. What acts is read from the `Active`
plan of the thread that runs the host; what one hook catches waits in a `Slot` for another: per thread, and no longer
than the branch.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from inlay.anatomy.modules import inside
from inlay.anatomy.places import BranchEnd
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.front import InFront, Longer, keys_and_values, lengthen, moved_positions
from inlay.host.keys import KEYWORD, THEIRS, Front, Segment
from inlay.host.setup import Setup
from inlay.methods.acting import Draw, Seen, Step


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


class Passing(PerThread):
    """Holds anything between two hooks."""

    def __init__(self) -> None:
        self.value: Any = None

    def put(self, value: Any) -> None:
        self.value = value


class OwnPlan(PerThread):
    """The plan of the setup that this thread activated last, if it ever did."""

    def __init__(self) -> None:
        self.plan: Plan | None = None


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

    @property
    def plan(self) -> Plan:
        return self.own.plan or self.latest

    def switch(self, plan: Plan) -> None:
        self.own.plan = self.latest = plan
        self.attending.threads[threading.current_thread()] = plan.attends

    def attends(self) -> bool:
        """Whether some thread's setup needs our attention functions, which do for the others what their own would."""
        return any(needed for thread, needed in list(self.attending.threads.items()) if thread.is_alive())


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

    def __init__(
        self, host: nn.Module, path: str, active: Active, branch: BranchInput | None, real: Slot | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.path = path
        self.active = (active,)
        self.branch = (branch,)
        self.real = real or Slot()
        self.handles.append(host.get_submodule(path).register_forward_hook(self.act))

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        plan, branch = self.active[0].plan, self.branch[0]
        step = plan.steps.get(self.path)
        if branch is None:
            return None if step is None else step(output, Seen(args, mask=self._mask(output)))
        if self.path in plan.keeps:
            branch.inputs[self.path].put(args[0])
        if step is None:
            return None
        earlier = branch.earlier() if plan.keeps else {}
        seen = Seen(args, branch.residual.value, mask=self._mask(output), earlier=earlier)
        if self.path in plan.lasts:
            branch.clear()
        return step(output, seen)

    def _mask(self, output: Tensor) -> Tensor | None:
        """Which tokens are real, if a step asks for it and the output has a row for each text."""
        mask = self.real.value
        return mask if mask is not None and mask.shape[0] == output.shape[0] else None


class InputSite(Hooked):
    """One host module whose input some inlay changes."""

    def __init__(self, host: nn.Module, path: str, active: Active) -> None:
        super().__init__()
        self.path = path
        self.active = (active,)
        self.handles.append(host.get_submodule(path).register_forward_pre_hook(self.enter))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        step = self.active[0].plan.inputs.get(self.path)
        return None if step is None else (step(args[0], Seen(args)), *args[1:])


class KeySite(Hooked):
    """One attention that takes keys and values in front of its own."""

    def __init__(self, host: nn.Module, path: str, active: Active, entry: Entry) -> None:
        super().__init__()
        self.path = path
        self.active = (active,)
        self.caught, self.real = entry.caught, entry.real
        self.handles.append(host.get_submodule(path).register_forward_pre_hook(self.enter, with_kwargs=True))

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        plan, prompt = self.active[0].plan, self.caught.value
        front = plan.keys.get(self.path)
        if prompt is not None and prompt.plan is not plan:
            prompt = None  # of another setup
        if front is None and prompt is None:
            return None
        config: Any = module.config
        if config._attn_implementation not in THEIRS:
            raise SetupError(
                f"the active setup puts keys in front, but the host's attention has been set to "
                f"{config._attn_implementation!r} since. Activate the setup again."
            )
        x = args[0] if args else kwargs["hidden_states"]
        mask = self.real.value
        mask = mask if mask is None or mask.shape[0] == x.shape[0] else None
        segments = () if front is None else (keys_and_values(front, x, mask),)
        if prompt is not None and prompt.done:
            segments = (*segments, prompt.segment(self.path))
        catches = prompt.catch(self.path) if prompt is not None and not prompt.done else None
        return args, kwargs | {KEYWORD: Front(segments, catches)}


class Prompted:
    """The keys and values of tokens in front of a causal decoder, by the attention that made them."""

    def __init__(self, plan: Plan, visible: Tensor | None) -> None:
        self.plan, self.visible = plan, visible
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.done = False

    def catch(self, path: str) -> list[tuple[Tensor, Tensor]]:
        return self.found.setdefault(path, [])

    def segment(self, path: str) -> Segment:
        return Segment(*self.found[path][0], self.visible)


class TokenSite(Hooked):
    """The tokens in front.

    An encoder gets longer inputs and gives outputs that are cut back; in an encoder-decoder the decoder sees all of
    them. A causal decoder would have to see them again at every step: it is run on them alone, and what its attentions
    made of them is put in front of their keys, which is the same.
    """

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, active: Active, entry: Entry) -> None:
        super().__init__()
        self.active, self.entry = (active,), (entry,)
        self.embed = (host.get_submodule(anatomy.embeddings),)
        self.positions = anatomy.positions
        self.longer = Passing()
        if anatomy.causal:
            entry.prompting = True
            return
        both = "decoder" in anatomy.depth
        begins = host.get_submodule(anatomy.stacks["encoder"] if both else anatomy.base)
        self.names = list(inspect.signature(begins.forward).parameters)
        self.handles.append(begins.register_forward_pre_hook(self.grow, with_kwargs=True))
        if both:
            decoder = host.get_submodule(anatomy.stacks["decoder"])
            self.handles.append(decoder.register_forward_pre_hook(self.widen, with_kwargs=True))
            return
        entry.cuts = self.longer
        pooler = getattr(begins, "pooler", None)
        if isinstance(pooler, nn.Module):
            self.handles.append(pooler.register_forward_pre_hook(self.cut))

    def unhook(self) -> None:
        super().unhook()
        self.entry[0].cuts = None
        self.entry[0].prompting = False

    def grow(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        front = self.active[0].plan.tokens
        if front is None:
            return None
        inputs = dict(zip(self.names, args, strict=False)) | kwargs
        grown, longer = lengthen(front, inputs, self.embed[0], module)
        if self.positions is not None and longer.ahead + longer.tokens > self.positions:
            raise SetupError(
                f"{longer.ahead} tokens in front of {longer.tokens} exceed the host's {self.positions} positions."
            )
        self.longer.put(longer)
        return (), grown

    def cut(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        longer = self.longer.value
        return None if longer is None else (longer.cut(args[0]), *args[1:])

    def widen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the decoder see the tokens in front: its mask of the encoder's states grows with them."""
        front, states = self.active[0].plan.tokens, kwargs.get("encoder_hidden_states")
        if front is None or states is None:
            return None
        mask = kwargs.get("encoder_attention_mask")
        tokens = states.shape[1] - front.longest if mask is None else mask.shape[1]
        if mask is not None and states.shape[1] == tokens:  # states that were made without them
            return None
        longer = Longer(front.longest, tokens, front.lengths_of(states))
        return args, kwargs | {"encoder_attention_mask": longer.mask(mask, states)}


class WeightSite(Hooked):
    """The weights of a host, changed.

    New tensors stand in for the host's own while the base model, a stack or a layer runs, and go when it ends. A layer
    has hooks of its own, because gradient checkpointing recomputes it when the base model has long ended.
    """

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, active: Active) -> None:
        super().__init__()
        self.active = (active,)
        self.made = Passing()
        self.lock = Lock()
        base = host.base_model
        self.base = (base,)
        known = {id(p): name for name, p in base.named_parameters() if not name.startswith("inlays.")}
        self.originals = ({name: base.get_parameter(name) for name in known.values()},)
        begins = [anatomy.base, *anatomy.stacks.values()]
        units = {path: host.get_submodule(path) for path in (*begins, *anatomy.layers)}
        owners: dict[str, list[tuple[nn.Module, str, str]]] = {}
        for path, module in host.named_modules():
            if inside(path, ("inlays",)):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in known and parameter.is_floating_point():
                    around = [unit for unit in units if unit == "" or inside(path, (unit,))]
                    unit = max(around, key=len, default=path)  # tied weights of a head stand outside the base model
                    owners.setdefault(unit, []).append((module, name, known[id(parameter)]))
        self.swaps: list[Swap] = []
        for unit in dict.fromkeys((*begins, *owners)):
            module = host.get_submodule(unit)
            self.swaps.append(Swap(module, tuple(owners.get(unit, ())), unit in begins, self))

    def unhook(self) -> None:
        for swap in self.swaps:
            swap.unhook()

    def tensors(self, anew: bool) -> dict[str, Tensor] | None:
        """What stands in for the host's own tensors in this thread's setup; made anew where a forward begins."""
        plan = self.active[0].plan
        if not plan.weights:
            return None
        known = self.made.value
        if known is None or not known.fits(plan) or (anew and torch.is_grad_enabled()):
            if torch.is_grad_enabled():
                checkpointed(self.base[0])
            known = Remade(plan, self.originals[0])
            self.made.put(known)
        return known.tensors


class Remade:
    """New tensors for a host's own, and what they were made of."""

    def __init__(self, plan: Plan, originals: Mapping[str, Tensor]) -> None:
        self.plan, self.graph = plan, torch.is_grad_enabled()
        total: dict[str, Tensor] = {}
        for module, share in plan.weights:
            for name, change in module().items():
                change = change if share == 1.0 else share * change
                total[name] = total[name] + change if name in total else change
        self.tensors = {name: originals[name] + change.to(originals[name].dtype) for name, change in total.items()}
        self.like = originals
        self.parameters = [p.detach().clone() for p in self._now()]

    def _now(self) -> list[Tensor]:
        first = next(iter(self.like.values()))[..., :1]
        return [first, *(p for module, _ in self.plan.weights for p in module.parameters())]

    def fits(self, plan: Plan) -> bool:
        """Whether they are still right: a text is generated with one set of them."""
        if self.plan is not plan or self.graph != torch.is_grad_enabled():
            return False
        now = self._now()
        return all(
            a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
            for a, b in zip(now, self.parameters, strict=True)
        )


class Lock:
    """One thread at a time; copies and pickles start anew."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lock:
        return Lock()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class Swap(Hooked):
    """The hooks of one part of the host."""

    def __init__(
        self, module: nn.Module, owned: tuple[tuple[nn.Module, str, str], ...], begins: bool, site: WeightSite
    ) -> None:  # fmt: skip
        super().__init__()
        self.owned, self.begins, self.site = owned, begins, (site,)
        self.handles.append(module.register_forward_pre_hook(self.enter, prepend=True))
        self.handles.append(module.register_forward_hook(self.leave, always_call=True))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        site = self.site[0]
        site.lock.lock.acquire()
        new = site.tensors(self.begins)
        if new is not None:
            for owner, name, tensor in self.owned:
                owner._parameters[name] = new[tensor]  # type: ignore[assignment]

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        site = self.site[0]
        for owner, name, tensor in self.owned:
            owner._parameters[name] = site.originals[0][tensor]
        site.lock.lock.release()


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
        self.real = Slot()
        """Which tokens of an encoder's texts are real, until the next forward."""
        self.caught = Passing()
        """Keys and values of tokens in front of a causal decoder, until the next forward: a checkpointed layer may be
        recomputed meanwhile."""
        self.cuts: Passing | None = None
        """How the batch has grown, where an encoder has tokens in front."""
        self.prompting = False
        """Whether the host is a causal decoder with tokens in front."""
        self.embed = (host.get_submodule(anatomy.embeddings),)
        self.base_inputs = list(inspect.signature(host.get_submodule(anatomy.base).forward).parameters)
        self.inputs = list(inspect.signature(host.forward).parameters)
        self.handles += [
            host.register_forward_pre_hook(self.enter, with_kwargs=True),
            host.get_submodule(anatomy.base).register_forward_pre_hook(self.begin, with_kwargs=True),
            host.get_submodule(anatomy.base).register_forward_hook(self.between, always_call=True),
            host.register_forward_hook(self.leave, always_call=True),
        ]
        reader = host.get_submodule(anatomy.stacks["encoder"] if len(anatomy.depth) == 2 else anatomy.base)
        self.reader_inputs = list(inspect.signature(reader.forward).parameters)
        self.handles.append(reader.register_forward_pre_hook(self.read, with_kwargs=True))

    def enter(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self.active[0].plan
        if plan.rows is not None:
            self._check_rows(plan.rows, args, kwargs)
        if plan.pools:
            self.mask.put(self._given("attention_mask", args, kwargs))

    def read(self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active[0].plan.masks:
            mask = (dict(zip(self.reader_inputs, args, strict=False)) | kwargs).get("attention_mask")
            self.real.put(mask if isinstance(mask, Tensor) and mask.dim() == 2 else None)
        elif self.real.value is not None:
            self.real.put(None)

    def begin(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        plan = self.active[0].plan
        for inlay, draw in plan.draws:
            if inlay.training:
                draw.draw()
        if not any(plan.shifts):
            return None
        inputs = dict(zip(self.base_inputs, args, strict=False)) | kwargs
        like: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        if self.prompting and plan.tokens is not None:
            self._prompt(base, plan, plan.tokens, like, inputs.get("past_key_values"))
        by: int | Tensor = plan.shifts[0]
        if len(plan.shifts) > 1:
            by = torch.tensor(plan.shifts, device=like.device).repeat_interleave(like.shape[0] // len(plan.shifts))[
                :, None
            ]
        return (), inputs | {"position_ids": moved_positions(inputs, by, base)}

    def _prompt(self, base: nn.Module, plan: Plan, front: InFront, like: Tensor, past: Any) -> None:
        """Run a causal decoder on the tokens in front alone; while a text is generated, on its first step only."""
        known = self.caught.value
        goes_on = past is not None and past.get_seq_length() > 0 and not torch.is_grad_enabled()
        if goes_on and known is not None and known.plan is plan:
            return
        weight: Tensor = self.embed[0].weight  # type: ignore[assignment]
        passes = max((draw.passes for inlay, draw in plan.draws if inlay.training), default=1)
        rows = like.shape[0] if plan.rows is not None else passes
        blank = weight.new_zeros(rows, 1, weight.shape[1])
        tokens = front.made(blank).to(weight.dtype)
        visible = front.visible(blank)
        prompted = Prompted(plan, visible)
        self.caught.put(prompted)
        mask = None
        if visible is not None:  # a row without tokens sees its first blank, which nobody looks at
            mask = visible.long().clone()
            mask[:, 0] = 1
        with not_checkpointed(base):
            base.forward(inputs_embeds=tokens, attention_mask=mask, use_cache=False)
        prompted.done = True

    def between(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        longer = None if self.cuts is None else self.cuts.value
        if longer is not None and self.cuts is not None:
            self.cuts.put(None)
            output = None if output is None else longer.cut(output)
        if output is None:
            self.caught.put(None)  # the host failed on the way: nobody takes what was caught
            for branch in self.branches[0].values():
                assert isinstance(branch, BranchInput)
                branch.clear()
        elif self.active[0].plan.pools:
            self.hidden.put(output[0])  # the last hidden states (B, T, D)
        return None if longer is None else output

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


def checkpointed(base: nn.Module) -> list[nn.Module]:
    """The layers under gradient checkpointing; refused if it is reentrant, which loses what layers have in common."""
    layers = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False) is True and m.training]
    for layer in layers:
        function: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if isinstance(function, functools.partial) and function.keywords.get("use_reentrant"):
            raise SetupError(
                "what this setup makes once for all layers needs gradient checkpointing that is not reentrant: "
                "host.gradient_checkpointing_enable({'use_reentrant': False})."
            )
    return layers


@contextmanager
def not_checkpointed(base: nn.Module) -> Iterator[None]:
    """No gradient checkpointing for the length of a `with` block: what is caught in a layer has to keep its graph."""
    layers = checkpointed(base)
    for layer in layers:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]
