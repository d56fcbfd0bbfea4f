"""Tiny random hosts, one per family, built on the spot."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor

from inlay.host.steps import leaves
from inlay.methods.fusion import Fused

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 1}
CAUSAL = SMALL | {"bos_token_id": 2, "eos_token_id": 1}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 50,
    "decoder_start_token_id": 0,
}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "forced_eos_token_id": None, "decoder_start_token_id": 2, "num_labels": 2, "max_position_embeddings": 64,
}  # fmt: skip
OPT = {
    "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, "word_embed_proj_dim": 16,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip

CONFIGS = {
    "bert": lambda: hf.BertConfig(**SMALL),
    "roberta": lambda: hf.RobertaConfig(**CAUSAL),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(**CAUSAL),
    "distilbert": lambda: hf.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=50),
    "electra": lambda: hf.ElectraConfig(**SMALL, embedding_size=8),
    "mpnet": lambda: hf.MPNetConfig(**CAUSAL),
    "deberta-v2": lambda: hf.DebertaV2Config(
        **SMALL, relative_attention=True, norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "modernbert": lambda: hf.ModernBertConfig(**CAUSAL, sep_token_id=1, cls_token_id=2),
    "t5": lambda: hf.T5Config(**T5, feed_forward_proj="relu"),
    "t5-gated": lambda: hf.T5Config(**T5, feed_forward_proj="gated-gelu"),
    "bart": lambda: hf.BartConfig(**BART),
    "gpt2": lambda: hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, pad_token_id=0, bos_token_id=2, eos_token_id=1),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**CAUSAL),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(**CAUSAL, use_parallel_residual=False),
    "opt": lambda: hf.OPTConfig(**OPT),
    "opt-post-ln": lambda: hf.OPTConfig(**OPT, do_layer_norm_before=False),
    "llama": lambda: hf.LlamaConfig(**CAUSAL),
    "mistral": lambda: hf.MistralConfig(**GROUPED),
    "qwen2": lambda: hf.Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED),
    "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED),
    "phi": lambda: hf.PhiConfig(**CAUSAL),
}  # fmt: skip
FAMILIES = list(CONFIGS)
POST_LN = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "deberta-v2", "bart", "opt-post-ln")
ENCODER_DECODER = ("t5", "t5-gated", "bart")


def classifier(family: str = "bert", seed: int = 0, **config: object) -> hf.PreTrainedModel:
    """A tiny text classifier with weights large enough that a wrong formula shows."""
    made = CONFIGS[family]()
    for name, value in config.items():
        setattr(made, name, value)
    return shaken(hf.AutoModelForSequenceClassification.from_config(made), seed)


def shaken(host: hf.PreTrainedModel, seed: int = 0) -> hf.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    for parameter in host.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return host.eval()


def shake(host: torch.nn.Module, name: str, seed: int = 1, std: float = 0.3) -> None:
    """Give an inlay weights of real size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in host.inlays[name].parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def module_of(host: torch.nn.Module, place: str) -> str:
    """The host's module at a place."""
    return host.inlays.anatomy.places[place].module


def step_at(host: torch.nn.Module, place: str):
    """What the active setup runs at a place's module; None where it leaves the host alone."""
    return host.inlays.acting.plan.steps.get(module_of(host, place))


def spy_on(host: torch.nn.Module, place: str) -> dict:
    """From now on the last call of the step at a place: h, what was seen, and what came out."""
    step, caught = step_at(host, place), {}

    def spy(h, seen):
        caught.update(h=h, seen=seen, out=step(h, seen))
        return caught["out"]

    host.inlays.acting.plan.steps[module_of(host, place)] = spy
    return caught


def fused_steps(host: torch.nn.Module) -> dict:
    """Place to the step of the fusion that acts there."""
    found = [leaf for step in host.inlays.acting.plan.steps.values() for leaf in leaves(step)]
    return {step.place.id: step for step in found if isinstance(step, Fused)}


def batch(rows: int = 3, tokens: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Random ids; the rows end at different tokens, each with the end-of-text token 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        end = tokens - 1 - row % 3
        ids[row, end], ids[row, end + 1 :], mask[row, end + 1 :] = 1, 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(host: torch.nn.Module, inputs: dict[str, Tensor] | None = None) -> Tensor:
    with torch.no_grad():
        return host(**(batch() if inputs is None else inputs)).logits


def row(inputs: dict[str, Tensor], at: int) -> dict[str, Tensor]:
    return {name: tensor[at : at + 1] for name, tensor in inputs.items()}


def without_dropout(host: torch.nn.Module) -> None:
    """Training without chance, but for what inlays draw."""
    for module in host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    host.config.attention_probs_dropout_prob = 0.0


def without_gradient(host: torch.nn.Module, loss: Tensor) -> list[str]:
    """The trainable parameters that a loss does not depend on."""
    loss.backward()
    learning = {name: p for name, p in host.named_parameters() if p.requires_grad}
    return [name for name, p in learning.items() if p.grad is None or not p.grad.any()]


def snapshot(host: torch.nn.Module) -> dict:
    """Everything about a host that an inlay might leave behind."""
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in host.named_modules()}
    flags = {name: p.requires_grad for name, p in host.named_parameters()}
    return {
        "hooks": hooks,
        "flags": flags,
        "keys": list(host.state_dict()),
        "config": host.config.to_dict(),
        "dict": set(vars(host)),
    }


def untouched(host: torch.nn.Module) -> bool:
    """Whether a host has nothing of ours: no inlays, no hooks."""
    return not hasattr(host, "inlays") and not any(m._forward_hooks or m._forward_pre_hooks for m in host.modules())


def checkpointing_on(host, *how, **more):
    """Turn gradient checkpointing on; from transformers 5.23 on it is called activation checkpointing."""
    (getattr(host, "activation_checkpointing_enable", None) or host.gradient_checkpointing_enable)(*how, **more)


def checkpointing_off(host):
    (getattr(host, "activation_checkpointing_disable", None) or host.gradient_checkpointing_disable)()
