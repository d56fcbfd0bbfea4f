"""Prompts, prefixes and IA3 of peft: its golden files, and both ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers as hf

import inlay
from tests.hosts import classifier, shake
from tests.methods.ways import writer

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = [
    "bert/peft_ia3",
    "bert/peft_prefix",
    "gpt2/peft_ia3",
    "gpt2/peft_prefix",
    "t5/peft_ia3",
    "t5/peft_prompt",
    "phi/peft_prompt",
]
CLASSES = {"t5": hf.T5ForConditionalGeneration, "phi": hf.PhiForCausalLM}


def opened(case: str) -> tuple[hf.PreTrainedModel, dict, torch.Tensor]:
    host = case.partition("/")[0]
    model = CLASSES.get(host, hf.AutoModelForSequenceClassification).from_pretrained(GOLDEN / host / "host").eval()
    inputs = safetensors.torch.load_file(GOLDEN / host / "inputs.safetensors")
    inputs.pop("bare")
    return model, inputs, safetensors.torch.load_file(GOLDEN / case / "expected.safetensors")["logits"]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str) -> None:
    host, inputs, expected = opened(case)
    name = inlay.load(host, GOLDEN / case, name="theirs")
    inlay.activate(host, name)
    with torch.no_grad():
        found = host(**inputs).logits
    if expected.dim() == 3 and "decoder_input_ids" not in inputs:
        real = inputs["attention_mask"].bool()
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(("bert", "gpt2"))])
def test_what_is_written_is_what_was_read(case: str, tmp_path: Path) -> None:
    host, _, _ = opened(case)
    inlay.load(host, GOLDEN / case, name="theirs")
    inlay.export(host, "theirs", tmp_path / "again", format="peft")
    old = safetensors.torch.load_file(GOLDEN / case / "adapter_model.safetensors")
    new = safetensors.torch.load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert old.keys() == new.keys()
    for key, tensor in new.items():
        half = tensor.shape[0] // 2 if case == "t5/peft_prompt" else tensor.shape[0]  # the decoder's half is not used
        assert torch.equal(tensor[:half], old[key][:half])
    was = json.loads((GOLDEN / case / "adapter_config.json").read_text())
    now = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    for field in (
        "peft_type",
        "task_type",
        "num_virtual_tokens",
        "token_dim",
        "num_layers",
        "num_transformer_submodules",
    ):
        assert now.get(field) == was.get(field)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gpt2", inlay.Prompt(length=3)),
        ("llama", inlay.Prefix(length=3, shift=True)),
        ("mistral", inlay.Prefix(length=3, shift=True)),
        ("gpt2", inlay.IA3(outputs=("qkv",))),
        ("llama", inlay.IA3()),
        ("t5", inlay.Prompt(length=3)),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_there_and_back(family: str, method: inlay.Method, tmp_path: Path) -> None:
    host = writer(family)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.export(host, "a", tmp_path / "a", format="peft")
    inlay.load(host, tmp_path / "a", name="again")
    mine, theirs = host.inlays["a"].tensors(), host.inlays["again"].tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_what_peft_cannot_say(tmp_path: Path) -> None:
    host = classifier("bert")
    for name, method in (
        ("prompt", inlay.Prompt(length=2)),
        ("still", inlay.Prefix(length=2)),
        ("made", inlay.Prefix(length=2, shift=True, reparametrised=True)),
    ):
        inlay.add(host, name, method)
        with pytest.raises(inlay.ConfigError, match="cannot be written as peft"):
            inlay.export(host, name, tmp_path / name, format="peft")
    decoder = classifier("gpt2")
    inlay.add(decoder, "a", inlay.IA3())
    with pytest.raises(inlay.ConfigError, match="qkv"):
        inlay.export(decoder, "a", tmp_path / "a", format="peft")


@pytest.mark.parametrize("wrong", ["missing", "more", "shape", "length", "numbers", "option"])
def test_folders_that_do_not_fit(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(GOLDEN / "t5/peft_prompt", folder)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, told = safetensors.torch.load_file(file), json.loads(config.read_text())
    if wrong == "missing":
        tensors["else"] = tensors.pop("prompt_embeddings")
    elif wrong == "more":
        tensors["else"] = torch.zeros(2)
    elif wrong == "shape":
        tensors["prompt_embeddings"] = torch.zeros(4, 7)
    elif wrong == "length":
        told["num_virtual_tokens"] -= 1
    elif wrong == "numbers":
        tensors["prompt_embeddings"][1, 2] = torch.nan
    else:
        told["clever"] = True
    safetensors.torch.save_file(tensors, file)
    config.write_text(json.dumps(told))
    host, _, _ = opened("t5/peft_prompt")
    with pytest.raises(inlay.CheckpointError):
        inlay.load(host, folder)
    assert not hasattr(host, "inlays")
    host, _, _ = opened("bert/peft_ia3")
    with pytest.raises(inlay.CheckpointError):
        inlay.load(host, GOLDEN / "t5/peft_prompt")


def test_an_ia3_without_the_scales_of_a_layer_is_not_one_that_leaves_it_out(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(GOLDEN / "bert/peft_ia3", folder)
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({key: tensor for key, tensor in tensors.items() if ".layer.1." not in key}, file)
    host, _, _ = opened("bert/peft_ia3")
    with pytest.raises(inlay.CheckpointError, match=r"layer\.1.*is among the target_modules, but its tensors are mis"):
        inlay.load(host, folder)
