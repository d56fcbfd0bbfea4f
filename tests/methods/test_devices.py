"""Hosts spread over devices: what an inlay's modules share is on one of them, and each module fetches it.

There is one device here. Tensors without numbers (fake ones) know which they are said to be on, and refuse to mix.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import inlay
from inlay.host.front import Longer
from inlay.host.heads import PooledHead
from inlay.host.keys import Front, Segment, attend
from inlay.host.steps import PooledStandIn
from inlay.methods.acting import Seen
from inlay.methods.mixture import Gate, alternatives
from inlay.methods.said import Direction
from tests.hosts import batch, classifier, logits

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


# hosts that accelerate spreads over devices: what a pass leaves for later layers may have been made on another one


ELSEWHERE = "meta"


@pytest.mark.parametrize("device", [NEAR, ELSEWHERE])
def test_outputs_are_cut_back_where_they_are(device: str) -> None:
    longer = Longer(3, 5, torch.tensor([3, 1], device=NEAR))
    own = torch.empty(2, 5, 4, device=device)
    found = [longer.cut(torch.empty(2, 8, 4, device=device)), longer.join(torch.empty(2, 3, 4, device=device), own)]
    found += [longer.mask(mask, own) for mask in (None, torch.ones(2, 5, dtype=torch.long, device=device))]
    assert [str(each.device) for each in found] == [device] * 4


@pytest.mark.parametrize("mask", ["bool", "float", None])
def test_keys_in_front_are_seen_on_another_device(mask: str | None) -> None:
    x = torch.empty(2, 2, 5, 4, device=ELSEWHERE)
    given = None if mask is None else torch.empty(2, 1, 5, 5, device=ELSEWHERE, dtype=getattr(torch, mask))
    keys, visible = torch.empty(2, 2, 3, 4, device=NEAR), torch.ones(2, 3, dtype=torch.bool, device=NEAR)
    seen: list[Tensor] = []

    def original(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **more: object) -> None:
        seen.extend((key, value, mask))

    attend(original, nn.Module(), x, x, x, given, Front((Segment(keys, keys, visible),)), {"is_causal": False})
    assert [str(each.device) for each in seen] == [ELSEWHERE] * 3


def test_a_head_on_another_device_pools_there() -> None:
    head = PooledHead(4, 2, inlay.Head(labels=2, pooling="mean")).to(ELSEWHERE)
    seen = Seen((), hidden=torch.empty(2, 5, 4, device=NEAR), mask=torch.ones(2, 5, dtype=torch.long, device=NEAR))
    assert str(PooledStandIn(head)(torch.empty(2, 3, device=ELSEWHERE), seen).device) == ELSEWHERE


@pytest.mark.parametrize("kind", ["fusion", "mixture"])
def test_a_penalty_is_one_number_though_layers_are_on_several_devices(kind: str) -> None:
    host = classifier()
    host.bert.embeddings.to(ELSEWHERE)
    host.bert.encoder.layer[0].to(ELSEWHERE)
    gated = inlay.Mixture(inlay.Pfeiffer(size=4), routing="learned")
    for name, method in {"a": inlay.Pfeiffer(size=4), "b": inlay.Pfeiffer(size=4), "mixture": gated}.items():
        inlay.add(host, name, method)
    inlay.add_fusion(host, "fusion", ["a", "b"])
    inlay.activate(host, kind)
    for module in host.inlays["mixture"].modules():
        if isinstance(module, Gate):
            module.balance.put(module.linear.weight.sum())  # as a pass leaves it
    assert str(inlay.penalty(host).device) == ELSEWHERE


def test_a_penalty_is_here_though_the_host_is_elsewhere() -> None:
    host = classifier()
    cpu_offload(host, execution_device=torch.device("cpu"))
    for name in "ab":
        inlay.add(host, name, inlay.Pfeiffer(size=4))
    inlay.add_fusion(host, "f", ["a", "b"])
    for setup in ("a", "f"):
        inlay.train(host, setup)
        (host(**batch()).logits.sum() + inlay.penalty(host)).backward()


# devices without autocast


@pytest.mark.parametrize("setup", ["a", "f"])
def test_a_half_precision_host_without_numbers_runs(setup: str) -> None:
    """On the meta device, as counters of operations and of memory run it."""
    host = classifier().bfloat16()
    for name in "ab":
        inlay.add(host, name, inlay.Pfeiffer(size=4))
    inlay.add_fusion(host, "f", ["a", "b"])
    host.to("meta")
    ids = {"input_ids": torch.ones(2, 5, dtype=torch.long, device="meta")}
    inlay.train(host, setup)
    made = host(**ids).logits
    assert (made.shape, made.dtype, made.device.type) == ((2, 2), torch.bfloat16, "meta")
    inlay.freeze(host)
    with torch.no_grad():
        assert host.eval()(**ids).logits.shape == (2, 2)


# a GPU waits for every list that is sent to it, and for every answer that is asked of it


class Waits(TorchFunctionMode):
    """Counts what a GPU would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.tensor, torch.equal, Tensor.item, Tensor.tolist, Tensor.__bool__)
        return function(*args, **(kwargs or {}))


def waits(host: nn.Module, setup: inlay.Setup) -> int:
    inlay.activate(host, setup)
    logits(host)
    with Waits() as seen:
        logits(host)
    return seen.count


def test_pinned_members_and_fronts_are_sent_once() -> None:
    host = classifier()
    for name, method in {"a": inlay.Houlsby(size=4), "b": inlay.Houlsby(size=4), "p": inlay.Prefix(length=2),
                         "q": inlay.Prefix(length=3)}.items():  # fmt: skip
        inlay.add(host, name, method)
    inlay.add_fusion(host, "f", ["a", "b"])
    bare = waits(host, None)
    for setup in (inlay.Fuse("f", pin={"a": 0.3}), inlay.Fuse("f", off=["b"]), inlay.Rows("p", "q", None)):
        assert waits(host, setup) == bare


def test_changed_weights_are_compared_once_in_a_pass() -> None:
    counts = set()
    for layers in (1, 4):
        host = classifier(num_hidden_layers=layers)
        inlay.add(host, "s", inlay.SAID(d=10))
        counts.add(waits(host, "s") - waits(host, None))
    assert len(counts) == 1


# the defaults that a script sets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_directions_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    usual = Direction("w", 30, 10, 0, torch.device("cpu"))
    torch.set_default_dtype(dtype)
    try:
        other = Direction("w", 30, 10, 0, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other.gauss, usual.gauss)
    assert other.gauss.dtype == torch.float32


def test_what_is_drawn_does_not_depend_on_the_default_device() -> None:
    found = []
    for device in ("cpu", "meta"):
        host = classifier()
        for name in "abc":
            inlay.add(host, name, inlay.Pfeiffer(size=4, drop_first=2))
        inlay.add_fusion(host, "f", list("abc"), subset=2)
        inlay.add(host, "s", inlay.SAID(d=10))
        torch.manual_seed(0)
        with torch.device(device):
            for name in "af":
                host.inlays[name].draw.draw()
            changes = host.inlays["s"].part(host.inlays.anatomy.places["weights"])()
        draws = host.inlays["a"].draw.drawn(), host.inlays["f"].draw.drawn()
        found.append((draws, {str(change.device) for change in changes.values()}))
    assert found[0] == found[1]
