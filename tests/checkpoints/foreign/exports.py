"""Exports of every kind, and the files with which tools/check_export.py checks them in the peer's environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

import inlay
from inlay import Head
from tests import hosts
from tests.checkpoints.foreign.golden import GOLDEN, host_of, inputs_of
from tests.hosts import shake

SPREAD = 0.15
Host = hf.PreTrainedModel


@dataclass(frozen=True)
class Case:
    """One export: what is put on the host, and what is written."""

    method: Callable[[], Any]
    format: str
    families: tuple[str, ...]
    head: Head | None = None
    members: int = 0
    """More than 0: a fusion over that many."""
    fusion: dict[str, Any] = field(default_factory=dict)
    merged: bool = False
    """A mixture, merged before the export."""


HUB = ("bert", "roberta", "t5", "gpt2")
MORE = ("electra", "xlm-roberta", "distilbert", "bart", "llama", "mistral", "mt5")
PEFT = (*HUB, "llama")
PEFT_MORE = ("mt5", "t5-gated", "opt", "gpt_neox", "phi", "gemma2", "gemma3", "modernbert")
COPY = Head(labels=("yes", "no", "unclear"))
GOLDEN_HOSTS = {name: name for name in (*HUB, "llama", "bert-generation")} | {"phi-lm": "phi"}
"""Hosts of the golden files; those with an output layer for words have another name than the classifiers."""


def _first(layers: int) -> Head:
    return Head(labels=3, pooling="first", layers=layers, dropout=0.2)


CASES: dict[str, Case] = {
    "pfeiffer": Case(lambda: inlay.Pfeiffer(reduction=3), "adapterhub", HUB + MORE),
    "houlsby": Case(lambda: inlay.Houlsby(size=4), "adapterhub", HUB + MORE),
    "parallel": Case(lambda: inlay.Parallel(), "adapterhub", HUB),
    "parallel_learned": Case(lambda: inlay.Parallel(scale="learned"), "adapterhub", HUB),
    "own_norm": Case(lambda: inlay.Bapna(reads="normed", size=5), "adapterhub", HUB),
    "bapna": Case(lambda: inlay.Bapna(size=5), "adapterhub", ("t5", "gpt2")),
    "sizes": Case(lambda: inlay.Houlsby(size={0: 7, 1: 5}), "adapterhub", HUB),
    "left_out": Case(lambda: inlay.Pfeiffer(size=4, leave_out=(0,)), "adapterhub", HUB),
    "attention": Case(lambda: inlay.Houlsby(size=4, sites=("attention",), activation="leaky_relu"), "adapterhub", HUB),
    "compacter": Case(lambda: inlay.Compacter(size=8, before_dropout=False), "adapterhub", HUB),
    "compacter++": Case(lambda: inlay.CompacterPlusPlus(size=8, reads="normed", before_dropout=False), "adapterhub", HUB),
    "phm": Case(lambda: inlay.PHM(size=8, before_dropout=False, learn_rule=False), "adapterhub", ("bert", "gpt2")),
    "lora": Case(lambda: inlay.LoRA(rank=3, alpha=6), "adapterhub", ("bert", "roberta", "gpt2", "distilbert", "llama")),
    "lora_cross": Case(lambda: inlay.LoRA(rank=3, targets=("q", "v", "cross_q", "cross_v")), "adapterhub", ("t5", "bart", "mt5")),
    "lora_down": Case(lambda: inlay.LoRA(rank=3, targets=("v", "ffn_out")), "adapterhub", ("llama", "mistral")),
    "lora_ffn": Case(lambda: inlay.LoRA(rank=3, targets=("q", "k", "ffn_in", "ffn_out"), leave_out=(1,)), "adapterhub", ("bert", "gpt2")),
    "head_copy": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("roberta", "gpt2"), head=COPY),
    "head_first1": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("bert", "roberta"), head=_first(1)),
    "head_first2": Case(lambda: inlay.LoRA(rank=2), "adapterhub", ("bert",), head=_first(2)),
    "head_tags": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("bert", "roberta", "distilbert"), head=Head(labels=("O", "B-X", "I-X"), pooling="tokens", layers=2)),
    "head_spans": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("bert", "roberta"), head=Head(labels=("start", "end"), pooling="tokens")),
    "head_choice": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("bert", "roberta"), head=Head(labels=("choice",), pooling="first", layers=2, choices=3)),
    "head_last": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("gpt2",), head=Head(labels=3, pooling="last", layers=2)),
    "fusion": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", HUB, members=3),
    "fusion_of_one": Case(lambda: inlay.Pfeiffer(size=4), "adapterhub", ("bert",), members=1),
    "fusion_static": Case(lambda: inlay.Houlsby(size=4), "adapterhub", HUB, members=2, fusion={"value": False, "query": "output"}),
    "fusion_left_out": Case(lambda: inlay.Pfeiffer(size=4, leave_out=(0,)), "adapterhub", ("bert",), members=2),
    "adamix": Case(lambda: inlay.Mixture(inlay.Pfeiffer(size=4)), "adapterhub", ("bert",), merged=True),
    "prefix": Case(lambda: inlay.Prefix(length=3), "adapterhub", ("bert", "roberta", "gpt2", "distilbert", "electra", "bart", "llama")),
    "prefix_made": Case(lambda: inlay.Prefix(length=3, reparametrised=True, hidden=5, leave_out=(0,)), "adapterhub", ("bert", "gpt2")),
    "prefix_encoder": Case(lambda: inlay.Prefix(length=3, at=("encoder",)), "adapterhub", ("bart",)),
    "prefix_head": Case(lambda: inlay.Prefix(length=3), "adapterhub", ("bert",), head=_first(2)),
    "ia3": Case(lambda: inlay.IA3(outputs=("k", "v", "cross_k", "cross_v", "ffn_in"), inputs=()), "adapterhub", ("bert", "roberta", "t5", "gpt2", "bart", "distilbert")),
    "ia3_left_out": Case(lambda: inlay.IA3(outputs=("k", "v"), inputs=(), leave_out=(0,)), "adapterhub", ("bert", "gpt2", "llama")),
    "ia3_head": Case(lambda: inlay.IA3(outputs=("k", "v"), inputs=()), "adapterhub", ("roberta",), head=COPY),
    "unipelt": Case(lambda: inlay.UniPELT(prefix=inlay.Prefix(length=3), count_padding=True), "adapterhub", ("bert", "roberta", "distilbert", "bart")),
    "unipelt_two": Case(lambda: inlay.UniPELT(prefix=inlay.Prefix(length=3, reparametrised=True, hidden=5), lora=None, gates="two", count_padding=True), "adapterhub", ("bert",)),
    "peft_ia3": Case(lambda: inlay.IA3(), "peft", ("bert", "roberta", "t5", "llama", "distilbert")),
    "peft_ia3_left_out": Case(lambda: inlay.IA3(leave_out=(0,)), "peft", ("bert",)),
    "peft_ia3_qkv": Case(lambda: inlay.IA3(outputs=("qkv",)), "peft", ("gpt2",)),
    "peft_ia3_head": Case(lambda: inlay.IA3(), "peft", ("bert", "roberta", "llama"), head=COPY),
    "peft_prefix": Case(lambda: inlay.Prefix(length=3, shift=True), "peft", ("bert", "gpt2", "llama")),
    "peft_prefix_head": Case(lambda: inlay.Prefix(length=3, shift=True), "peft", ("bert", "gpt2", "llama"), head=COPY),
    "peft_prefix_made": Case(lambda: inlay.Prefix(length=3, shift=True, reparametrised=True, hidden=5), "peft", ("gpt2",), merged=True),
    "peft_prompt": Case(lambda: inlay.Prompt(length=3), "peft", ("t5", "gpt2", "phi-lm")),
    "peft_prompt_head": Case(lambda: inlay.Prompt(length=3), "peft", ("gpt2", "llama"), head=COPY),
    "peft_prompt_mixture": Case(lambda: inlay.Mixture(inlay.Prompt(length=3)), "peft", ("gpt2",), merged=True),
    "peft_qv": Case(lambda: inlay.LoRA(rank=3, alpha=6), "peft", PEFT + PEFT_MORE),
    "peft_all": Case(lambda: inlay.LoRA(rank=3, targets=("q", "k", "v", "o", "ffn_in", "ffn_out", "linear")), "peft", ("bert", "roberta", "gpt2", "llama", *PEFT_MORE[2:])),
    "peft_cross": Case(lambda: inlay.LoRA(rank=3, targets=("q", "k", "v", "o", "ffn_in", "ffn_out", "cross_q", "cross_k", "cross_v", "cross_o")), "peft", ("t5", "t5-gated", "mt5")),
    "peft_qkv": Case(lambda: inlay.LoRA(rank=3, alpha=6, targets=("qkv", "o")), "peft", ("gpt2", "gpt_neox", "modernbert")),
    "peft_rslora": Case(lambda: inlay.LoRA(rank=3, alpha=6, rank_stabilised=True), "peft", PEFT),
    "peft_left_out": Case(lambda: inlay.LoRA(rank=3, leave_out=(1,), dropout=0.1), "peft", PEFT),
    "peft_ranks": Case(lambda: inlay.LoRA(rank=3, ranks={"encoder.1.q": 2}, alphas={"encoder.0.v": 5.0}), "peft", ("bert",)),
    "peft_parts": Case(lambda: inlay.LoRA(rank=4, alpha=2, ranks={"decoder.1.q": 2}, alphas={"decoder.0.v": 5.0}), "peft", ("gpt2",)),
    "peft_bias": Case(lambda: inlay.LoRA(rank=3, bias="targets"), "peft", ("bert", "roberta", "gpt2")),
    "peft_bias_all": Case(lambda: inlay.LoRA(rank=3, bias="all"), "peft", ("bert", "roberta", "gpt2", "bert-generation")),
    "peft_lm_head": Case(lambda: inlay.LoRA(rank=3, targets=("q", "linear.lm_head")), "peft", ("phi-lm",)),
    "peft_head": Case(lambda: inlay.LoRA(rank=3), "peft", ("bert", "roberta", "gpt2", "llama", "distilbert"), head=COPY),
    "peft_adamix": Case(lambda: inlay.Mixture(inlay.LoRA(rank=4, alpha=32)), "peft", PEFT, merged=True),
}  # fmt: skip
ALL = [(name, family) for name, case in CASES.items() for family in case.families]


def host_and_inputs(family: str) -> tuple[Host, dict[str, Tensor]]:
    if family in GOLDEN_HOSTS:
        return host_of(GOLDEN_HOSTS[family]), inputs_of(GOLDEN_HOSTS[family])
    if family == "mt5":
        config = hf.MT5Config(**hosts.T5)
        return hosts.shaken(hf.MT5ForConditionalGeneration(config)), inputs_of("t5")
    return hosts.classifier(family, num_labels=3), hosts.batch()


def set_in(host: Host, case: Case) -> tuple[str, list[str]]:
    """Put a case's inlay on a host with weights of real size; its name, and the names of its members."""
    members = [f"m{i}" for i in range(case.members)]
    for seed, name in enumerate(members or ["a"]):
        inlay.add(host, name, case.method(), head=None if members else case.head, norms=False)
        shake(host, name, seed=seed, std=SPREAD)
    if case.merged:
        inlay.merge(host, "a")
    if not members:
        return "a", []
    inlay.add_fusion(host, "f", members, **case.fusion)
    shake(host, "f", seed=7, std=0.06)
    return "f", members


