from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inlay
from inlay.checkpoints import ours
from inlay.storage import folders
from tests.checkpoints.rewriting import rewrite
from tests.hosts import CONFIGS, FAMILIES, classifier, logits, shake, shaken, untouched


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    host = classifier()
    inlay.add(host, "rte", inlay.Houlsby(size=4), head=inlay.Head(labels=["yes", "no", "unclear"]), norms=True)
    shake(host, "rte")
    return inlay.save(host, "rte", tmp_path / "rte", task="rte", metrics={"accuracy": 0.71})


def test_metrics_may_be_single_numbers_of_torch_and_numpy(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    half = {"torch": torch.tensor(0.5), "numpy": np.float32(0.5), "python": 0.5, "none": torch.tensor(math.nan)}
    inlay.save(host, "a", tmp_path / "a", metrics=half)
    manifest = json.loads((tmp_path / "a" / "inlay.json").read_text())
    assert manifest["metrics"] == {"torch": 0.5, "numpy": 0.5, "python": 0.5, "none": None}
    for noted in ({"metrics": {"each": torch.ones(2)}}, {"task": tmp_path}):
        with pytest.raises(inlay.CheckpointError, match="are noted as JSON"):
            inlay.save(host, "a", tmp_path / "b", **noted)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [inlay.Head(labels=3), inlay.Head(labels=2, pooling="mean", layers=2), None])
def test_save_and_load_are_bit_equal(family: str, head, tmp_path: Path) -> None:
    host = classifier(family)
    inlay.add(host, "a.b", inlay.Houlsby(size=4, leave_out=(0,)), head=head, norms=True)
    shake(host, "a.b")
    inlay.activate(host, "a.b")
    inlay.save(host, "a.b", tmp_path / "x")
    other = classifier(family)
    assert inlay.load(other, tmp_path / "x") == "a.b"
    inlay.activate(other, "a.b")
    assert torch.equal(logits(other), logits(host))
    assert inlay.load(other, tmp_path / "x", name="again") == "again"


@pytest.mark.parametrize(
    ("kind", "head"),
    [(hf.BertForMaskedLM, inlay.Head()), (hf.RobertaForMaskedLM, inlay.Head()), (hf.BartForCausalLM, None)],
)
def test_hosts_that_write_words(kind: type, head: inlay.Head | None, tmp_path: Path) -> None:
    """The bias of a head for words has two names; what BartForCausalLM has below its head cannot name its embeddings."""
    host, other = (shaken(kind(CONFIGS[kind.config_class.model_type]())) for _ in range(2))
    inlay.add(host, "a", inlay.Houlsby(size=4), head=head)
    shake(host, "a")
    inlay.save(host, "a", tmp_path / "x")
    inlay.load(other, tmp_path / "x")
    for each in (host, other):
        inlay.activate(each, "a")
    assert torch.equal(logits(other), logits(host))


@pytest.mark.parametrize("sizes", [{"size": {0: 2, "default": 4}}, {"reduction": {0: 2, "encoder.1": 4, "default": 8}}])
def test_sizes_by_layer_are_the_same_settings_again(sizes: dict, tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Houlsby(**sizes))
    inlay.save(host, "a", tmp_path / "x")
    inlay.load(host, tmp_path / "x", name="b")
    assert host.inlays["a"].method == host.inlays["b"].method
    inlay.average(host, ["a", "b"], name="c")


