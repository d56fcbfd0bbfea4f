"""Files made to do harm, and files that came to harm: refused, with nothing executed and no host half loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import inlay
from inlay.host.registry import Inlay
from tests.checkpoints.foreign.golden import GOLDEN, copied, host_of, logits_of, refused
from tests.hosts import untouched

MUTANTS = 200
SMALL = [
    "bert/seq_bn", "bert/compacter", "bert/lora", "bert/seq_bn_head2", "bert/seq_bn_host_head", "bert/seq_bn_bin",
    "bert/seq_bn_factor_map", "bert/setup", "bert/peft_qv", "bert/peft_head", "bert/peft_patterns", "bert/peft_bias_all",
    "gpt2/lora", "gpt2/peft_qv", "t5/scaled_par_bn", "t5/compacter", "llama/peft_all_linear",
]  # fmt: skip


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.at}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_not_opened_unasked_and_never_executed(zipped: bool, tmp_path: Path) -> None:
    folder, proof = copied("bert/seq_bn_bin", tmp_path), tmp_path / "executed"
    weights = {"a": torch.zeros(2), "b": Bomb(proof)}
    if zipped:
        torch.save(weights, folder / "pytorch_adapter.bin")
    else:
        (folder / "pytorch_adapter.bin").write_bytes(pickle.dumps(weights))
    refused(folder, "is a pickle")
    refused(folder, "not a readable file of tensors", pickled=True)
    assert not proof.exists()


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn_bin", tmp_path)
    for content in ([1, 2], {"a": 1}, {1: torch.zeros(1)}, torch.zeros(3)):
        torch.save(content, folder / "pytorch_adapter.bin")
        refused(folder, "tensors by name", pickled=True)
    torch.save({"a": torch.zeros(2, 2).to_sparse()}, folder / "pytorch_adapter.bin")
    refused(folder, "not plain floating-point", pickled=True)


def test_a_pickle_that_grows_when_it_is_opened(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn_bin", tmp_path)
    file = folder / "pytorch_adapter.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content + bytes(100_000) if name.endswith("data/0") else content)
    refused(folder, "it is compressed", pickled=True)
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, file)
    refused(folder, "not plain floating-point", pickled=True)


@pytest.mark.parametrize("name", [None, "archive/data.pkl", "archive/DATA.PKL"])
def test_a_pickle_that_asks_for_memory_alone(name: str | None, tmp_path: Path) -> None:
    """`weights_only` makes a bytearray of any size, which is filled with zeros; this one has 256 MB."""
    folder = copied("bert/seq_bn_bin", tmp_path)
    file, content = folder / "pytorch_adapter.bin", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85R."
    if name is None:
        file.write_bytes(content)
    else:
        with zipfile.ZipFile(file) as archive:
            parts = {part: archive.read(part) for part in archive.namelist() if not part.endswith("data.pkl")}
        with zipfile.ZipFile(file, "w") as archive:
            for part, held in {**parts, name: content}.items():
                archive.writestr(part, held)
    refused(folder, "it holds a bytearray", pickled=True)


def test_a_config_gets_no_more_memory_than_its_file_has_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    change(folder / "adapter_config.json", "reduction_factor", 24 / 100_000)
    tensors = load_file(folder / "adapter.safetensors")
    save_file(tensors | {"much": torch.zeros(100_000)}, folder / "adapter.safetensors")
    devices = []
    fill = Inlay.fill
    monkeypatch.setattr(Inlay, "fill", lambda self, *args: devices.append(args[2]) or fill(self, *args))
    refused(folder, r"expected \(99999|expected \(100000")
    assert devices == ["meta"]


@pytest.mark.parametrize("size", [1 << 62, 200 << 20, 5])
def test_huge_and_lying_headers(size: int, tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    (folder / "adapter.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    refused(folder, "not a readable file of tensors")


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (folder / "adapter.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, "not a readable file of tensors")


def test_large_and_deep_json(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    refused(folder, "not readable JSON")
    (folder / "adapter_config.json").write_text(" " * (5 << 20))
    refused(folder, "not readable JSON")
    (folder / "adapter_config.json").write_text("[]")
    refused(folder, "should hold a JSON object")


def change(file: Path, option: str, value: Any) -> None:
    content = json.loads(file.read_text())
    content["config"][option] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("case", "option", "value", "match"), [
    ("bert/compacter", "phm_dim", 10**4000, "a number of 4001 digits"),
    ("bert/seq_bn", "reduction_factor", 5e-324, "greater than or equal to"),
    ("bert/seq_bn", "scaling", float("inf"), "scaling"),
    ("bert/seq_bn", "self", 1, "no setting 'self'"),
    ("bert/seq_bn", "\ud800", 1, "Unicode"),
])  # fmt: skip
def test_odd_options(case: str, option: str, value: Any, match: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    change(folder / "adapter_config.json", option, value)
    refused(folder, match)


def test_options_without_end(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    content = json.loads((folder / "adapter_config.json").read_text())
    content["config"] |= {f"option{i}": i for i in range(20_000)}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    refused(folder, "and 19,900 more")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "zeros", "nothing"])
def test_files_that_are_none(file: str, kind: str, tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    there = folder / file
    there.unlink()
    if kind == "pipe":
        os.mkfifo(there)
    elif kind == "folder":
        there.mkdir()
    elif kind != "nothing":
        there.symlink_to({"loop": there.name, "zeros": "/dev/zero"}[kind])
    refused(folder, "has no")


def test_what_a_terminal_would_follow_is_escaped(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    tensors = load_file(folder / "adapter.safetensors")
    save_file(tensors | {"\x1b[2J\u202e": torch.zeros(1)}, folder / "adapter.safetensors")
    refused(folder, r"tensor '\\x1b\[2J\\u202e' is not expected")


def test_deep_setups(tmp_path: Path) -> None:
    folder = copied("bert/setup", tmp_path)
    block: Any = {"type": "single", "children": ["first"]}
    for _ in range(40):
        block = {"type": "Stack", "children": [block]}
    (folder / "adapter_setup.json").write_text(json.dumps({"adapter_setup": block, "head_setup": None}))
    refused(folder, "not readable")
    block = {"type": "Stack", "children": [{"type": "single", "children": ["first"]}] * 1000}
    (folder / "adapter_setup.json").write_text(json.dumps({"adapter_setup": block, "head_setup": None}))
    refused(folder, "longer than a setup")


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", "a" * 100, "a b", "\x00"])
def test_tricks_in_names(name: str, tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"name": name}))
    refused(folder, "cannot be a name|whole Unicode without NUL")


def test_nothing_a_config_names_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text("raise SystemExit('imported')")
    folder = copied("bert/peft_qv", tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["auto_mapping"] = {"base_model_class": "Evil", "parent_library": "sabotage"}
    config["base_model_name_or_path"] = "/etc/passwd"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    host = host_of("bert")
    inlay.load(host, folder)  # what names the host's class is for people, and not followed
    config["corda_config"] = {"class": "sabotage.Evil"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    refused(folder, "corda_config")


def test_numbers_that_are_none(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    tensors = load_file(folder / "adapter.safetensors")
    first = sorted(tensors)[0]
    for odd, match in (
        (torch.full_like(tensors[first], float("nan")), f"{first} has numbers that are not finite"),
        (tensors[first].to(torch.int32), "not plain floating-point"),
        (tensors[first].to(torch.float8_e5m2), "not plain floating-point"),
    ):
        save_file(tensors | {first: odd}, folder / "adapter.safetensors")
        refused(folder, match)


def mutate(file: Path, chance: random.Random) -> None:
    """Flip, cut or repeat some bytes."""
    content = bytearray(file.read_bytes())
    kind = chance.choice(("flip", "flip", "header", "cut", "repeat"))
    if kind == "cut":
        del content[chance.randrange(len(content)) :]
    elif kind == "repeat":
        at = chance.randrange(len(content))
        content[at:at] = content[at : at + chance.randrange(1, 64)]
    else:  # most of a safetensors file is numbers; the header is what can be misread
        reach = min(len(content), 600) if kind == "header" else len(content)
        for _ in range(chance.randrange(1, 6)):
            content[chance.randrange(reach)] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("part", range(10))
def test_mutated_files(part: int, tmp_path: Path) -> None:
    chance = random.Random(part)
    hosts = {family: host_of(family) for family in ("bert", "gpt2", "t5", "llama")}
    before = {family: logits_of(host, family) for family, host in hosts.items()}
    loaded = 0
    for number in range(MUTANTS // 10):
        case = chance.choice(SMALL)
        family, folder = case.split("/")[0], Path(shutil.copytree(GOLDEN / case, tmp_path / str(number)))
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "expected.safetensors")
        mutate(chance.choice(files), chance)
        host = hosts[family]
        try:
            setup = inlay.load(host, folder, pickled=True)
        except inlay.InlayError:
            assert untouched(host), folder
            continue
        loaded += 1
        inlay.activate(host, setup)
        logits_of(host, family)
        inlay.strip(host)
        assert untouched(host)
    assert loaded < MUTANTS // 10
    assert all(torch.equal(logits_of(host, family), before[family]) for family, host in hosts.items())
