"""Check what `inlay.export` wrote, with the library it was written for. Runs in that library's own environment.

    python tools/check_export.py <folder>

Every folder below with a `case.json` is one case; tests/checkpoints/foreign/exports.py writes them. The library has
to load the checkpoint with no key missing and none left over, hold the very tensors of the file, and give our logits:

    <case>/case.json               library, host, host class, the checkpoints in order, the names to activate or fuse
           inputs.safetensors      what the host is given
           expected.safetensors    bare: the logits of the bare host; logits: with the checkpoint
           <checkpoint>/ …         as exported

Prints one line for each case. The exit code is 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

CLOSE = 1e-5
FILES = {
    "adapter.safetensors",
    "model_adapter_fusion.safetensors",
    "model_head.safetensors",
    "adapter_model.safetensors",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cases = sorted(file.parent for file in parser.parse_args().folder.rglob("case.json"))
    failed = [case for case in cases if not passes(case)]
    print(f"{len(cases) - len(failed)} of {len(cases)} exports load completely and give the same logits")
    sys.exit(bool(failed) or not cases)


def passes(folder: Path) -> bool:
    case = json.loads((folder / "case.json").read_text())
    label = f"{case['library']:9} {folder.name:38}"
    try:
        tensors, distance = check(folder, case)
    except Exception as error:
        print(f"{label} FAILED {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
        return False
    print(f"{label} {tensors:4} tensors, none missing    max |theirs - ours| = {distance:.1e}")
    return distance <= CLOSE


def check(folder: Path, case: dict[str, Any]) -> tuple[int, float]:
    """How many tensors were checked, and how far the logits are apart."""
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    host_class = getattr(transformers, case["host_class"])
    bare = logits_of(host_of(case, host_class), inputs)
    assert (bare - expected["bare"]).abs().max() <= CLOSE, "the bare host differs already"
    load = {"adapters": load_adapters, "peft": load_peft}[case["library"]]
    model = load(folder, case, host_class)
    tensors = sum(same_tensors(model, folder / checkpoint, case["library"]) for checkpoint in case["checkpoints"])
    found, wanted = logits_of(model, inputs), expected["logits"]
    if found.dim() == 2:
        found = found.reshape(wanted.shape)  # choices: theirs side by side, ours below
    if found.dim() == 3:  # without those of a prompt's tokens, and of padding, which may see another prompt
        found = found[:, -wanted.shape[1] :]
        if "decoder_input_ids" not in inputs:
            real = inputs["attention_mask"].bool()
            found, wanted = found[real], wanted[real]
    if case["whole_rows"]:
        whole = inputs["attention_mask"].bool().all(1)
        found, wanted = found[whole], wanted[whole]
    return tensors, (found - wanted).abs().max().item()


def has_prefix(folder: Path, case: dict[str, Any]) -> bool:
    files = [folder / name / "adapter_config.json" for name in case["checkpoints"]]
    return any("prefix_tuning" in file.read_text() for file in files if file.exists())


def host_of(case: dict[str, Any], host_class: Any, eager: bool = False) -> Any:
    """The bare host. transformers 4 divides the logits of an mT5 with tied embeddings by √D, and 5 does not.

    eager: with sdpa `adapters` masks a prefix away where the mask is boolean (GPT-2), and adds 1 to its scores in
    DistilBERT.
    """
    model = host_class.from_pretrained(case["host"], **({"attn_implementation": "eager"} if eager else {}))
    if model.config.model_type == "mt5":
        model.config.tie_word_embeddings = False
    return model


def load_adapters(folder: Path, case: dict[str, Any], host_class: Any) -> nn.Module:
    import adapters
    from adapters.composition import Fuse, Stack

    if case["flexible"]:
        model: Any = adapters.AutoAdapterModel.from_pretrained(case["host"])
    else:
        model = host_of(case, host_class, eager=has_prefix(folder, case))
        adapters.init(model)
    for checkpoint in case["checkpoints"]:
        info: dict[str, list[str]] = {}
        path = str(folder / checkpoint)
        load = (
            model.load_adapter_fusion
            if (folder / checkpoint / "adapter_fusion_config.json").exists()
            else model.load_adapter
        )
        load(
            path, loading_info=info, with_head=(folder / checkpoint / "head_config.json").exists(), use_safetensors=True
        )
        assert not any(info.values()), f"{checkpoint}: {info}"
    model.set_active_adapters((Fuse if case["fuse"] else Stack)(*case["activate"]))
    return model.eval()


def load_peft(folder: Path, case: dict[str, Any], host_class: Any) -> nn.Module:
    from peft import PeftModel, get_peft_model_state_dict

    (checkpoint,) = case["checkpoints"]
    model = PeftModel.from_pretrained(host_of(case, host_class), str(folder / checkpoint))
    theirs, ours = get_peft_model_state_dict(model), load_file(folder / checkpoint / "adapter_model.safetensors")
    own = {key for key in theirs if "lora_" in key or "ia3_" in key}
    assert own == {key for key in ours if "lora_" in key or "ia3_" in key}, "the changed layers are not the same"
    return model.eval()


def same_tensors(model: nn.Module, checkpoint: Path, library: str) -> int:
    """Every tensor of the file is in the model, bit for bit."""
    if library == "peft":
        state = {
            key.replace(".default.", ".").replace(".modules_to_save.", ".").removesuffix(".default"): t
            for key, t in model.state_dict().items()
        }
        if "prompt_encoder.embedding.weight" in state:
            state["prompt_embeddings"] = state["prompt_encoder.embedding.weight"]
    else:
        state = dict(model.state_dict())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    count = 0
    for file in (checkpoint / name for name in FILES if (checkpoint / name).exists()):
        for key, tensor in load_file(file).items():
            there = state.get(key, state.get(key.removeprefix(prefix)))
            assert there is not None, f"{key} did not arrive"
            assert torch.equal(there, tensor), f"{key} arrived changed"
            count += 1
    return count


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        said = model.eval()(**inputs)
    return said.logits if "logits" in said else torch.stack([said.start_logits, said.end_logits], -1)  # questions


if __name__ == "__main__":
    main()
