"""The other ways to adapt under torch.compile as users call it: with inductor, forward and backward."""

from __future__ import annotations

import shutil

import pytest
import torch

import inlay
from tests.hosts import batch, classifier, logits, shake

METHODS = {
    "prompt": inlay.Prompt(length=3),
    "prefix": inlay.Prefix(length=3),
    "ia3": inlay.IA3(),
    "unipelt": inlay.UniPELT(lora=inlay.LoRA(rank=2), prefix=inlay.Prefix(length=3), bottleneck=inlay.Pfeiffer(size=4)),
    "said": inlay.SAID(d=8),
    "learned routing": inlay.Mixture(inlay.Pfeiffer(size=4), modules=2, routing="learned"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("name", METHODS)
def test_compiled_it_gives_the_same(name: str) -> None:
    torch.compiler.reset()
    host = classifier("bert", num_hidden_layers=1)
    inlay.add(host, "a", METHODS[name])
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    trained = [p for p in host.inlays["a"].parameters() if p.requires_grad]
    inputs = batch()

    def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
        host.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in trained]

    wanted, wanted_gradients = logits(host), gradients(host)
    compiled = torch.compile(host)
    torch.testing.assert_close(logits(compiled), wanted, atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(gradients(compiled), wanted_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    torch.compiler.reset()
