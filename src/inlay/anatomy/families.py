"""The table of model families: one entry of dotted names each, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from inlay.anatomy.places import Branch, Family, Layers, Projection, Roles


def _projections(attention: Iterable[str], ffn_in: str | tuple[str, ...], ffn_out: str, cross: str = "") -> Roles:
    """q, k, v and o by their paths; `cross` is the prefix that replaces the self-attention's in cross-attention."""
    several = (ffn_in,) if isinstance(ffn_in, str) else ffn_in
    table = {role: (Projection(path),) for role, path in zip("qkvo", attention, strict=True)}
    if cross:
        table |= {f"cross_{r}": (Projection(f"{cross}.{p[0].path.rpartition('.')[2]}"),) for r, p in table.items()}
    return table | {"ffn_in": tuple(map(Projection, several)), "ffn_out": (Projection(ffn_out),)}


def _fused(qkv: str, o: str, ffn_in: str, ffn_out: str, per_head: bool = False) -> Roles:
    parts: Roles = {role: (Projection(qkv, i, 3, per_head),) for i, role in enumerate("qkv")}
    return parts | {"o": (Projection(o),), "ffn_in": (Projection(ffn_in),), "ffn_out": (Projection(ffn_out),)}


def _bert(q: str = "query", k: str = "key", v: str = "value", not_norms: tuple[str, ...] = ()) -> Family:
    attention = Branch(
        "attention.output.dropout", ("attention.output", 1), "attention.output.LayerNorm", "attention.output.dense"
    )
    ffn = Branch("output.dropout", ("output", 1), "output.LayerNorm", "output.dense")
    roles = _projections(
        [*(f"attention.self.{x}" for x in (q, k, v)), "attention.output.dense"], "intermediate.dense", "output.dense"
    )
    return Family({"encoder": Layers("encoder.layer", attention, ffn, roles)}, not_norms)


def _llama(path: str = "layers") -> Family:
    attention = Branch("self_attn.o_proj", ("input_layernorm", 0))
    ffn = Branch("mlp.down_proj", ("post_attention_layernorm", 0))
    return Family({"decoder": Layers(path, attention, ffn, _LLAMA_PROJECTIONS)})


_LLAMA_PROJECTIONS = _projections(
    [f"self_attn.{x}_proj" for x in "qkvo"], ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
)  # fmt: skip


def _gemma() -> Family:
    """Gemma 2 and 3 norm each branch's output too: what joins the residual stream is that norm's output."""
    attention = Branch("post_attention_layernorm", ("input_layernorm", 0), raw="self_attn.o_proj")
    ffn = Branch("post_feedforward_layernorm", ("pre_feedforward_layernorm", 0), raw="mlp.down_proj")
    return Family({"decoder": Layers("layers", attention, ffn, _LLAMA_PROJECTIONS)})


def _t5() -> Family:
    def stack(name: str, ffn: str, cross: str) -> Layers:
        roles = _projections(
            [f"layer.0.SelfAttention.{x}" for x in "qkvo"],
            tuple(f"{ffn}.DenseReluDense.{x}" for x in ("wi", "wi_0", "wi_1")), f"{ffn}.DenseReluDense.wo", cross,
        )  # fmt: skip
        return Layers(
            f"{name}.block",
            Branch("layer.0.dropout", ("layer.0.layer_norm", 0), raw="layer.0.SelfAttention.o"),
            Branch(f"{ffn}.dropout", (f"{ffn}.layer_norm", 0), raw=f"{ffn}.DenseReluDense"),
            roles,
        )

    return Family(
        {"encoder": stack("encoder", "layer.1", ""), "decoder": stack("decoder", "layer.2", "layer.1.EncDecAttention")}
    )