def export_all(host: Host, name: str, members: list[str], case: Case, folder: Path) -> list[str]:
    """Export an inlay and its members; the checkpoints' folders, in the order to load them in."""
    for each in (*members, name):
        inlay.export(host, each, folder / each, case.format)
    return [*members, name]


def prepare(name: str, family: str, root: Path) -> None:
    """Write one case for tools/check_export.py.

    whole_rows: with a prompt a decoder's classifier in peft reads the last token, also where that is padding.
    """
    case, folder = CASES[name], root / f"{family}.{name}"
    host, inputs = host_and_inputs(family)
    home = GOLDEN / GOLDEN_HOSTS.get(family, "") / "host"
    if family not in GOLDEN_HOSTS:
        home = root / f"host.{family}"
        host.save_pretrained(home)
    expected = {"bare": _logits(host, inputs)}
    exported, members = set_in(host, case)
    checkpoints = export_all(host, exported, members, case, folder)
    inlay.activate(host, exported)
    expected["logits"] = _logits(host, inputs)
    assert (
        expected["logits"].shape != expected["bare"].shape or (expected["logits"] - expected["bare"]).abs().max() > 1e-2
    )
    save_file(expected, folder / "expected.safetensors")
    save_file(inputs, folder / "inputs.safetensors")
    described = {
        "library": {"adapterhub": "adapters"}.get(case.format, case.format),
        "host": str(home),
        "host_class": type(host).__name__,
        "flexible": case.head is not None and case.head.pooling is not None,
        "checkpoints": checkpoints,
        "activate": members or [exported],
        "fuse": bool(members),
        "whole_rows": name.startswith("peft_prompt") and "Classification" in type(host).__name__,
    }
    (folder / "case.json").write_text(json.dumps(described, indent=1))


def _logits(host: Host, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return host(**inputs).logits.contiguous()
