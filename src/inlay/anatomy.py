"""Where things are in each model family. One family is one table entry of dotted names.

    layer ─┬─ attention ── h ─┐            ┌─ ffn ── h ─┐
           └────────────── r ─┴─(+)─[norm]─┴─────── r ──┴─(+)─[norm]──     post-LN: a norm after each sum
                                                                           pre-LN:  a norm before each branch

A `Place` is a spot in one host where an inlay can act. Its `kind` is
  attention, ffn           the branch's output h, after the branch's dropout
  attention.raw, ffn.raw   the same before that dropout
  q k v o, cross_q …       the projections of self- and cross-attention
  qkv                      the whole module where q, k and v are parts of one
  ffn_in, ffn_out          the projections of the feed-forward network
  linear                   every other linear map of the host
  bias, head_bias          every module that adds a bias, below the head and in it
  norm, head               modules that an inlay's own copy may stand in for
Names are relative to the layer, the layers to `host.base_model`, which every transformers model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from inlay.errors import AnatomyError


@dataclass(frozen=True)
class Branch:
    """One residual branch of a layer, h(r) + r."""

    output: str
    """Module whose output is h, after dropout where the dropout is a module."""
    residual: tuple[str, int]
    """(module, i): r is that module's i-th input."""
    norm: str = ""
    """Post-LN hosts: the norm of h + r. Empty in pre-LN hosts."""
    raw: str = ""
    """Module whose output is h before dropout. Empty: the same as `output`."""


@dataclass(frozen=True)
class Projection:
    """One linear map of a layer, or one part of a fused one."""

    path: str
    part: int = 0
    """Which of the fused parts this is."""
    parts: int = 1
    """How many equal parts the module's output is made of."""
    per_head: bool = False
    """The parts alternate head by head (GPT-NeoX) instead of following each other."""

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """(input, output) of this part of a module, a Linear or transformers' transposed Conv1D."""
        weight: Any = module.weight
        d_out, d_in = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
        return d_in, d_out // self.parts


Roles = dict[str, tuple[Projection, ...]]
"""Projections by their role: q, k, v, o, ffn_in …"""


