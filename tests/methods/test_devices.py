"""Hosts spread over devices: what an inlay's modules share is on one of them, and each module fetches it.

There is one device here. Tensors without numbers (fake ones) know which they are said to be on, and refuse to mix.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import inlay
from inlay.methods.mixture import alternatives
from tests.hosts import classifier

SHARING = [
    inlay.Compacter(size=4), inlay.PHM(size=4, share_rule=True, learn_rule=False), inlay.PAL(size=4, heads=2, bias=True),
    inlay.Prefix(length=2, reparametrised=True, hidden=8),
    inlay.UniPELT(variant="paper", bottleneck=None, prefix=None),
    inlay.UniPELT(lora=None, bottleneck=inlay.Compacter(size=4), prefix=inlay.Prefix(reparametrised=True, hidden=8)),
]  # fmt: skip
each_method = pytest.mark.parametrize("method", SHARING, ids=lambda m: m.kind)
NEAR, FAR = "cpu", "cuda:0"


def put(module: nn.Module, device: str) -> None:
    """Say that a module is on a device; its numbers are gone."""
    for m in module.modules():
        for table in (m._parameters, m._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    table[name] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


@each_method
def test_modules_fetch_what_they_share(method: inlay.Method) -> None:
    host = classifier()
    inlay.add(host, "a", method, norms=False)
    anatomy, own = host.inlays.anatomy, host.inlays["a"]
    assert list(own.shared.parameters()) or list(own.shared.buffers())
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        put(own.shared, NEAR)
        for place in map(anatomy.places.__getitem__, own.place_ids()):
            part = own.part(place)
            put(part, FAR)
            x = torch.empty(2, 5, place.d_in, device=FAR)
            mask = (torch.empty(2, 5, device=NEAR),) if method.reads_texts else ()
            assert str(part(x, *mask).device) == FAR


@each_method
def test_what_is_shared_stays_where_the_first_needs_it(method: inlay.Method) -> None:
    host = classifier()
    host.bert.encoder.layer[1].to("meta")
    inlay.add(host, "a", method, norms=False)
    own = host.inlays["a"]
    gates = [m for name, m in own.shared.named_children() if name == "encoder_1"]  # of the second layer alone
    theirs = {id(p) for gate in gates for p in gate.parameters()}
    shared = [*own.shared.parameters(), *own.shared.buffers()]
    assert {str(p.device) for p in shared if id(p) not in theirs} == {"cpu"}
    assert {str(p.device) for p in own.parts.parameters()} == {"cpu", "meta"}


def test_shared_tensors_have_the_dtype_of_the_first_place_too() -> None:
    host = classifier("t5")
    host.transformer.decoder.bfloat16()
    inlay.add(host, "a", inlay.Compacter(size=4), norms=False)
    assert host.inlays["a"].shared.rule.dtype == torch.float32


def test_penalties_of_layers_on_several_devices_have_a_sum() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.add(host, "b", inlay.Mixture(inlay.Pfeiffer(size=4), routing="learned"))
    inlay.add_fusion(host, "f", members=["a"])
    gates = [choice.gate for choice in alternatives(host.inlays["b"])]
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        for number, part in enumerate(host.inlays["f"].parts.values()):
            put(part, f"cuda:{number}")
        for number, gate in enumerate(gates):
            gate.balance.put(torch.empty((), device=f"cuda:{number}"))
        for name in ("f", "b"):
            inlay.activate(host, name)
            assert inlay.penalty(host).dim() == 0
        put(host.bert.embeddings, "cuda:2")
        assert str(inlay.penalty(host).device) == "cuda:2", "where the host begins"
