"""Keys and values in front of a host's own, through transformers' attention interface.

    softmax(q [K_front; K]ᵀ) [V_front; V]

An attention function and its mask function are registered under names of ours, one for each way to attend that they
build on. While an inlay needs it, the host's config names ours; a hook hands the front over as a keyword, which the
attention module passes on. Nothing of it enters the cache, so generation with and without one agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inlay.anatomy.modules import forward_of, own_modules
from inlay.errors import SetupError

KEYWORD = "inlay_front"
OURS = {"sdpa": "inlay-sdpa", "eager": "inlay-eager"}
"""The ways to attend that take something in front, and what they are called while they do."""
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


@dataclass(frozen=True)
class Segment:
    """Keys and values of one piece in front."""

    keys: Tensor  # (1 or B, P, heads · size) or (1 or B, heads, P, size)
    values: Tensor
    visible: Tensor | None = None  # (B, P); None: all of it, to every row


@dataclass(frozen=True)
class Front:
    """What a hook hands to one attention."""

    segments: tuple[Segment, ...] = ()
    caught: list[tuple[Tensor, Tensor]] | None = None
    """If given: the attention puts its own keys and values here."""


def attend(
    original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    front: Front, kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The original attention with a front. q (B, H, T, size), k and v (B, H_kv, T_k, size)."""
    if front.caught is not None:
        front.caught.append((key, value))
    if not front.segments:
        return original(module, query, key, value, mask, **kwargs)
    bias = kwargs.get("position_bias")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    length = query.shape[2]
    if mask is None and causal and length > 1 and original is ALL_ATTENTION_FUNCTIONS["sdpa"]:
        key, value = key[:, :, :length], value[:, :, :length]  # longer only in an empty static cache
        bias = None if bias is None else bias[..., :length]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    for segment in reversed(front.segments):
        keys, values = _by_head(segment.keys, key), _by_head(segment.values, value)
        mask = _mask_in_front(mask, segment.visible, keys.shape[2], query, key)
        bias = None if bias is None else F.pad(bias, (keys.shape[2], 0))
        key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    if bias is not None:
        kwargs = kwargs | {"position_bias": bias}
    return original(module, query, key, value, mask, **(kwargs | {"is_causal": False}))


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    if x.dim() == 3:
        x = x.unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2)
    repeats = like.shape[0] // x.shape[0]  # one front for all rows, or for as many rows in succession
    x = x.to(like.device, like.dtype)
    if x.shape[0] == 1:
        return x.expand(like.shape[0], -1, -1, -1)
    return x if repeats == 1 else x.repeat_interleave(repeats, 0)


def _mask_in_front(
    mask: Tensor | None, visible: Tensor | None, length: int, query: Tensor, key: Tensor
) -> Tensor | None:  # fmt: skip
    """A mask with columns for the front: boolean, or what is added to the scores."""
    if mask is None and visible is None:
        return None
    if mask is None:
        mask = torch.zeros(1, 1, 1, key.shape[2], dtype=query.dtype, device=query.device)
    rows = mask.shape[2]
    if visible is None:
        return F.pad(mask, (length, 0), value=mask.dtype == torch.bool)
    columns = visible.to(mask.device)[:, None, None, :].expand(-1, 1, rows, -1)
    if mask.dtype != torch.bool:
        columns = torch.zeros_like(columns, dtype=mask.dtype).masked_fill(~columns, torch.finfo(mask.dtype).min)
    mask = mask.expand(columns.shape[0], *mask.shape[1:])
    if mask.shape[1] != 1:
        columns = columns.expand(-1, mask.shape[1], -1, -1)
    return torch.cat([columns, mask], -1)


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    inlay_front: Front | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    front = inlay_front or Front()
    return attend(ALL_ATTENTION_FUNCTIONS["sdpa"], module, query, key, value, attention_mask, front, kwargs)


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    inlay_front: Front | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    front = inlay_front or Front()
    return attend(eager_of(type(module)), module, query, key, value, attention_mask, front, kwargs)


EAGER: dict[type[nn.Module], Callable[..., Any]] = {}
"""Each attention class's own eager function."""


def eager_of(kind: type[nn.Module]) -> Callable[..., Any]:
    if kind not in EAGER:
        EAGER[kind] = forward_of(kind).__globals__["eager_attention_forward"]
    return EAGER[kind]


AttentionInterface.register(OURS["sdpa"], _sdpa)
AttentionInterface.register(OURS["eager"], _eager)
for _theirs, _ours in OURS.items():
    AttentionMaskInterface.register(_ours, ALL_MASK_ATTENTION_FUNCTIONS[_theirs])


def configs(host: nn.Module) -> Iterator[Any]:
    """Every config that an attention of the host reads: encoders and decoders have copies of their own."""
    found = {id(config): config for m in own_modules(host) if (config := vars(m).get("config")) is not None}
    return (config for config in found.values() if hasattr(config, "_attn_implementation_internal"))


def check_attention(host: PreTrainedModel) -> None:
    """Refuse a host whose way to attend takes nothing in front."""
    for config in configs(host):
        name = config._attn_implementation
        if name is not None and name not in OURS and name not in THEIRS:
            raise SetupError(
                f"this host attends with {name!r}, which takes no keys and values in front. "
                f"Use host.set_attn_implementation('sdpa'), or 'eager'."
            )
    if getattr(host.config, "reorder_and_upcast_attn", False):
        raise SetupError(
            "reorder_and_upcast_attn has an attention of its own, which takes no keys and values in front."
        )


def name_attention(host: nn.Module, ours: bool) -> None:
    """Let the host, or a layer of it, attend by our functions, or by its own again."""
    names = OURS if ours else THEIRS
    for config in configs(host):
        config._attn_implementation_internal = names.get(config._attn_implementation, config._attn_implementation)
