"""A fusion in half precision is at least as close to the exact one as the paper's equations in the same dtype."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import inlay
from inlay.methods.acting import Seen
from inlay.methods.fusion import FusionLayer
from tests.hosts import classifier, fused_steps, logits, shake, spy_on
from tests.methods.slow import slow_fusion

WIDTH = 64


def wide(family: str, seed: int) -> nn.Module:
    """A host wide enough that rounding adds up."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4}
    if family == "t5":
        sizes = {"d_model": WIDTH, "d_ff": 96, "d_kv": 16, "num_heads": 4}
    host = classifier(family, seed, **sizes)
    for n in range(4):
        inlay.add(host, f"m{n}", inlay.Pfeiffer(size=16))
        shake(host, f"m{n}", seed + n, std=0.2)
    inlay.add_fusion(host, "f", [f"m{n}" for n in range(4)])
    shake(host, "f", seed, std=0.15)
    return host


def at_one_place(host: nn.Module, place: str) -> dict:
    inlay.activate(host, "f")
    caught = spy_on(host, place)
    logits(host)
    return caught


def naive(host: nn.Module, place, x: Tensor) -> Tensor:
    """Equation by equation in the dtype at hand, as published code computes it."""
    layer = host.inlays["f"].part(place)
    assert isinstance(layer, FusionLayer)
    zs = [host.inlays[f"m{n}"].part(place)(x) for n in range(4)]
    return slow_fusion(layer, x, zs)[0]


def asks(host: nn.Module, place, h: Tensor, seen: Seen) -> Tensor:
    """What the fusion and its members read there."""
    x = h + seen.residual
    return x if place.norm is None else host.get_submodule(place.norm).forward(x)


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
@pytest.mark.parametrize("how", ["bf16", "bf16 training", "autocast"])
def test_never_worse_than_the_naive_computation(family: str, how: str) -> None:
    """From the same x, in the root of the mean square over seeds, rows, tokens and channels."""
    ours = theirs = 0.0
    for seed in range(6):
        host = wide(family, 10 * seed)
        place = next(p for p in host.inlays.anatomy.of_kind("ffn") if p.layer == 1)
        caught = at_one_place(host, place.id)
        h, seen = torch.zeros_like(caught["h"]), Seen((), caught["h"] + caught["seen"].residual)
        if how == "autocast":
            step, low = fused_steps(_again(host))[place.id], torch.autocast("cpu", torch.bfloat16)
        else:
            host.bfloat16()
            inlay.activate(host, "f")
            host.inlays["f"].requires_grad_(how == "bf16 training")
            step, low = fused_steps(host)[place.id], nullcontext()
            h, seen = h.bfloat16(), Seen((), seen.residual.bfloat16())
        with torch.no_grad(), low:
            x = asks(host, place, h, seen)
            fast, slow = step(h, seen), naive(host, place, x)
        with torch.no_grad():
            exact = naive(host.double(), place, x.double())
        ours += float((fast.double() - exact).square().mean())
        theirs += float((slow.double() - exact).square().mean())
    assert ours <= theirs, f"{ours**0.5:.2e} against {theirs**0.5:.2e}"


def _again(host: nn.Module) -> nn.Module:
    inlay.activate(host, None)
    inlay.activate(host, "f")
    return host


def test_weights_sum_to_one_in_half_precision() -> None:
    host = wide("bert", 0).bfloat16()
    seen = inlay.fusion_activations(host, "f", [{"input_ids": torch.arange(12).view(2, 6) + 3}])
    for mean in seen.mean.values():
        assert float(mean.sum()) == pytest.approx(1, abs=1e-6)
