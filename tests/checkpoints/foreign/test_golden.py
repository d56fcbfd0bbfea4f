"""Every checkpoint that the peer libraries wrote is read by `inlay.load` and gives their logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import inlay
from inlay.checkpoints.foreign import files
from inlay.checkpoints.foreign.adapterhub.layout import LAYOUTS
from inlay.storage.plain_json import read_json
from tests.checkpoints.foreign.golden import GOLDEN, cases, expected, host_of, logits_of, named, refused, untouched
from tests.hosts import fused_steps, shake

REFUSED = {
    "bert/mam": "union of several methods.*Stack",
    "gpt2/unipelt": "gates act in a decoder too",
    "t5/prefix_flat": "move the keys' relative positions",
}
"""What means something in `adapters` that Inlay does not follow."""
SINGLE = [
    case for case in cases(without=("fusion", "stack", "setup")) if f"{case.parent.name}/{case.name}" not in REFUSED
]  # fmt: skip


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", SINGLE, ids=named)
def test_one_adapter(case: Path) -> None:
    host = host_of(case.parent.name)
    bare = logits_of(host, case.parent.name)
    name = inlay.load(host, case, pickled=(case / "pytorch_adapter.bin").exists())
    assert torch.equal(logits_of(host, case.parent.name), bare), "loading activates nothing"
    inlay.activate(host, name)
    wanted = expected(case)["logits"]
    close(logits_of(host, case.parent.name).reshape(wanted.shape), wanted)  # choices: theirs side by side, ours below
    inlay.strip(host)
    assert torch.equal(logits_of(host, case.parent.name), bare)


HEADS = ("seq_bn_head2", "seq_bn_tagging", "seq_bn_host_head", "peft_head", "peft_prefix")


@pytest.mark.parametrize("kind", [hf.BertForSequenceClassification, hf.BertForMaskedLM])
@pytest.mark.parametrize("case", HEADS)
def test_without_its_head_any_task_fits(case: str, kind: type) -> None:
    host, whole = kind(hf.BertConfig.from_pretrained(GOLDEN / "bert" / "host")), host_of("bert")
    inlay.load(host, GOLDEN / "bert" / case, name="a", head=False)
    inlay.load(whole, GOLDEN / "bert" / case, name="a")
    mine, theirs = host.inlays["a"].tensors(), whole.inlays["a"].tensors()
    assert host.inlays["a"].head is None
    assert mine.keys() == {key for key in theirs if not key.startswith("head.")}
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(("case", "match"), REFUSED.items(), ids=str)
def test_what_is_not_followed(case: str, match: str) -> None:
    refused(GOLDEN / case, f"(?s){match}", case.partition("/")[0], pickled=True)


@pytest.mark.parametrize("case", [c for c in cases() if c.name.startswith("stack")], ids=named)
def test_stack(case: Path) -> None:
    host = host_of(case.parent.name)
    inlay.activate(host, inlay.Stack(*(inlay.load(host, case / name) for name in ("first", "second"))))
    close(logits_of(host, case.parent.name), expected(case)["logits"])


@pytest.mark.parametrize("case", [c for c in cases() if c.name.startswith("fusion")], ids=named)
def test_fusion_with_its_attention(case: Path) -> None:
    family = case.parent.name
    host = host_of(family)
    members = [inlay.load(host, folder) for folder in sorted(case.glob("m*"))]
    name = inlay.load(host, case / "fusion")
    assert name == (".".join(members) if len(members) > 1 else f"{members[0]}.fusion")
    inlay.activate(host, name)
    steps = fused_steps(host)
    for step in steps.values():
        step.record = []
    wanted = expected(case)
    close(logits_of(host, family), wanted["logits"])
    depth = host.inlays.anatomy.depth
    numbers = [f"{stack}.{i}.ffn" for stack, layers in depth.items() for i in range(layers)]
    seen = {f"attention.{numbers.index(place)}.output_adapter": step.record[-1] for place, step in steps.items()}
    assert seen.keys() == wanted.keys() - {"logits"}
    for key, attention in seen.items():
        close(attention, wanted[key])


def test_whole_setup() -> None:
    host = host_of("bert")
    bare = logits_of(host, "bert")
    setup = inlay.load(host, GOLDEN / "bert" / "setup")
    assert setup == inlay.Stack("first", "m0.m1")
    assert host.inlays.names() == ["first", "m0", "m1", "m0.m1"]
    assert torch.equal(logits_of(host, "bert"), bare), "loading activates nothing"
    inlay.activate(host, setup)
    close(logits_of(host, "bert"), expected(GOLDEN / "bert" / "setup")["logits"])


def test_a_fusion_of_one_adapter_shares_its_folder() -> None:
    host = host_of("bert")
    setup = inlay.load(host, GOLDEN / "bert" / "setup_fuse_one")
    assert setup == "m0.fusion"
    assert host.inlays.names() == ["m0", "m0.fusion"]
    inlay.activate(host, setup)
    close(logits_of(host, "bert"), expected(GOLDEN / "bert" / "setup_fuse_one")["logits"])


@pytest.mark.parametrize(("case", "match"), [
    ("setup_parallel_first", "'parallel' is parallel.*without the host's"),
    ("setup_parallel_last", "'parallel' is parallel.*drops what the parts before it gave"),
    ("setup_loras", "'lora' and 'other_lora' are stacked LoRAs.*only the last one is added"),
    ("setup_average", "divides by the number of parts twice, even"),
])  # fmt: skip
def test_setups_that_mean_something_else_there(case: str, match: str) -> None:
    """They are refused, and for a reason: the same composition of the same adapters gives other logits here."""
    folder, host = GOLDEN / "bert" / case, host_of("bert")
    with pytest.raises(inlay.CheckpointError, match=f"(?s){match}.*load their folders one by one"):
        inlay.load(host, folder)
    assert untouched(host)
    names = [inlay.load(host, part) for part in sorted(folder.iterdir()) if part.is_dir()]
    order = json.loads((folder / "adapter_setup.json").read_text())["adapter_setup"]["children"]
    assert sorted(child["children"][0] for child in order) == names
    compose = inlay.Average if case == "setup_average" else inlay.Stack
    inlay.activate(host, compose(*(child["children"][0] for child in order)))
    assert (logits_of(host, "bert") - expected(folder)["logits"]).abs().max() > 0.05


def test_stacks_that_mean_the_same_there(tmp_path: Path) -> None:
    """A parallel adapter and a LoRA do not meet; their Stack is read."""
    folder = Path(shutil.copytree(GOLDEN / "bert" / "setup_parallel_last", tmp_path / "setup"))
    shutil.copytree(GOLDEN / "bert" / "setup_loras" / "lora", folder / "first", dirs_exist_ok=True)
    host = host_of("bert")
    assert inlay.load(host, folder) == inlay.Stack("first", "parallel")


DROPOUTS = {
    "bert": "attention_probs_dropout_prob", "roberta": "attention_probs_dropout_prob",
    "xlm-roberta": "attention_probs_dropout_prob", "electra": "attention_probs_dropout_prob",
    "distilbert": "attention_dropout", "bart": "attention_dropout", "t5": "dropout_rate", "gpt2": "attn_pdrop",
    "mt5": None, "llama": None, "mistral": None,
}  # fmt: skip
"""Whose dropout a fusion of adapters 1.3.0 has, as found in the models that it made."""


def test_every_layout_says_whose_dropout_a_fusion_has() -> None:
    assert {family: layout.attention_dropout for family, layout in LAYOUTS.items()} == DROPOUTS


@pytest.mark.parametrize(
    ("family", "setting"), [("bert", "attention_probs_dropout_prob"), ("t5", "dropout_rate"), ("gpt2", "attn_pdrop")]
)
@pytest.mark.parametrize("said", [None, 0.0, 0.4])
def test_the_dropout_of_a_fusion(family: str, setting: str, said: float | None, tmp_path: Path) -> None:
    """Where a file says nothing, or 0, `adapters` takes the host's own."""
    folder = Path(shutil.copytree(GOLDEN / family / "fusion2_dynamic", tmp_path / "case"))
    file = folder / "fusion" / "adapter_fusion_config.json"
    config = json.loads(file.read_text())
    config["config"]["dropout_prob"] = said
    file.write_text(json.dumps(config))
    host = host_of(family)
    setattr(host.config, setting, 0.3)
    for member in ("m0", "m1"):
        inlay.load(host, folder / member)
    assert host.inlays[inlay.load(host, folder / "fusion")].method.dropout == (said or 0.3)


