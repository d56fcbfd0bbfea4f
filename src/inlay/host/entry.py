"""Hooks on the host and its base model as a whole: what has to be known before the first layer and after the last.

    sites.py          BranchInput catches r where a branch begins; Site changes a module's output, InputSite its input
    front_sites.py    KeySite hands an attention keys and values; TokenSite puts tokens in front of a stack
    weight_sites.py   WeightSite lets other weights stand in for the host's

All of them are modules without parameters that live in the host's tree, beside the inlays. Their hooks are bound
methods and not closures, so that a `deepcopy` of the host has hooks of its own. What acts is read from the `Active`
plan of the thread that runs the host; what one hook catches waits in a `Slot` for another: per thread, and no longer
than the branch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import name_of
from inlay.anatomy.survey import Anatomy
from inlay.errors import SetupError
from inlay.host.front import InFront, moved_positions
from inlay.host.plan import Active, Passing, Plan, Prompted, Slot
from inlay.host.recompute import checkpointable, forget, remember
from inlay.host.sites import BranchInput, Hooked, LayerInput, check_sites, not_checkpointed
from inlay.methods.acting import check_mask


class Entry(Hooked):
    """Hooks on the whole host and its base model."""

    def __init__(
        self, host: PreTrainedModel, anatomy: Anatomy, active: Active, branches: nn.ModuleDict, sites: nn.ModuleDict
    ) -> None:
        super().__init__()
        self.active, self.branches, self.sites = (active,), (branches,), (sites,)
        self.hidden, self.mask = Slot(), Slot()
        self.real = Slot()
        """Which tokens of an encoder's texts are real, until the next forward; of a decoder's that is alone too."""
        self.written = Slot()
        """The same of the texts of a decoder that stands after an encoder."""
        self.caught = Passing()
        """Keys and values of tokens in front of a causal decoder, until the next forward."""
        active.held += [self.real, self.written, self.caught]
        self.cuts: Passing | None = None
        """How the batch has grown, where an encoder has tokens in front."""
        self.prompting = False
        """Whether the host is a causal decoder with tokens in front."""
        self.checkpointable = checkpointable(host)
        self.embeddings = _embeddings(host)
        base = host.get_submodule(anatomy.begins)
        self.base_inputs = list(inspect.signature(base.forward).parameters)
        self.inputs = list(inspect.signature(host.forward).parameters)
        self.handles += [
            host.register_forward_pre_hook(self.enter, with_kwargs=True),
            base.register_forward_pre_hook(self.begin, with_kwargs=True),
            base.register_forward_hook(self.between, always_call=True),
            host.register_forward_hook(self.leave, always_call=True),
        ]
        both = len(anatomy.depth) == 2
        reader = host.get_submodule(anatomy.stacks["encoder"] if both else anatomy.begins)
        self.reader_inputs = list(inspect.signature(reader.forward).parameters)
        self.handles.append(reader.register_forward_pre_hook(self.read, with_kwargs=True))
        if both:
            writer = host.get_submodule(anatomy.stacks["decoder"])
            self.writer_inputs = list(inspect.signature(writer.forward).parameters)
            self.handles.append(writer.register_forward_pre_hook(self.write, with_kwargs=True))

    def unhook(self) -> None:
        super().unhook()
        forget(self.checkpointable)

    def enter(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self.active[0].plan
        _refuse_replica(host, plan)
        if plan.setup is not None:
            self._check_embeddings(host, plan)
        if plan.rows is not None:
            self._check_rows(plan.rows, args, kwargs)
        if plan.pools:
            self.mask.put(self._given("attention_mask", args, kwargs))

    def _check_embeddings(self, host: nn.Module, plan: Plan) -> None:
        """After its vocabulary was resized, the host has other modules for its embeddings."""
        if any(parent._modules.get(name) is not module for parent, name, module in self.embeddings) and check_sites(
            host, self.sites[0], plan
        ):
            self.embeddings = _embeddings(host)

    @property
    def embed(self) -> nn.Module:
        """The host's input embeddings."""
        parent, name, _ = self.embeddings[0]
        return parent._modules[name]  # type: ignore[return-value]

    def read(self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._remember()
        self._note_mask(self.real, self.reader_inputs, args, kwargs)

    def write(self, writer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._remember()
        self._note_mask(self.written, self.writer_inputs, args, kwargs)

    def _remember(self) -> None:
        """Before a stack's first layer: checkpointing may have been turned on since the last pass."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            remember(self.checkpointable, self.active[0])

    def _note_mask(self, slot: Slot, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self.active[0].plan
        if plan.masks or plan.whole_texts:
            inputs = dict(zip(names, args, strict=False)) | kwargs
            if plan.whole_texts:
                _refuse_cache(inputs.get("past_key_values"))
            mask = inputs.get("attention_mask")
            if slot is self.real or plan.whole_texts:  # a gate reads the encoder's texts only
                check_mask(mask)
            slot.put(mask if isinstance(mask, Tensor) and mask.dim() == 2 else None)
        elif slot.value is not None:
            slot.put(None)

    def begin(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        plan = self.active[0].plan
        _refuse_replica(base, plan)
        for inlay, draw in plan.draws:
            if inlay.training:
                draw.draw()
        if self.caught.value is not None and self.caught.value.plan is not plan:
            self.caught.put(None)  # of another setup, with all that it was computed from
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
        if known is not None and known.plan is plan and not known.learns and _goes_on(past, like):
            return
        weight: Tensor = self.embed.weight  # type: ignore[assignment]
        passes = max([1, *(draw.passes for inlay, draw in plan.draws if inlay.training)])
        rows = like.shape[0] if plan.rows is not None else passes
        blank = torch.zeros(rows, 1, weight.shape[1], device=like.device, dtype=weight.dtype)
        tokens = front.made(blank).to(weight.dtype)
        visible = front.visible(blank)
        prompted = Prompted(plan, visible)
        self.caught.put(prompted)
        mask = None
        if visible is not None:  # a row without tokens sees its first blank, which nobody looks at
            mask = visible.long().clone()
            mask[:, 0] = 1
        self.real.put(mask)  # until the text's own is noted
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
                assert isinstance(branch, BranchInput | LayerInput)
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


def _embeddings(host: Any) -> tuple[tuple[nn.Module, str, nn.Module], ...]:
    """The input embeddings and, if there are any, the output embeddings: each as (parent, name, module)."""
    found = []
    for module in filter(None, (host.get_input_embeddings(), host.get_output_embeddings())):
        parent, _, name = name_of(host, module).rpartition(".")
        found.append((host.get_submodule(parent), name, module))
    return tuple(found)


def _refuse_replica(module: nn.Module, plan: Plan) -> None:
    """Refuse what nn.DataParallel makes of a host: its hooks are the original's, and run the original's inlays."""
    if plan.setup is not None and getattr(module, "_is_replica", False):
        raise SetupError(
            "nn.DataParallel copies a host but not what its hooks belong to, so its copies would use the inlays of the "
            "first device. Use one process per device: torchrun, or accelerate launch. The Trainer takes "
            "nn.DataParallel where one process sees several GPUs; CUDA_VISIBLE_DEVICES=0 leaves it one."
        )


def _goes_on(past: Any, like: Tensor) -> bool:
    """Whether a text is gone on with that has begun: the host has a cache, and something is in it."""
    if past is None or torch.is_grad_enabled():
        return False
    length: int | Tensor = past.get_seq_length()
    if isinstance(length, Tensor) and torch.compiler.is_compiling():  # a static cache's, which no graph can ask for
        return like.shape[1] == 1
    return bool(length > 0)


def _refuse_cache(past: Any) -> None:
    """Refuse to go on from a cache: it has the host's keys and values, not those of an inlay's own attention."""
    if past is not None and past.get_seq_length() > 0:
        raise SetupError(
            "the active setup attends to all tokens of a text, but the host goes on from a cache and has only the new "
            "ones. Generate with use_cache=False."
        )


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