def test_in_a_fresh_process(saved: Path) -> None:
    script = (
        "import sys, torch, inlay; from tests.hosts import classifier, logits; torch.set_num_threads(1)\n"
        f"host = classifier(); inlay.load(host, {str(saved)!r}); inlay.activate(host, 'rte'); print(logits(host).tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    host = classifier()
    inlay.load(host, saved)
    inlay.activate(host, "rte")
    assert json.loads(run.stdout) == logits(host).tolist()


def test_the_folder_describes_itself(saved: Path) -> None:
    assert sorted(file.name for file in saved.iterdir()) == ["README.md", "inlay.json", "weights.safetensors"]
    manifest = json.loads((saved / "inlay.json").read_text())
    assert manifest["method"]["kind"] == "houlsby"
    assert manifest["method"]["activation"] == "silu"
    assert manifest["host"]["family"] == "bert"
    assert manifest["head"]["labels"] == ["yes", "no", "unclear"]
    assert manifest["metrics"] == {"accuracy": 0.71}
    assert set(manifest["versions"]) == {"inlay", "torch", "transformers"}
    card = (saved / "README.md").read_text()
    assert "houlsby" in card
    assert "0.71" in card


def test_bfloat16_is_kept(tmp_path: Path) -> None:
    host = classifier().to(torch.bfloat16)
    inlay.add(host, "a", inlay.Pfeiffer(size=2))
    inlay.save(host, "a", tmp_path / "a")
    _, tensors = ours.read(tmp_path / "a")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    full = classifier()
    inlay.load(full, tmp_path / "a")
    assert {p.dtype for p in full.inlays.parameters()} == {torch.float32}


def test_every_flipped_byte_is_refused(saved: Path) -> None:
    for file in ("weights.safetensors", "inlay.json"):
        content = bytearray((saved / file).read_bytes())
        for at in random.Random(0).sample(range(len(content)), 25):
            altered = bytearray(content)
            altered[at] ^= 1
            (saved / file).write_bytes(altered)
            host = classifier()
            if file == "inlay.json" and chr(content[at]).isspace() and chr(altered[at]).isspace():
                continue  # white space between JSON's words says nothing
            with pytest.raises(inlay.InlayError, match=file):
                inlay.load(host, saved)
            assert untouched(host)
        (saved / file).write_bytes(content)
    inlay.load(classifier(), saved)


def test_missing_cut_and_pickled_files(saved: Path, tmp_path: Path) -> None:
    content = (saved / "weights.safetensors").read_bytes()
    (saved / "weights.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(inlay.CheckpointError, match=r"weights\.safetensors is cut or altered"):
        inlay.load(classifier(), saved)
    (saved / "weights.safetensors").unlink()
    with pytest.raises(inlay.CheckpointError, match=r"weights\.safetensors is missing"):
        inlay.load(classifier(), saved)

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    (saved / "weights.safetensors").write_bytes(pickle.dumps(Bomb()))
    rewrite(saved, files={"weights.safetensors": ours._digest(saved / "weights.safetensors")})
    with pytest.raises(inlay.CheckpointError, match="not a safetensors file"):
        inlay.load(classifier(), saved)
    (saved / "inlay.json").unlink()
    with pytest.raises(inlay.CheckpointError, match=r"no inlay\.json; it holds README\.md"):
        inlay.load(classifier(), saved)
    (saved / "pytorch_adapter.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(inlay.CheckpointError, match="looks like a pickle"):
        inlay.load(classifier(), saved)
    with pytest.raises(inlay.CheckpointError, match="is not a folder"):
        inlay.load(classifier(), tmp_path / "nowhere")
    assert not (tmp_path / "exploded").exists()


def test_all_mismatches_at_once(saved: Path) -> None:
    other = classifier("roberta", hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    with pytest.raises(inlay.CheckpointError) as caught:
        inlay.load(other, saved)
    message = str(caught.value)
    for part in (
        "family 'bert'",
        "hidden_size 16",
        "{'encoder': 2}",
        "heads 2",
        "nothing was changed",
        "(4, 16), expected (4, 32)",
        "encoder.2",
    ):
        assert part in message
    assert untouched(other)


@pytest.mark.parametrize(("changes", "message"), [
    ({"format": 99}, "reads up to 1. Upgrade"),
    ({"name": "../../etc"}, "cannot be a name"),
    ({"method": {"kind": "os.system"}}, "unknown method 'os.system'"),
    ({"method": {"kind": "houlsby", "size": 4, "evil": 1}}, "no setting 'evil'"),
    ({"method": {"kind": "houlsby", "size": 5}}, r"has shape \(4,\), expected \(5,\)"),
    ({"method": {"kind": "pfeiffer", "size": 4}}, "encoder.0.attention.down.bias is not expected"),
    ({"files": {"../weights.safetensors": "0"}}, "not a plain file name"),
    ({"files": {}}, "names no weights"),
    ({"extra": 1}, "unknown or wrong fields: extra"),
    ({"files": []}, "files: Input should be a valid dictionary"),
    ({"host": None}, "host: Input should be"),
    ({"method": "x"}, "method: Input should be"),
    ({"format": True}, "not a manifest"),
    ({"format": -3}, "greater than or equal to 1"),
    ({"members": {"other": "0"}}, "'other' is not on this host"),
    ({"method": {"kind": "mixture"}}, "two projections"),
    ({"method": {"kind": "wide", "size": 2_000_000_000}}, "expected"),
    ({"head": {"labels": 900_000, "pooling": "mean"}}, "expected"),
    ({"head": {"labels": 7}}, r"expected \(7,"),
])  # fmt: skip
def test_hostile_manifests(saved: Path, changes: dict, message: str) -> None:
    rewrite(saved, **changes)
    host = classifier()
    with pytest.raises(inlay.InlayError, match=message):
        inlay.load(host, saved)
    assert untouched(host)


def test_not_a_manifest(saved: Path) -> None:
    for text in ("", "[]", "{", '{"format": "x"}', "[" * 100_000):
        (saved / "inlay.json").write_text(text)
        with pytest.raises(inlay.CheckpointError, match=r"inlay\.json"):
            inlay.load(classifier(), saved)


def test_a_taken_name_and_a_foreign_folder(saved: Path, tmp_path: Path) -> None:
    host = classifier()
    inlay.load(host, saved)
    with pytest.raises(inlay.NamingError, match="taken"):
        inlay.load(host, saved)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(inlay.CheckpointError, match="not an inlay; it is left as it is"):
        inlay.save(host, "rte", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_other_files_and_links_are_left_alone(saved: Path, tmp_path: Path) -> None:
    host = classifier()
    inlay.load(host, saved)
    (tmp_path / "link").symlink_to(saved)
    inlay.save(host, "rte", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    inlay.load(classifier(), tmp_path / "link")
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(inlay.CheckpointError, match=r"also holds notes\.txt, which saving would delete"):
        inlay.save(host, "rte", saved)
    (saved / "notes.txt").unlink()
    inlay.save(host, "rte", saved / "nested")
    with pytest.raises(inlay.CheckpointError, match="also holds nested"):
        inlay.save(host, "rte", saved)
    inlay.load(classifier(), saved)


def test_readers_and_writers_at_once(saved: Path) -> None:
    def work(kind: str) -> None:
        host = classifier()
        inlay.load(host, saved)
        for turn in range(8):
            if kind == "write":
                inlay.save(host, "rte", saved)
            else:
                inlay.load(host, saved, name=f"copy{turn}")

    children = []
    for kind in ("write", "read", "write", "read"):
        child = os.fork()
        if child == 0:
            try:
                work(kind)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert [p.name for p in saved.parent.iterdir()] == ["rte"]


def test_a_fusion_from_a_float32_file_on_a_bfloat16_host(tmp_path: Path) -> None:
    host = classifier()
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.Pfeiffer(size=2))
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"])
    for name in "abf":
        inlay.save(host, name, tmp_path / name)
    low = classifier().to(torch.bfloat16)
    for name in "abf":
        inlay.load(low, tmp_path / name)
    inlay.save(low, "f", tmp_path / "again")
    other = classifier()
    for name in ("a", "b", "again"):
        inlay.load(other, tmp_path / name)


@pytest.mark.parametrize("step", ["save_file", "_flush", "rename"])
def test_a_failing_save_leaves_the_old_one(saved: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = classifier()
    inlay.load(host, saved)
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    shake(host, "rte", seed=9)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if step == "rename":
        real, calls = Path.rename, []
        monkeypatch.setattr(
            Path, "rename", lambda a, b: fail() if (calls.append(a) or ".new-" in a.name) else real(a, b)
        )
    else:
        monkeypatch.setattr(*((ours.safetensors.torch, step) if step == "save_file" else (folders, step)), fail)
    with pytest.raises(OSError, match="No space"):
        inlay.save(host, "rte", saved)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["rte"]


def test_killed_at_any_moment(saved: Path) -> None:
    """A process that saves without end is killed; what it leaves always loads, as the one or the other state."""
    host = classifier()
    inlay.load(host, saved)
    inlay.activate(host, "rte")
    states = []
    for seed in (1, 2):
        shake(host, "rte", seed)
        states.append(logits(host))
    moments = random.Random(0)
    for _ in range(25):
        child = os.fork()
        if child == 0:
            for seed in itertools.cycle((1, 2)):
                shake(host, "rte", seed)
                inlay.save(host, "rte", saved)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        other = classifier()
        inlay.load(other, saved)
        inlay.activate(other, "rte")
        assert any(torch.equal(logits(other), state) for state in states)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone: FSDP does then all that it does with several."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_pieces_of_an_inlay_are_gathered(process_group: None, tmp_path: Path) -> None:
    host = classifier()
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.Pfeiffer(size=4), head=inlay.Head(labels=3), norms=True)
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"], norms=True)
    inlay.activate(host, "f")
    wanted = logits(host)
    mesh = init_device_mesh("cpu", (1,))
    for part in (*host.bert.encoder.layer, host):
        fully_shard(part, mesh=mesh)
    again = classifier()
    for name in "abf":
        inlay.save(host, name, tmp_path / name)
        inlay.load(again, tmp_path / name)
    inlay.activate(again, "f")
    assert torch.equal(logits(again), wanted)
    assert torch.equal(logits(host), wanted)


def test_an_inlay_that_has_been_emptied_is_not_saved(process_group: None, tmp_path: Path) -> None:
    """As the FSDP of earlier torch leaves parameters, where other processes have them."""
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.save(host, "a", tmp_path / "a")
    for parameter in host.inlays["a"].parameters():
        parameter.data = parameter.data.new_empty(0)
    with pytest.raises(inlay.CheckpointError, match="only a piece"):
        inlay.save(host, "a", tmp_path / "a")
    inlay.load(classifier(), tmp_path / "a")
