"""Weights that are no numbers, hosts that are others, manifests that ask for the impossible: refused, and at once."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import inlay
from inlay.checkpoints import fitting, ours
from inlay.checkpoints.fitting import host_fingerprint
from inlay.host.registry import Inlay
from inlay.host.verbs import inlays_of
from tests.checkpoints.rewriting import rewrite
from tests.hosts import classifier, shake, untouched


@pytest.fixture
def saved(tmp_path):
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2))
    shake(host, "a")
    return inlay.save(host, "a", tmp_path / "a")


def with_weights(folder, change):
    file = folder / "weights.safetensors"
    save_file({key: change(tensor) for key, tensor in load_file(file).items()}, file)
    rewrite(folder, files={file.name: ours._digest(file)})


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_loaded_nor_saved(saved, tmp_path, number):
    with_weights(saved, lambda tensor: torch.full_like(tensor, number))
    host = classifier()
    with pytest.raises(inlay.CheckpointError, match="not finite"):
        inlay.load(host, saved)
    assert untouched(host)
    inlay.add(host, "b", inlay.Pfeiffer(size=4))
    next(host.inlays.parameters()).data.fill_(number)
    with pytest.raises(inlay.CheckpointError, match="not finite"):
        inlay.save(host, "b", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_weights_of_other_kinds_are_refused(saved, dtype):
    with_weights(saved, lambda tensor: tensor.to(dtype))
    with pytest.raises(inlay.CheckpointError, match="expected floating-point numbers"):
        inlay.load(classifier(), saved)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F32", [0, 1 << 62, 1 << 62], 0), ("F32", [1] * 100, 4), ("F8_E4M3", [1], 1)]
)
def test_tensors_that_torch_cannot_work_with_are_refused(saved, dtype, shape, size):
    """safetensors accepts them; torch stumbles over shapes that no tensor has, and over dtypes without arithmetic."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    file = saved / "weights.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    rewrite(saved, files={file.name: ours._digest(file)})
    host = classifier()
    with pytest.raises(inlay.CheckpointError, match=r"weights\.safetensors is not a safetensors file"):
        inlay.load(host, saved)
    assert untouched(host)


def test_a_host_of_the_same_form_and_other_weights(saved):
    torch.manual_seed(77)
    other = classifier()
    for name, parameter in other.named_parameters():
        if "layer.1." in name:
            parameter.data.normal_()
    with pytest.raises(inlay.CheckpointError, match="had other weights.*`any_host`"):
        inlay.load(other, saved)
    assert untouched(other)
    inlay.load(other, saved, any_host=True)


def test_the_fingerprint_is_the_hosts_own():
    host = classifier()
    before = host_fingerprint(host)
    assert before == host_fingerprint(classifier()) == host_fingerprint(classifier().to(torch.bfloat16))
    inlay.add(host, "a", inlay.LoRA(rank=2), head=inlay.Head(labels=5))
    shake(host, "a")
    assert host_fingerprint(host) == before
    inlay.fold(host, "a")
    assert host_fingerprint(host) is None, "its weights are not its own now"
    inlay.unfold(host)
    assert host_fingerprint(host) == before
    assert host_fingerprint(classifier().to(torch.float16)) is None, "rounded twice, it cannot be compared"


PFEIFFER = {"kind": "pfeiffer", "size": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"kind": "mixture", "method": PFEIFFER, "modules": 10**9}},
        {"head": {"labels": 2, "pooling": "mean", "layers": 10**9}},
        {"method": {"kind": "phm", "n": 10**9}},
        {"method": {"kind": "lora", "rank": 10**18}},
        {"method": PFEIFFER | {"size": 10**19}},
        {"method": {"kind": "prefix", "length": 10**12}},
        {"method": {"kind": "prompt", "length": 10**12}},
        {"method": {"kind": "said", "d": 10**12}},
        {"method": {}},
        {"method": {"kind": None}},
        {"method": PFEIFFER | {"scale": 1e999}},
        {"host": {}},
        {"host": {"family": "bert", "hidden_size": 16, "layers": {"encoder": 10**9}, "heads": 2, "name": ""}},
        {"host": {"family": ["bert"], "hidden_size": 16, "layers": {}, "heads": 2, "name": ""}},
        {"data": 3},
    ],
)
def test_manifests_that_ask_for_the_impossible(saved, changes):
    rewrite(saved, **json.loads(json.dumps(changes)))
    host, began = classifier(), time.process_time()
    with pytest.raises(inlay.InlayError):
        inlay.load(host, saved)
    assert untouched(host)
    assert time.process_time() - began < 60, "seconds of computing: nothing counts to what was asked for"


def test_what_no_memory_holds_is_refused_before_it_is_taken(saved, monkeypatch):
    """The weights' file before it is read; then the whole inlay, from a draft without memory, before it is built."""
    taken = []
    monkeypatch.setattr(ours.safetensors.torch, "load_file", lambda *a, **k: taken.append(a))
    monkeypatch.setattr(fitting, "physical_memory", lambda: 1_000)
    with pytest.raises(inlay.CheckpointError, match=r"weights.safetensors would take 0.0 GB of memory"):
        inlay.load(classifier(), saved)
    assert not taken
    monkeypatch.undo()
    size = (saved / "weights.safetensors").stat().st_size
    checked = []
    monkeypatch.setattr(fitting, "physical_memory", lambda: checked.append(1) or (size if len(checked) < 2 else 1_000))
    host, build = classifier(), Inlay.fill
    devices = []
    monkeypatch.setattr(Inlay, "fill", lambda self, *a, **k: devices.append(k.get("device")) or build(self, *a, **k))
    with pytest.raises(inlay.CheckpointError, match="it would take .* of memory; this machine has 0.0"):
        inlay.load(host, saved)
    assert devices == ["meta"]
    assert untouched(host)


def test_the_estimate_is_what_the_weights_take(saved):
    host = classifier()
    inlay.load(host, saved)
    wanted = sum(tensor.nbytes for tensor in load_file(saved / "weights.safetensors").values())
    assert fitting.bytes_of(inlays_of(host)["a"].parameters()) == wanted
    assert fitting.physical_memory() > 1 << 28