def test_bart_saves_a_buffer_with_its_head(tmp_path: Path) -> None:
    """final_logits_bias acts after the head. An inlay cannot change it, so it has to be the host's."""
    case, host = GOLDEN / "bart" / "seq_bn_host_head", host_of("bart")
    assert "final_logits_bias" in load_file(case / "model_head.safetensors")
    host.final_logits_bias += 1
    with pytest.raises(inlay.CheckpointError, match="final_logits_bias differs from the host's"):
        inlay.load(host, case)
    host = host_of("bart")
    name = inlay.load(host, case)
    inlay.activate(host, name)
    before = logits_of(host, "bart")
    folder = inlay.export(host, name, tmp_path / "again", "adapterhub")
    assert load_file(folder / "model_head.safetensors").keys() == load_file(case / "model_head.safetensors").keys()
    other = host_of("bart")
    inlay.activate(other, inlay.load(other, folder))
    assert torch.equal(logits_of(other, "bart"), before)


def test_an_output_layer_tied_to_the_embeddings(tmp_path: Path) -> None:
    """There, another output layer changes the embeddings too: its logits would not be those of a copy of the head."""
    host = host_of("bart")
    folder = Path(shutil.copytree(GOLDEN / "bart" / "seq_bn_host_head", tmp_path / "case"))
    tensors = load_file(folder / "model_head.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, folder / "model_head.safetensors")
    with pytest.raises(inlay.CheckpointError, match="lm_head.weight differs from the host's. It is tied"):
        inlay.load(host, folder)
    assert untouched(host)
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head())
    shake(host, "a")
    with pytest.raises(inlay.ConfigError, match="its own copy of lm_head was trained. It is tied"):
        inlay.export(host, "a", tmp_path / "a", "adapterhub")