def _bart() -> Family:
    """BART drops out by function, not by module: its inlays act before that dropout."""
    attention = Branch("self_attn.out_proj", ("self_attn", 0), "self_attn_layer_norm")
    ffn = Branch("fc2", ("fc1", 0), "final_layer_norm")

    def stack(name: str, cross: str = "") -> Layers:
        roles = _projections([f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")], "fc1", "fc2", cross)
        return Layers(f"{name}.layers", attention, ffn, roles)

    return Family({"encoder": stack("encoder"), "decoder": stack("decoder", "encoder_attn")})


def _opt(config: Any) -> Family:
    """OPT is pre-LN in every size but 350m."""
    roles = _projections([f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")], "fc1", "fc2")
    if config.do_layer_norm_before:
        attention = Branch("self_attn.out_proj", ("self_attn_layer_norm", 0))
        ffn = Branch("fc2", ("final_layer_norm", 0))
    else:
        attention = Branch("self_attn.out_proj", ("self_attn", 0), "self_attn_layer_norm")
        ffn = Branch("fc2", ("fc1", 0), "final_layer_norm")
    return Family({"decoder": Layers("decoder.layers", attention, ffn, roles)})


FAMILIES: dict[str, Family] = {
    "bert": _bert(),
    "roberta": _bert(),
    "xlm-roberta": _bert(),
    "electra": _bert(),
    "deberta-v2": _bert("query_proj", "key_proj", "value_proj", not_norms=("encoder.LayerNorm",)),
    "deberta": replace(_bert(), stacks={"encoder": replace(
        _bert().stacks["encoder"],
        projections=_fused(
            "attention.self.in_proj", "attention.output.dense", "intermediate.dense", "output.dense", per_head=True
        ),
    )}),
    "mpnet": Family({"encoder": Layers(
        "encoder.layer",
        Branch("attention.dropout", ("attention.attn", 0), "attention.LayerNorm", "attention.attn.o"),
        Branch("output.dropout", ("output", 1), "output.LayerNorm", "output.dense"),
        _projections([f"attention.attn.{x}" for x in "qkvo"], "intermediate.dense", "output.dense"),
    )}),
    "distilbert": Family({"encoder": Layers(
        "transformer.layer",
        Branch("attention.out_lin", ("attention", 0), "sa_layer_norm"),
        Branch("ffn", ("ffn", 0), "output_layer_norm", "ffn.lin2"),
        _projections([f"attention.{x}_lin" for x in ("q", "k", "v", "out")], "ffn.lin1", "ffn.lin2"),
    )}),
    "modernbert": Family({"encoder": Layers(
        "layers",
        Branch("attn.out_drop", ("attn_norm", 0), raw="attn.Wo"),
        Branch("mlp", ("mlp_norm", 0)),
        _fused("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    )}),
    "t5": _t5(),
    "mt5": _t5(),
    "bart": _bart(),
    "gpt2": Family({"decoder": Layers(
        "h",
        Branch("attn.resid_dropout", ("ln_1", 0), raw="attn.c_proj"),
        Branch("mlp.dropout", ("ln_2", 0), raw="mlp.c_proj"),
        _fused("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    )}),
    "gpt_neox": Family({"decoder": Layers(
        "layers",
        Branch("post_attention_dropout", ("input_layernorm", 0), raw="attention.dense"),
        Branch("post_mlp_dropout", ("post_attention_layernorm", 0), raw="mlp"),
        _fused("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", per_head=True),
    )}),
    "llama": _llama(),
    "mistral": _llama(),
    "qwen2": _llama(),
    "qwen3": _llama(),
    "gemma2": _gemma(),
    "gemma3_text": _gemma(),
    "phi": Family({"decoder": Layers(
        "layers",
        Branch("self_attn.dense", ("input_layernorm", 0)),
        Branch("mlp", ("input_layernorm", 0)),
        _projections([f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "dense")], "mlp.fc1", "mlp.fc2"),
    )}),
}  # fmt: skip
BY_CONFIG = {"opt": _opt}
SHARED_LAYERS = ("albert",)


def register_family(model_type: str, family: Family) -> None:
    """Tell Inlay where things are in models whose `config.model_type` is `model_type`."""
    FAMILIES[model_type] = family
