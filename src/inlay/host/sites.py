"""Hooks on single modules of a host: what a branch is given, what a module is given and gives, its head."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inlay.anatomy.places import BranchEnd
from inlay.errors import SetupError
from inlay.host.plan import Active, Plan, Slot
from inlay.host.recompute import original_function
from inlay.host.steps import unpooled_rows
from inlay.methods.acting import Seen


class Hooked(nn.Module):
    """A module without parameters whose methods are hooks on the host's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[RemovableHandle] = []

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def hooked_by(module: nn.Module) -> Iterator[Hooked]:
    """Whose hooks a module carries, of Inlay's."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if isinstance(owner := getattr(hook, "__self__", None), Hooked):
            yield owner


def is_hooked(host: nn.Module) -> bool:
    """Whether some module of the host carries a hook of Inlay's."""
    return any(any(hooked_by(module)) for module in host.modules())


def lost_sites(host: nn.Module, sites: nn.ModuleDict) -> list[str]:
    """Modules that stand where others with hooks on them stood: what inlays have there cannot act."""
    at = [site for site in sites.values() if isinstance(site, Site | InputSite)]
    return [site.path for site in at if site not in list(hooked_by(host.get_submodule(site.path)))]


def check_sites(host: nn.Module, sites: nn.ModuleDict, plan: Plan) -> bool:
    """Refuse a plan for modules that were replaced; whether none was."""
    lost = lost_sites(host, sites)
    if needed := [path for path in lost if path in plan.steps or path in plan.inputs]:
        raise SetupError(
            f"{' and '.join(needed)} stands where another module stood when inlays were set in, as after "
            f"resize_token_embeddings, so what they have there cannot act. Resize the host before adding inlays, or "
            f"remove them."
        )
    return not lost


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


class LayerInput(Hooked):
    """What one layer is given, until the end of its last branch."""

    def __init__(self, host: nn.Module, name: str, attention: BranchEnd, active: Active) -> None:
        super().__init__()
        self.name = name
        self.active = (active,)
        self.at = attention.residual[1]
        self.given = Slot()
        first = host.get_submodule(attention.residual[0])
        self.handles.append(first.register_forward_pre_hook(self.catch, with_kwargs=True))

    def catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.name in self.active[0].plan.layers:
            self.given.put((*args, *kwargs.values())[self.at])

    def clear(self) -> None:
        self.given.put(None)


class Site(Hooked):
    """One host module at which some inlay has a module."""

    def __init__(
        self, host: nn.Module, path: str, active: Active, branch: BranchInput | None, real: Slot | None = None,
        layers: nn.ModuleDict | None = None, layer: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.path = path
        self.active = (active,)
        self.branch = (branch,)
        self.real = real or Slot()
        self.layers, self.layer = (layers,), layer  # whose input is caught, if a step reads it, comes and goes there
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
        whole = self._whole_layer() if plan.layers else None
        given = None if whole is None else whole.given.value
        mask = self._mask(output if given is None else given)
        seen = Seen(args, branch.residual.value, mask=mask, layer=given, earlier=earlier)
        if self.path in plan.lasts:
            branch.clear()
            if whole is not None:
                whole.clear()
        return step(output, seen)

    def _whole_layer(self) -> LayerInput | None:
        layers = self.layers[0]
        return None if layers is None else layers._modules.get(self.layer)  # type: ignore[return-value]

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


class HeadSite(Site):
    """A module of the head: it also sees the last hidden states and which tokens are real."""

    def __init__(self, host: nn.Module, path: str, active: Active, hidden: Slot, mask: Slot) -> None:
        super().__init__(host, path, active, None)
        self.hidden, self.mask = hidden, mask
        self.picks = type(host).__name__.endswith("ForSequenceClassification")
        """Whether the host keeps the logits of one token, where it has some for each: decoders do."""

    def act(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        plan = self.active[0].plan
        step = plan.steps.get(self.path)
        if step is None:
            return None
        made = step(output, Seen(args, hidden=self.hidden.value, mask=self.mask.value))
        if plan.per_token and self.picks and output.dim() == 3:  # whichever token is picked, it brings all of them
            return _of_all_tokens(made, unpooled_rows(step, len(made)))
        return made


def _of_all_tokens(logits: Tensor, own: list[int]) -> Tensor:
    """(B, T, labels) to (B, T, T · labels); a row whose logits depend on the picked token brings those alone."""
    tokens = logits.shape[1]
    everywhere = logits.flatten(1).unsqueeze(1).expand(-1, tokens, -1)
    if not own:
        return everywhere
    rows = torch.tensor(own, device=logits.device)
    return everywhere.index_copy(0, rows, logits[rows].repeat(1, 1, tokens))


def checkpointed(base: nn.Module) -> list[nn.Module]:
    """The layers under gradient checkpointing; refused if it is reentrant, which loses what layers have in common."""
    layers = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False) is True and m.training]
    for layer in layers:
        function = original_function(layer)
        if isinstance(function, functools.partial) and function.keywords.get("use_reentrant") is not False:
            raise SetupError(
                "what this setup makes once for all layers needs gradient checkpointing that is not reentrant: turn it "
                "on with {'use_reentrant': False}."
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