@pytest.mark.parametrize(
    "case",
    [
        GOLDEN / "distilbert" / "peft_head",
        GOLDEN / "phi" / "peft_lm_head",
        GOLDEN / "bert-generation" / "peft_bias_all",
    ],
    ids=named,
)
def test_what_peft_wrote_is_written_again(case: Path, tmp_path: Path) -> None:
    family = case.parent.name
    host = host_of(family)
    name = inlay.load(host, case)
    inlay.activate(host, name)
    folder = inlay.export(host, name, tmp_path / "again", "peft")
    theirs, ours = load_file(case / "adapter_model.safetensors"), load_file(folder / "adapter_model.safetensors")
    assert ours.keys() <= theirs.keys()
    for key in ours:
        close(ours[key], theirs[key])
    other = host_of(family)
    inlay.activate(other, inlay.load(other, folder))
    close(logits_of(other, family), expected(case)["logits"])


def test_names_to_save_are_ends_of_words(tmp_path: Path) -> None:
    """peft would save pre_classifier with classifier, so an export has both."""
    host = host_of("distilbert")
    inlay.add(host, "a", inlay.LoRA(rank=2), head=inlay.Head(labels=2))
    folder = inlay.export(host, "a", tmp_path / "a", "peft")
    assert "base_model.model.pre_classifier.weight" in load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("case", ["bert/seq_bn_host_head", "bert/setup", "bert/peft_qv"])
def test_each_json_file_is_read_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(files, "read_json", lambda file: (read.append(file), read_json(file))[1])
    inlay.load(host_of("bert"), GOLDEN / case)
    assert read
    assert len(read) == len(set(read))
