"""What has no counterpart is refused with the reason, in both directions; nothing is dropped, and no host half loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import inlay
from inlay.checkpoints.foreign import patterns
from tests.checkpoints.foreign.golden import GOLDEN, copied, host_of, logits_of, refused
from tests.hosts import classifier, shake

WEIGHTS = {"adapter.safetensors", "adapter_model.safetensors", "model_adapter_fusion.safetensors"}


def change_config(folder: Path, inside: bool = True, **options: Any) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    (config["config"] if inside and "config" in config else config).update(options)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    for file in (folder / name for name in WEIGHTS if (folder / name).exists()):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


# reading


@pytest.mark.parametrize(("case", "option", "value", "match"), [
    ("seq_bn", "surprise", 1, "no setting 'surprise'"),
    ("seq_bn", "ln_after", True, "norm after the up-projection"),
    ("seq_bn", "original_ln_after", False, "the host's own norm always acts"),
    ("seq_bn", "residual_before_ln", "post_add", "residual_before_ln"),
    ("seq_bn", "residual_before_ln", False, "residual_before_ln"),
    ("seq_bn", "use_gating", True, "gate.weight is missing"),
    ("seq_bn", "inv_adapter", "nice", "invertible"),
    ("seq_bn", "cross_adapter", True, "cross-attention"),
    ("seq_bn", "scaling", "channel", "scale per channel"),
    ("seq_bn", "stochastic_depth", 0.1, "stochastic depth"),
    ("seq_bn", "non_linearity", "os.system", "unknown activation"),
    ("seq_bn", "non_linearity", None, "non_linearity"),
    ("seq_bn", "reduction_factor", 0, "greater than or equal to 0.000001"),
    ("seq_bn", "reduction_factor", float("nan"), "reduction_factor"),
    ("seq_bn", "reduction_factor", {"first": 2, "default": 3}, "by layer number"),
    ("seq_bn", "reduction_factor", {"7": 2, "default": 3}, "no layer 7"),
    ("seq_bn", "reduction_factor", {"1": 2}, "neither every layer nor a 'default'"),
    ("seq_bn", "reduction_factor", 1e-4, "the file has"),
    ("seq_bn", "leave_out", [5], "no layer 5"),
    ("seq_bn", "architecture", "prompt_tuning", "have no counterpart"),
    ("seq_bn", "architecture", "os.system", "have no counterpart"),
    ("seq_bn", "architecture", ["lora"], "have no counterpart"),
    ("seq_bn", "output_adapter", False, "at least one"),
    ("compacter", "factorized_phm_rule", True, "factorised rule"),
    ("compacter", "shared_W_phm", True, "shared by all layers"),
    ("compacter", "phm_bias", False, "have a bias"),
    ("compacter", "phm_dim", 10**6, "the file has"),
    ("compacter", "phm_rank", 10**12, "the file has"),
    ("compacter", "phm_dim", 5, "does not divide"),
    ("lora", "composition_mode", "scale", "IA"),
    ("lora", "use_dora", True, "DoRA"),
    ("lora", "vera_d", 0.1, "VeRA"),
    ("lora", "r", 10**12, "the file has"),
    ("lora", "attn_matrices", ["q", "o"], "attn_matrices"),
    ("lora", "selfattn_lora", False, "changes no projection"),
    ("peft_qv", "surprise", 1, "no setting 'surprise'"),
    ("peft_qv", "peft_type", "LOHA", "of peft's methods Inlay reads LoRA"),
    ("peft_qv", "peft_type", {"import": "os.system"}, "peft_type"),
    ("peft_qv", "use_dora", True, "DoRA"),
    ("peft_qv", "lora_bias", True, "no counterpart"),
    ("peft_qv", "init_lora_weights", "pissa", "changes the host's own weights"),
    ("peft_qv", "layer_replication", [[0, 2]], "no counterpart"),
    ("peft_qv", "trainable_token_indices", [1], "no counterpart"),
    ("peft_qv", "modules_to_save", ["word_embeddings"], "not of bert.embeddings.word_embeddings"),
    ("peft_qv", "modules_to_save", ["classifier"], "classifier.weight is missing"),
    ("peft_qv", "bias", "lora_only", "base_layer.bias is missing"),
    ("peft_qv", "target_modules", ["query"], "not among the target_modules"),
    ("peft_qv", "target_modules", ["query", "value", "key"], "its tensors are missing"),
    ("peft_qv", "target_modules", ".*query", "value has a LoRA, but is not among"),
    ("peft_qv", "target_modules", ".*(query|value|key)", "key is among the target_modules, but its tensors are missing"),
    ("peft_qv", "target_modules", "all-linear", "output.dense is among the target_modules, but its tensors are missing"),
    ("peft_qv", "target_modules", "(.|.)" * 40 + "[^a-z]", "takes too long"),
    ("peft_qv", "exclude_modules", ["0.attention.self.query"], "layer.0.attention.self.query has a LoRA, but is not"),
    ("peft_qv", "exclude_modules", r".*\.0\..*query", "layer.0.attention.self.query has a LoRA, but is not"),
    ("peft_qv", "layers_to_transform", [1], "layer.0.attention.self.query has a LoRA, but is not"),
    ("peft_layers", "layers_pattern", "blocks", "layer.1.attention.self.query has a LoRA, but is not"),
    ("peft_qv", "merge_weights", True, "merge_weights"),
    ("peft_qv", "r", 10**9, "the file has"),
    ("peft_qv", "r", 5, r"has shape \(4, 24\), expected \(5, 24\)"),
    ("peft_patterns", "rank_pattern", {"(": 2}, "is not a pattern"),
    ("peft_patterns", "rank_pattern", {"(.|.)" * 40 + "[^a-z]": 2}, "takes too long"),
    ("peft_patterns", "rank_pattern", {"(x+)*" * 300 + str(i): 2 for i in range(2000)}, "patterns take too long"),
    ("peft_patterns", "alpha_pattern", {"((a{99}){99}){99}": 2}, "counts further"),
])  # fmt: skip
def test_an_option_without_a_counterpart(
    case: str, option: str, value: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "too long" in match:
        monkeypatch.setattr(patterns, "PATIENCE", 0.2)  # to match the one takes years, to compile the many minutes
    folder = copied(f"bert/{case}", tmp_path)
    change_config(folder, **{option: value})
    assert str(folder) in refused(folder, match)


def test_embeddings_are_left_alone(tmp_path: Path) -> None:
    folder = copied("bert/peft_qv", tmp_path)
    key = "base_model.model.bert.embeddings.word_embeddings.lora_embedding_A"
    change_tensors(folder, lambda tensors: tensors.update({key: torch.zeros(4, 40)}))
    refused(folder, "changes the embeddings, which an inlay leaves alone")


def test_peft_of_the_first_versions(tmp_path: Path) -> None:
    folder = copied("bert/peft_qv", tmp_path)
    change_config(folder, enable_lora=None, merge_weights=False)
    assert inlay.load(host_of("bert"), folder) == "case"


def test_all_options_are_named_at_once(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    change_config(folder, ln_after=True, use_gating=True, surprise=0)
    message = refused(folder, "ln_after")
    assert "use_gating" in message
    assert "surprise" in message


@pytest.mark.parametrize("case", ["seq_bn", "lora", "compacter", "peft_qv", "peft_head"])
def test_missing_unexpected_and_misshapen_tensors_are_listed(case: str, tmp_path: Path) -> None:
    folder = copied(f"bert/{case}", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        first, second = sorted(tensors)[:2]
        del tensors[first]
        tensors[second] = torch.zeros(3, 5, 7)
        tensors["bert.encoder.layer.0.surprise"] = torch.zeros(2)
        spoil.names = first, second  # type: ignore[attr-defined]

    change_tensors(folder, spoil)
    message = refused(folder, "surprise is not expected")
    first, second = spoil.names  # type: ignore[attr-defined]
    assert f"{first} is missing" in message
    assert f"{second} has shape (3, 5, 7)" in message


def test_phm_without_its_rule(tmp_path: Path) -> None:
    folder = copied("bert/compacter", tmp_path)
    change_tensors(folder, lambda tensors: tensors.pop("bert.shared_parameters.a.phm_rule"))
    refused(folder, "rule bert.shared_parameters.a.phm_rule is not in the file")


def test_another_host(tmp_path: Path) -> None:
    refused(GOLDEN / "bert" / "seq_bn", "model_type 'bert', this one has 'roberta'", family="roberta")
    refused(GOLDEN / "bert" / "peft_qv", "no linear map of this host", family="gpt2")
    folder = copied("bert/seq_bn", tmp_path)
    change_config(folder, inside=False, hidden_size=768)
    refused(folder, "hidden_size 768, this one has 24")


@pytest.mark.parametrize(("option", "value", "match"), [
    ("temperature", True, "temperature"),
    ("query", False, "without queries"),
    ("residual_before", True, "residual"),
    ("surprise", 1, "no setting 'surprise'"),
])  # fmt: skip
def test_fusion_options(option: str, value: Any, match: str, tmp_path: Path) -> None:
    folder = copied("bert/fusion2_dynamic", tmp_path)
    file = folder / "fusion" / "adapter_fusion_config.json"
    config = json.loads(file.read_text())
    config["config"][option] = value
    file.write_text(json.dumps(config))
    host = host_of("bert")
    for member in ("m0", "m1"):
        inlay.load(host, folder / member)
    with pytest.raises(inlay.CheckpointError, match=match):
        inlay.load(host, folder / "fusion")
    assert host.inlays.names() == ["m0", "m1"]


def test_a_fusion_needs_its_members() -> None:
    refused(GOLDEN / "bert" / "fusion2_dynamic" / "fusion", "'m0' is not on this host; load it first")


def test_a_fusion_of_members_that_read_differently() -> None:
    host = host_of("bert")
    inlay.add(host, "m0", inlay.Houlsby(size=4))
    inlay.add(host, "m1", inlay.Pfeiffer(size=4))
    with pytest.raises(inlay.CheckpointError, match="read differently"):
        inlay.load(host, GOLDEN / "bert" / "fusion2_dynamic" / "fusion")


@pytest.mark.parametrize(("option", "value", "match"), [
    ("head_type", "question_answering", "head_type"),
    ("head_type", "multiple_choice", "needs num_choices"),
    ("num_labels", None, "needs num_labels"),
    ("use_pooler", True, "pooler"),
    ("bias", False, "bias"),
    ("layers", 10**9, "the file has"),
    ("num_labels", 10**12, "the file has"),
    ("label2id", {"a": 0, "b": 7}, "from 0"),
    ("surprise", 1, "no setting 'surprise'"),
])  # fmt: skip
def test_head_options(option: str, value: Any, match: str, tmp_path: Path) -> None:
    folder = copied("bert/seq_bn_head2", tmp_path)
    config = json.loads((folder / "head_config.json").read_text())
    config["config"][option] = value
    (folder / "head_config.json").write_text(json.dumps(config))
    refused(folder, match)


def test_a_head_alone(tmp_path: Path) -> None:
    for name in ("head_config.json", "model_head.safetensors"):
        shutil.copy(GOLDEN / "bert" / "seq_bn_head2" / name, tmp_path / name)
    host = host_of("bert")
    with pytest.raises(inlay.CheckpointError, match="nothing but a head"):
        inlay.load(host, tmp_path, head=False)
    assert inlay.load(host, tmp_path) == "a"
    inlay.activate(host, "a")
    assert logits_of(host, "bert").shape == (3, 4)


def test_a_fused_module_and_its_parts_are_different_loras() -> None:
    host = host_of("gpt2")
    name = inlay.load(host, GOLDEN / "gpt2" / "peft_qv")
    assert host.inlays[name].method.targets == ("qkv",)
    name = inlay.load(host, GOLDEN / "gpt2" / "lora")
    assert host.inlays[name].method.targets == ("q", "v")


def test_old_versions_mean_what_they_meant(tmp_path: Path) -> None:
    folder = copied("bert/seq_bn", tmp_path)
    change_config(folder, non_linearity="gelu", attention_type="sent-lvl-dynamic", new_attention_norm=False)
    change_config(folder, invertible_adapter={"block_type": "nice", "reduction_factor": 2}, inv_adapter="nice")
    change_config(folder, inside=False, type="text_task", config_id="9076f36a74755ac4")
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["version"]
    file.write_text(json.dumps(config))
    change_tensors(
        folder, lambda t: t.update({k.replace(".adapters.", ".layer_text_task_adapters."): t.pop(k) for k in list(t)})
    )
    host = host_of("bert")
    name = inlay.load(host, folder)
    assert host.inlays[name].method.activation == "gelu_new"


def test_loras_before_1_1_had_no_scale(tmp_path: Path) -> None:
    folder = copied("bert/lora", tmp_path)
    change_config(folder, inside=False, version="adapters.1.0.1")
    host = host_of("bert")
    name = inlay.load(host, folder)
    assert host.inlays[name].method.alpha == 4


# whole setups


def setup_with(tmp_path: Path, block: Any) -> Path:
    folder = copied("bert/setup", tmp_path)
    (folder / "adapter_setup.json").write_text(json.dumps({"adapter_setup": block, "head_setup": True, "version": "1"}))
    return folder


def single(name: Any) -> dict[str, Any]:
    return {"type": "single", "children": [name]}


@pytest.mark.parametrize(("block", "match"), [
    ({"type": "Parallel", "children": [single("first"), single("m0")]}, "has no counterpart"),
    ({"type": "system", "children": [single("first")]}, "has no counterpart"),
    ({"type": "Stack", "children": []}, "not readable"),
    ({"type": "Stack", "children": ["first"]}, "not readable"),
    (None, "not readable"),
    (single("../../secret"), "not the name of a folder beside it"),
    (single("/etc"), "not the name of a folder beside it"),
    (single(".."), "not the name of a folder beside it"),
    (single(["first"]), "not the name of a folder beside it"),
    ({"type": "Stack", "children": [single("first"), single("nobody")]}, "nobody has neither"),
    ({"type": "Average", "children": [single("first")], "kwargs": {"weights": "x"}}, "weights"),
    (single("first") | {"kwargs": {"surprise": 1}}, "not readable|no counterpart"),
])  # fmt: skip
def test_setups_that_are_refused(block: Any, match: str, tmp_path: Path) -> None:
    refused(setup_with(tmp_path, block), match)


def test_a_setup_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = copied("bert/setup", tmp_path)
    (folder / "m0,m1" / "model_adapter_fusion.safetensors").unlink()
    refused(folder, "has no model_adapter_fusion.safetensors")
    host = host_of("bert")
    inlay.add(host, "other", inlay.Houlsby(size=4))
    sites = set(host.inlays.sites)
    with pytest.raises(inlay.CheckpointError):
        inlay.load(host, folder)
    assert host.inlays.names() == ["other"]
    assert set(host.inlays.sites) == sites


def test_one_name_cannot_name_a_setup() -> None:
    refused(GOLDEN / "bert" / "setup", "one name cannot name", name="a")


# writing


@pytest.mark.parametrize(("method", "format", "match"), [
    (lambda: inlay.Pfeiffer(size=4), "peft", "peft has no counterpart of the method 'pfeiffer'"),
    (lambda: inlay.BitFit(), "adapterhub", "no counterpart of the method 'bitfit'"),
    (lambda: inlay.LowRank(size=4), "adapterhub", "no counterpart of the method 'lowrank'"),
    (lambda: inlay.Bapna(size=4), "adapterhub", "post-LN"),
    (lambda: inlay.Mixture(inlay.LoRA(rank=2)), "peft", "inlay.merge"),
    (lambda: inlay.LoRA(rank=2, rank_stabilised=True), "adapterhub", "rank-stabilised"),
    (lambda: inlay.LoRA(rank=2, ranks={"encoder.0.q": 1}), "adapterhub", "differ by place"),
    (lambda: inlay.LoRA(rank=2, bias="targets"), "adapterhub", "trained biases"),
    (lambda: inlay.LoRA(rank=2, targets=("q", "o")), "adapterhub", "would differ at encoder.0.o"),
    (lambda: inlay.LoRA(rank=2, targets=("encoder.0.q", "encoder.1.v")), "adapterhub", "would differ at"),
    (lambda: inlay.LoRA(rank=2), "gguf", "unknown format 'gguf'"),
])  # fmt: skip
def test_exports_that_are_refused(method: Callable[[], Any], format: Any, match: str, tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", method(), norms=False)
    with pytest.raises(inlay.ConfigError, match=match):
        inlay.export(host, "a", tmp_path / "x", format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["peft", "adapterhub"])
def test_own_norms_are_not_dropped(format: Any, tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2), norms=True)
    with pytest.raises(inlay.ConfigError, match="owns layer norms"):
        inlay.export(host, "a", tmp_path / "x", format)


def test_heads_that_are_refused(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "mean", inlay.LoRA(rank=2), head=inlay.Head(labels=2, pooling="mean"))
    inlay.add(host, "copy", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2))
    inlay.export(host, "copy", tmp_path / "copy", "adapterhub")
    shake(host, "copy")
    for name, format, match in (
        ("mean", "peft", "pooling head"),
        ("mean", "adapterhub", "pools 'mean'"),
        ("copy", "adapterhub", "copy of bert.pooler was trained"),
    ):
        with pytest.raises(inlay.ConfigError, match=match):
            inlay.export(host, name, tmp_path / "x", format)


def test_a_change_below_an_own_head(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q", "linear.pooler.dense")))
    host.inlays["a"].head = inlay.Head()
    host.inlays["a"].fill(host, host.inlays.anatomy)
    with pytest.raises(inlay.ConfigError, match=r"changes bert.pooler.dense and has its own copy"):
        inlay.export(host, "a", tmp_path / "x", "peft")


def test_names_with_dots(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a.b", inlay.Pfeiffer(size=4))
    with pytest.raises(inlay.ConfigError, match="dot in a name"):
        inlay.export(host, "a.b", tmp_path / "x", "adapterhub")


def test_fusions_that_are_refused(tmp_path: Path) -> None:
    host = classifier()
    for name in ("m0", "m1"):
        inlay.add(host, name, inlay.Pfeiffer(size=4))
    inlay.add_fusion(host, "hot", ["m0", "m1"], temperature=2.0)
    inlay.add_fusion(host, "less", ["m0", "m1"], leave_out=[0])
    for name, match in (("hot", "temperature"), ("less", "fewer places")):
        with pytest.raises(inlay.ConfigError, match=match):
            inlay.export(host, name, tmp_path / "x", "adapterhub")


def test_what_acts_only_in_training_is_said(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Compacter(size=4), norms=False)
    with pytest.warns(UserWarning, match="before_dropout acts only in training"):
        inlay.export(host, "a", tmp_path / "x", "adapterhub")


def test_an_export_replaces_only_what_it_knows(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2))
    folder = inlay.export(host, "a", tmp_path / "x", "peft")
    inlay.export(host, "a", folder, "peft")
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    with pytest.raises(inlay.CheckpointError, match="left as it is"):
        inlay.export(host, "a", tmp_path / "mine", "peft")
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_reading_and_writing_take_no_random_numbers(tmp_path: Path) -> None:
    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2))
    before = torch.get_rng_state()
    inlay.load(host, inlay.export(host, "a", tmp_path / "x", "peft"), name="b")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_choice_head_says_how_many_choices_a_row_has(tmp_path: Path) -> None:
    host = host_of("bert")
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=("choice",), pooling="first"))
    with pytest.raises(inlay.ConfigError, match=r"has to know how many choices every row has.*choices=5"):
        inlay.export(host, "a", tmp_path / "x", "adapterhub")
    assert not (tmp_path / "x").exists()
    with pytest.raises(inlay.ConfigError, match="choices belong to a head with the one output 'choice'"):
        inlay.Head(labels=3, choices=3)
