"""Hooks: let the maths act on a host's modules, without replacing one of them.

A `Site` is a module without parameters that lives in the host's tree, beside the inlays. Its hooks are bound methods
and not closures, so that a `deepcopy` of the host has hooks of its own. What a pre-hook catches waits in a `Slot` until
the same layer's hook takes it: per thread, for the length of one branch.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.methods.acting import Seen, Step


class Slot(threading.local):
    """Holds one tensor between two hooks, for each thread its own."""

    def __init__(self) -> None:
        self.value: Tensor | None = None  # there from the start: torch.compile guards on what an object has

    def put(self, value: Tensor | None) -> None:
        self.value = value

    def take(self) -> Tensor | None:
        value, self.value = self.value, None
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        return Slot()

    def __reduce__(self) -> tuple[type[Slot], tuple[()]]:
        return Slot, ()


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


class Site(Hooked):
    """One place of the host while some inlay has a module there."""

    def __init__(self, host: nn.Module, place: Place) -> None:
        super().__init__()
        self.place = place
        self.step: Step | None = None
        """What the active setup does here; None leaves the host alone."""
        self.residual = Slot()
        if place.residual is not None:
            branch = host.get_submodule(place.residual[0])
            self.handles.append(branch.register_forward_pre_hook(self.catch, with_kwargs=True))
        stands_in = place.kind in ("norm", "head")  # first the module's stand-in, then what changes its output
        self.handles.append(host.get_submodule(place.module).register_forward_hook(self.act, prepend=stands_in))

    def catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step is not None:
            assert self.place.residual is not None
            inputs = (*args, *kwargs.values())
            self.residual.put(inputs[self.place.residual[1]])

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.step is None:
            return None
        return self.step(output, Seen(args, self.residual.take()))


class HeadSite(Site):
    """The place of a head: it also sees the last hidden states and which tokens are real."""

    def __init__(self, host: nn.Module, place: Place, entry: Entry) -> None:
        super().__init__(host, place)
        self.hidden, self.mask = entry.hidden, entry.mask

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.step is None:
            return None
        return self.step(output, Seen(args, hidden=self.hidden.value, mask=self.mask.value))


class Entry(Hooked):
    """Hooks on the whole host and its base model: what has to be known before the first layer and after the last."""

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, sites: nn.ModuleDict) -> None:
        super().__init__()
        self.sites = (sites,)  # in a tuple: they are not the entry's own
        self.hidden, self.mask = Slot(), Slot()
        self.inputs = list(inspect.signature(host.forward).parameters)
        self.rows: int | None = None
        self.pools = False
        self.drawn: tuple[Any, ...] = ()
        self.handles += [
            host.register_forward_pre_hook(self.enter, with_kwargs=True),
            host.get_submodule(anatomy.base).register_forward_pre_hook(self.begin),
            host.get_submodule(anatomy.base).register_forward_hook(self.between, always_call=True),
            host.register_forward_hook(self.leave, always_call=True),
        ]

    def expect(self, rows: int | None, pools: bool, drawn: list[Any]) -> None:
        """What the active setup needs of each call: a batch of `rows`, the hidden states, inlays that draw."""
        self.rows, self.pools, self.drawn = rows, pools, tuple(drawn)

    def enter(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.rows is not None:
            self._check_rows(args, kwargs)
        if self.pools:
            self.mask.put(self._given("attention_mask", args, kwargs))

    def begin(self, base: nn.Module, args: tuple[Any, ...]) -> None:
        for inlay in self.drawn:
            if inlay.training:
                inlay.draw()

    def between(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if output is None:  # the host failed on the way: nobody takes what was caught
            for site in self.sites[0].values():
                assert isinstance(site, Site)
                site.residual.put(None)
        elif self.pools:
            self.hidden.put(output[0])  # the last hidden states (B, T, D)

    def leave(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.pools:
            self.hidden.put(None)
            self.mask.put(None)

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs or name not in self.inputs:
            return kwargs.get(name)
        at = self.inputs.index(name)
        return args[at] if at < len(args) else None

    def _check_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"):
            given = self._given(name, args, kwargs)
            if given is not None:
                if given.shape[0] != self.rows:
                    raise SetupError(
                        f"Rows is set for a batch of {self.rows} rows, but this batch has {given.shape[0]}. Activate "
                        f"Rows with one part per row; with beams or other repeated rows give each=<repeats> as well."
                    )
                return
