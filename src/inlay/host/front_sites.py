"""Hooks that put keys, values or tokens in front of what the host attends to."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.entry import Entry
from inlay.host.front import Longer, keys_and_values, lengthen
from inlay.host.keys import KEYWORD, THEIRS, Front
from inlay.host.plan import Active, Passing
from inlay.host.sites import Hooked


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


class TokenSite(Hooked):
    """The tokens in front.

    An encoder gets longer inputs and gives outputs that are cut back; in an encoder-decoder the decoder sees all of
    them. A causal decoder would have to see them again at every step: it is run on them alone, and what its attentions
    made of them is put in front of their keys, which is the same.
    """

    def __init__(self, host: PreTrainedModel, anatomy: Anatomy, active: Active, entry: Entry) -> None:
        super().__init__()
        self.active, self.entry = (active,), (entry,)
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
        grown, longer = lengthen(front, inputs, self.entry[0].embed, module)
        if self.positions is not None and longer.ahead + longer.tokens > self.positions:
            raise SetupError(
                f"{longer.ahead} tokens in front of {longer.tokens} exceed the host's {self.positions} positions."
            )
        self.longer.put(longer)
        if self.entry[0].real.value is not None:
            self.entry[0].real.put(grown.get("attention_mask"))  # what reads whole texts sees the longer ones
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