@dataclass(frozen=True)
class Layers:
    """A stack of layers: where its list is, and what is where in each layer."""

    path: str
    attention: Branch
    ffn: Branch
    projections: Mapping[str, tuple[Projection, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One entry of the table: every stack of a model family by its name, 'encoder' or 'decoder'."""

    stacks: Mapping[str, Layers]
    not_norms: tuple[str, ...] = ()
    """Norms that do not act on the residual stream but on what all rows share, relative to the base model."""


@dataclass(frozen=True)
class Place:
    """A spot in one host, with dotted names from the host's root."""

    id: str
    kind: str
    module: str
    """The module whose output an inlay changes."""
    stack: str = ""
    layer: int = -1
    residual: tuple[str, int] | None = None
    norm: str | None = None
    projection: Projection | None = None
    heads: int = 1
    """Attention heads, where a fused projection alternates head by head."""

    @property
    def changes(self) -> bool:
        """Whether an inlay changes an output here; at norms and heads its own module stands in."""
        return self.kind not in ("norm", "head")


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
_BY_CONFIG = {"opt": _opt}
_SHARED_LAYERS = ("albert",)


def register_family(model_type: str, family: Family) -> None:
    """Tell Inlay where things are in models whose `config.model_type` is `model_type`."""
    FAMILIES[model_type] = family


def family_of(host: PreTrainedModel) -> Family:
    """The table's entry for this host, or what probing finds."""
    if host.config.model_type.endswith("encoder-decoder"):
        raise AnatomyError(
            f"{type(host).__name__} is two models in one. Set inlays into each of them: "
            f"inlay.add(host.encoder, …) and inlay.add(host.decoder, …)."
        )
    kind = host.config.get_text_config().model_type
    if kind in _SHARED_LAYERS:
        raise AnatomyError(
            f"{kind} runs one layer's weights several times, so an inlay could not tell its layers apart. "
            f"Hosts whose layers have their own weights work, such as bert or electra."
        )
    if kind in _BY_CONFIG:
        return _BY_CONFIG[kind](host.config)
    if kind not in FAMILIES:
        from inlay.probe import probe  # probing runs the host: only where the table has nothing

        return probe(host)
    return FAMILIES[kind]


class Anatomy:
    """Every place of one host, by id: `encoder.3.ffn`, `decoder.0.q`, `norm.<module>`, `head.<module>`."""

    family: str
    """The host's `model_type`."""
    width: int
    """D, the hidden size."""
    depth: dict[str, int]
    """Layers of each stack."""
    places: dict[str, Place]
    base: str
    """Dotted name of the base model; empty when the host is one."""
    embeddings: str
    """Dotted name of the token embeddings."""
    not_norms: tuple[str, ...]
    """Dotted names of the norms that act on what all rows of a batch share."""
    head: tuple[str, ...]
    """Dotted names of all that makes logits of hidden states; the last one gives the logits."""

    def __init__(self, host: PreTrainedModel) -> None:
        family = family_of(host)
        self.family = host.config.get_text_config().model_type
        self.width = host.config.get_text_config().hidden_size
        self.embeddings = name_of(host, host.get_input_embeddings())
        self.base = name_of(host, host.base_model)
        self.depth = {}
        self.places = {}
        for stack, layers in family.stacks.items():
            try:
                depth = len(host.base_model.get_submodule(layers.path))  # type: ignore[arg-type]
            except AttributeError:  # an encoder without its decoder, or the other way round
                continue
            self.depth[stack] = depth
            for index in range(depth):
                prefix = ".".join(filter(None, (self.base, layers.path, str(index))))
                for place in _layer_places(host, stack, index, prefix, layers):
                    self.places[place.id] = place
        if not self.depth:
            tried = ", ".join(layers.path for layers in family.stacks.values())
            inner = [n for n, m in host.named_modules() if isinstance(m, PreTrainedModel) and n not in ("", self.base)]
            hint = f" Models inside it may be hosts themselves: {', '.join(inner)}." if inner else ""
            raise AnatomyError(
                f"{type(host).__name__} has no layers at {tried} below {self.base or 'its root'!r}.{hint}"
            )
        self.head = head_modules(host, self.base)
        self.not_norms = tuple(".".join(filter(None, (self.base, name))) for name in family.not_norms)
        for path in norm_modules(host):
            name = path.removeprefix(f"{self.base}.")  # the same id, whichever head the base model carries
            if path not in self.not_norms and not inside(path, self.head):
                self.places[f"norm.{name}"] = Place(f"norm.{name}", "norm", path)
        for path in biased_modules(host, self.head):
            name = path.removeprefix(f"{self.base}.")
            in_head = inside(path, self.head)
            self.places[f"bias.{name}"] = Place(f"bias.{name}", "head_bias" if in_head else "bias", path)
        named = {place.module for place in self.places.values() if place.projection is not None}
        for path, module in host.named_modules():
            if isinstance(module, nn.Linear) and path not in named:
                name = path.removeprefix(f"{self.base}.")
                self.places[f"linear.{name}"] = Place(f"linear.{name}", "linear", path, projection=Projection(path))
        for path in self.head:
            place = Place(f"head.{path.rpartition('.')[2]}", "head", path)
            self.places[place.id] = place

    def of_kind(self, *kinds: str) -> Iterator[Place]:
        return (place for place in self.places.values() if place.kind in kinds)

    def at(self, kind: str, module: str) -> Place | None:
        """The place of that kind at a module."""
        return next((place for place in self.of_kind(kind) if place.module == module), None)

    def check_layers(self, names: Iterator[int | str] | tuple[int | str, ...]) -> None:
        """Refuse a layer that does not exist. 3 is layer 3 of every stack, 'decoder.3' that of one."""
        known = {str(i) for depth in self.depth.values() for i in range(depth)}
        known |= {f"{stack}.{i}" for stack, depth in self.depth.items() for i in range(depth)}
        unknown = [name for name in names if str(name) not in known and str(name) not in self.places]
        if unknown:
            have = ", ".join(f"{stack} 0 to {depth - 1}" for stack, depth in self.depth.items())
            raise AnatomyError(f"no such layer: {', '.join(map(repr, unknown))}. This host has {have}.")


def in_layers(place: Place, names: Mapping[str, Any] | tuple[int | str, ...]) -> str | None:
    """The name among `names` that means this place's layer, the most exact first."""
    known = {str(name) for name in names}
    mine = (place.id, place.id.removesuffix(".raw"), f"{place.stack}.{place.layer}", str(place.layer))
    return next((name for name in mine if name in known), None)


def _layer_places(host: PreTrainedModel, stack: str, index: int, prefix: str, layers: Layers) -> Iterator[Place]:
    def at(name: str) -> str:
        return f"{prefix}.{name}"

    for kind, branch in (("attention", layers.attention), ("ffn", layers.ffn)):
        for suffix, module in (("", branch.output), (".raw", branch.raw or branch.output)):
            yield Place(
                f"{stack}.{index}.{kind}{suffix}", kind + suffix, at(module), stack, index,
                residual=(at(branch.residual[0]), branch.residual[1]), norm=at(branch.norm) if branch.norm else None,
            )  # fmt: skip
    for role, projections in layers.projections.items():
        there = [p for p in projections if has_module(host, at(p.path))]
        for projection in there:
            name = role if len(there) == 1 else f"{role}.{projection.path.rpartition('.')[2]}"
            heads = host.config.num_attention_heads if projection.per_head else 1
            yield Place(
                f"{stack}.{index}.{name}", role, at(projection.path), stack, index, projection=projection, heads=heads
            )
    for path, role in _whole_modules(layers).items():
        yield Place(f"{stack}.{index}.{role}", role, at(path), stack, index, projection=Projection(path))


def _whole_modules(layers: Layers) -> dict[str, str]:
    """Each fused module by its path, with the roles of its parts in one word: 'qkv'."""
    fused: dict[str, str] = {}
    for role, projections in layers.projections.items():
        for projection in projections:
            if projection.parts > 1:
                fused[projection.path] = fused.get(projection.path, "") + role
    return fused


def has_module(host: nn.Module, path: str) -> bool:
    try:
        host.get_submodule(path)
    except AttributeError:
        return False
    return True


def name_of(host: nn.Module, wanted: nn.Module) -> str:
    """The dotted name of a module of the host; the root's is empty."""
    return next(name for name, module in host.named_modules() if module is wanted)


def norm_modules(host: nn.Module) -> list[str]:
    """Every norm with weights, by its class: LayerNorm, RMSNorm, T5LayerNorm, Qwen3RMSNorm …"""
    return [
        name for name, module in host.named_modules()
        if type(module).__name__.endswith("Norm") and any(True for _ in module.parameters(recurse=False))
    ]  # fmt: skip


def biased_modules(host: nn.Module, head: tuple[str, ...] = ()) -> list[str]:
    """Every module whose output has a bias added; in a host without any (T5, Llama), its linear maps and norms."""
    leaves = {name: m for name, m in host.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    biased = [name for name, module in leaves.items() if isinstance(getattr(module, "bias", None), nn.Parameter)]
    if any(not inside(name, head) for name in biased):
        return biased
    norms = set(norm_modules(host))
    return [name for name, module in leaves.items() if isinstance(module, nn.Linear) or name in norms]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these or below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def head_modules(host: PreTrainedModel, base: str) -> tuple[str, ...]:
    """All that stands between the last hidden states and the logits, in order; the last one makes the logits."""
    if base:
        pooler = [f"{base}.pooler"] if getattr(host.base_model, "pooler", None) is not None else []
        return (*pooler, *(n for n, m in host.named_children() if n != base and any(True for _ in m.parameters())))
    output = host.get_output_embeddings()
    if output is not None:
        return (name_of(host, output),)
    return tuple(name for name, _ in host.named_children() if name in ("qa_outputs", "classifier", "score"))
