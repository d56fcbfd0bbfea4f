"""Hooks on the host's weights: others stand in for them while a part of the host runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import ATTRIBUTE, inside
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.plan import Active, Passing, Plan
from inlay.host.recompute import Around
from inlay.host.sites import Hooked, checkpointed


class WeightSite(Hooked):
    """The weights of a host, changed.

    New tensors stand in for the host's own while the base model, a stack or a layer runs, and go when it ends. A layer
    has hooks of its own, because gradient checkpointing recomputes it when the base model has long ended.
    """

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, active: Active) -> None:
        super().__init__()
        self.active = (active,)
        self.made = Passing()
        active.held.append(self.made)
        self.lock = Lock()
        base = host.base_model
        self.base = (base,)
        known = {id(p): name for name, p in base.named_parameters() if not name.startswith(f"{ATTRIBUTE}.")}
        begins = [anatomy.base, *anatomy.stacks.values()]
        units = {path: host.get_submodule(path) for path in (*begins, *anatomy.layers)}
        owners: dict[str, list[tuple[nn.Module, str, str]]] = {}
        for path, module in host.named_modules():
            if inside(path, (ATTRIBUTE,)):
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
        self.active[0].held.remove(self.made)
        self.made.put(None)
        for swap in self.swaps:
            swap.unhook()

    def originals(self) -> dict[str, Tensor]:
        """The host's own tensors as they are now: somebody may have put others in their places."""
        found: dict[str, Tensor] = {}
        for swap in self.swaps:
            for (_, _, name), tensor in zip(swap.owned, swap.originals(), strict=True):
                found.setdefault(name, tensor)
        return found

    def tensors(self, anew: bool) -> dict[str, Tensor] | None:
        """What stands in for the host's own tensors in this thread's setup; made anew where a forward begins."""
        plan = self.active[0].plan
        if not plan.weights:
            if self.made.value is not None:  # of another setup: as many numbers as the whole host
                self.made.put(None)
            return None
        known, originals = self.made.value, self.originals()
        begun = not anew and any(swap.before for swap in self.swaps if swap.begins)
        if known is None or not known.fits(plan, originals, begun) or (anew and torch.is_grad_enabled()):
            if torch.is_grad_enabled():
                checkpointed(self.base[0])
            known = Remade(plan, originals)
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
        for name, change in total.items():
            if change.shape != originals[name].shape:
                raise SetupError(
                    f"{name} is {tuple(originals[name].shape)} and was {tuple(change.shape)} when the inlay was set in "
                    f"that changes it, as before resize_token_embeddings. Resize the host before adding inlays."
                )
        self.tensors = {name: originals[name] + change.to(originals[name]) for name, change in total.items()}
        self.originals = originals
        self.parameters = [p.detach().clone() for p in self._now()]

    def _now(self) -> list[Tensor]:
        first = next(iter(self.originals.values()))[..., :1]
        return [first, *(p for module, _ in self.plan.weights for p in module.parameters())]

    def fits(self, plan: Plan, originals: Mapping[str, Tensor], begun: bool = False) -> bool:
        """Whether they are still right: a text is generated with one set of them.

        begun: the pass that they were checked for when it began goes on. A GPU waits for each tensor that is compared.
        """
        if self.plan is not plan or self.graph != torch.is_grad_enabled():
            return False
        if any(originals[name] is not tensor for name, tensor in self.originals.items()):
            return False
        if begun:
            return True
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


class Swap(Hooked, Around):
    """The hooks of one part of the host."""

    def __init__(
        self, module: nn.Module, owned: tuple[tuple[nn.Module, str, str], ...], begins: bool, site: WeightSite
    ) -> None:  # fmt: skip
        super().__init__()
        self.owned, self.begins, self.site = owned, begins, (site,)
        self.before: list[list[Tensor]] = []
        """For each pass through this part, outermost first, what stood where others stand in; empty if none do."""
        self.handles.append(module.register_forward_pre_hook(self.enter, prepend=True))
        self.handles.append(module.register_forward_hook(self.leave, always_call=True))

    def originals(self) -> list[Tensor]:
        """The host's own tensors, of each that is owned here."""
        known = next((tensors for tensors in self.before if tensors), None)
        return self._standing() if known is None else known

    def _standing(self) -> list[Tensor]:
        return [owner._parameters[name] for owner, name, _ in self.owned]  # type: ignore[misc]

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        site = self.site[0]
        site.lock.lock.acquire()
        self.before.append([])
        new = site.tensors(self.begins)
        if new is not None:
            self.before[-1] = self._standing()
            for owner, name, tensor in self.owned:
                owner._parameters[name] = new[tensor]  # type: ignore[assignment]

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before = self.before.pop()
        for (owner, name, _), tensor in zip(self.owned, before, strict=False):  # nothing stood aside: nothing goes back
            owner._parameters[name] = tensor  # type: ignore[assignment]
        self.site[0].lock.lock.release()

    @contextmanager
    def around(self, layer: nn.Module) -> Iterator[None]:
        self.enter(layer, ())
        try:
            yield
        finally:
            self.leave(layer, (), None)
