"""Every place of one host, by its family's entry or by probing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy import families
from inlay.anatomy.modules import (
    biased_modules,
    has_module,
    head_modules,
    inside,
    last_word,
    name_of,
    norm_modules,
    takes_keys,
)
from inlay.anatomy.places import Branch, BranchEnd, Family, Layers, Place, Projection
from inlay.anatomy.probe import probe, shared_layers
from inlay.errors import AnatomyError


def family_of(host: PreTrainedModel) -> Family:
    """The table's entry for this host, or what probing finds."""
    if host.config.model_type.endswith("encoder-decoder"):
        raise AnatomyError(
            f"{type(host).__name__} is two models in one. Set inlays into each of them: "
            f"inlay.add(host.encoder, …) and inlay.add(host.decoder, …)."
        )
    kind = host.config.get_text_config().model_type
    if kind in families.SHARED_LAYERS:
        raise shared_layers(kind)
    if kind in families.BY_CONFIG:
        return families.BY_CONFIG[kind](host.config)
    return families.FAMILIES[kind] if kind in families.FAMILIES else probe(host)


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

    branches: dict[str, BranchEnd]
    """Where each branch ends, by its id: `encoder.3.ffn`."""
    no_branches: str
    """Why no method can act at the branches of this host; empty where they can."""

    no_keys: str
    """Why the attention of this host takes no keys and values in front; empty where it does."""
    positions: int | None
    """How many tokens the host can tell apart, if there is a limit."""
    layers: list[str]
    """Dotted names of all layers."""
    stacks: dict[str, str]
    """Dotted name of the module that runs each stack's layers."""
    begins: str
    """Dotted name of the module that is given the tokens of every batch."""
    told_positions: bool
    """Whether that module can be told where its tokens stand."""

    def __init__(self, host: PreTrainedModel) -> None:
        family = family_of(host)
        config = host.config.get_text_config()
        self.family, self.width = config.model_type, config.hidden_size
        self.no_branches = family.no_branches
        self.embeddings = name_of(host, host.get_input_embeddings())
        self.base = name_of(host, host.base_model)
        self.head = head_modules(host, self.base)
        self.not_norms = tuple(".".join(filter(None, (self.base, name))) for name in family.not_norms)
        limit = getattr(config, "max_position_embeddings", None)
        self.positions = limit if limit is not None and limit > 0 else None  # XLNet says -1
        self.depth, self.places, self.branches, self.stacks, self.layers = {}, {}, {}, {}, []
        self._add_layers(host, family)
        self.begins, self.told_positions = self._beginning(host)
        self._add_tokens(host)
        self._add_weights(host)
        self.no_keys = self._why_no_keys(host)
        self._add_norms(host)
        self._add_biases(host)
        self._add_linears(host)
        for path in self.head:
            self._add(Place(f"head.{last_word(path)}", "head", path))

    def _add(self, place: Place) -> None:
        self.places[place.id] = place

    def _inner(self, path: str) -> str:
        """A module's name below the base model: the same, whichever head the base model carries."""
        return path.removeprefix(f"{self.base}.")

    def _add_layers(self, host: PreTrainedModel, family: Family) -> None:
        for stack, layers in family.stacks.items():
            try:
                depth = len(host.base_model.get_submodule(layers.path))  # type: ignore[arg-type]
            except AttributeError:  # an encoder without its decoder, or the other way round
                continue
            self.depth[stack] = depth
            self.stacks[stack] = ".".join(filter(None, (self.base, layers.path.rpartition(".")[0])))
            for index in range(depth):
                prefix = ".".join(filter(None, (self.base, layers.path, str(index))))
                self.layers.append(prefix)
                self.branches |= _branch_ends(host, f"{stack}.{index}", prefix, layers)
                for place in _layer_places(host, stack, index, prefix, layers):
                    self._add(self._with_branch(place))
        if not self.depth:
            tried = ", ".join(layers.path for layers in family.stacks.values())
            inner = [n for n, m in host.named_modules() if isinstance(m, PreTrainedModel) and n not in ("", self.base)]
            hint = f" Models inside it may be hosts themselves: {', '.join(inner)}." if inner else ""
            raise AnatomyError(
                f"{type(host).__name__} has no layers at {tried} below {self.base or 'its root'!r}.{hint}"
            )

    def _beginning(self, host: PreTrainedModel) -> tuple[str, bool]:
        """The base model; of a decoder alone what it holds, which some hosts call past it (OPT that writes)."""
        begins = self.stacks["decoder"] if self.causal else self.base
        names = inspect.signature(host.get_submodule(begins).forward).parameters
        if "input_ids" not in names:  # it is given hidden states
            begins, names = self.base, inspect.signature(host.base_model.forward).parameters
        return begins, "position_ids" in names

    def _add_tokens(self, host: PreTrainedModel) -> None:
        embeddings: Any = host.get_submodule(self.embeddings)
        width = embeddings.weight.shape[1]
        self._add(Place("tokens", "tokens", self.embeddings, d_in=width, d_out=width, acts="tokens"))

    def _add_weights(self, host: PreTrainedModel) -> None:
        named = host.base_model.named_parameters()  # one name for what is tied
        shapes = tuple((name, tuple(p.shape)) for name, p in named if p.is_floating_point())
        total = sum(math.prod(shape) for _, shape in shapes)
        self._add(Place("weights", "weights", self.base, d_in=total, d_out=total, shapes=shapes, acts="weights"))

    def _why_no_keys(self, host: PreTrainedModel) -> str:
        attentions = {p.module: host.get_submodule(p.module) for p in self.of_kind(*ATTENTIONS)}
        if not attentions:
            return f"the attention of {type(host).__name__} is not known, so nothing can be put in front of its keys."
        for path, module in attentions.items():
            if not takes_keys(module):
                return (
                    f"{path} ({type(module).__name__}) does not attend through transformers' attention interface, so "
                    f"nothing can be put in front of its keys. Hosts such as bert, roberta, t5 or llama can take it; "
                    f"T5 from transformers 5.16 on."
                )
        return ""

    @property
    def causal(self) -> bool:
        """Whether the host is a decoder alone."""
        return set(self.depth) == {"decoder"}

    def attention_places(self, *kinds: str) -> list[Place]:
        """Places where keys and values can be put in front; AnatomyError where this host's attention takes none."""
        if self.no_keys:
            raise AnatomyError(self.no_keys)
        return list(self.of_kind(*kinds))

    def _add_norms(self, host: PreTrainedModel) -> None:
        for path in norm_modules(host):
            if path not in self.not_norms and not inside(path, self.head):
                self._add(self._with_branch(Place(f"norm.{self._inner(path)}", "norm", path)))

    def _add_biases(self, host: PreTrainedModel) -> None:
        for path in biased_modules(host, self.head):
            module: Any = host.get_submodule(path)
            own = module.bias if getattr(module, "bias", None) is not None else module.weight
            width = getattr(module, "out_features", own.shape[0])
            self._add(self._with_branch(Place(
                f"bias.{self._inner(path)}", "head_bias" if inside(path, self.head) else "bias", path,
                d_in=width, d_out=width, trailing=len(getattr(module, "kernel_size", ())),
            )))  # fmt: skip

    def _add_linears(self, host: PreTrainedModel) -> None:
        """Every linear map that has no role in a layer."""
        named = {place.module for place in self.places.values() if place.projection is not None}
        for path, module in host.named_modules():
            if isinstance(module, nn.Linear) and path not in named:
                whole = Projection(path)
                d_in, d_out = whole.sizes(module)
                self._add(
                    Place(f"linear.{self._inner(path)}", "linear", path, projection=whole, d_in=d_in, d_out=d_out)
                )

    def _with_branch(self, place: Place) -> Place:
        """A place with the branch whose output its module gives, if there is one."""
        if place.acts != "output" or (place.projection is not None and place.projection.parts > 1):
            return place
        found = next((name for name, end in self.branches.items() if place.module in end.modules), "")
        return replace(place, branch=found)

    def of_kind(self, *kinds: str) -> Iterator[Place]:
        return (place for place in self.places.values() if place.kind in kinds)

    def branch_places(self, *kinds: str) -> list[Place]:
        """Places at branches; AnatomyError where this host's branches are not known."""
        if self.no_branches:
            raise AnatomyError(self.no_branches)
        return list(self.of_kind(*kinds))

    def layers_without(self, places: Iterable[Place]) -> tuple[str, ...]:
        """The layers in which none of these places is: 'encoder.0', 'decoder.3' …"""
        there = {f"{place.stack}.{place.layer}" for place in places}
        layers = [f"{stack}.{i}" for stack, depth in self.depth.items() for i in range(depth)]
        return tuple(layer for layer in layers if layer not in there)

    def check_layers(self, names: Iterator[int | str] | tuple[int | str, ...]) -> None:
        """Refuse a layer that does not exist. 3 is layer 3 of every stack, 'decoder.3' that of one."""
        known = {str(i) for depth in self.depth.values() for i in range(depth)}
        known |= {f"{stack}.{i}" for stack, depth in self.depth.items() for i in range(depth)}
        unknown = [name for name in names if str(name) not in known and str(name) not in self.places]
        if unknown:
            have = ", ".join(f"{stack} 0 to {depth - 1}" for stack, depth in self.depth.items())
            raise AnatomyError(f"no such layer: {', '.join(map(repr, unknown))}. This host has {have}.")


INPUTS = ("o", "cross_o", "ffn_out")
"""The projections whose input an inlay can change."""
ATTENTIONS = {"self_attention": "k", "cross_attention": "cross_k"}
"""The kinds of attention, and the projection that makes its keys."""
LAST_PROJECTION = {"attention": "o", "ffn": "ffn_out"}
"""The projection that a branch ends in."""


def _known_branches(layers: Layers) -> list[tuple[str, Branch]]:
    both = (("attention", layers.attention), ("ffn", layers.ffn))
    return [(kind, branch) for kind, branch in both if branch is not None]


def _branch_ends(host: PreTrainedModel, layer: str, prefix: str, layers: Layers) -> dict[str, BranchEnd]:
    """The modules at the end of both branches of a layer, each once, in the order in which they run."""
    found = {}
    for kind, branch in _known_branches(layers):
        last = layers.projections.get(LAST_PROJECTION[kind], ())
        there = [p.path for p in last if p.parts == 1 and has_module(host, f"{prefix}.{p.path}")]
        names = [*(there if len(there) == 1 else []), branch.raw or branch.output, branch.output]
        modules = tuple(dict.fromkeys(f"{prefix}.{name}" for name in names))
        norms = frozenset(m for m in modules if type(host.get_submodule(m)).__name__.endswith("Norm"))
        found[f"{layer}.{kind}"] = BranchEnd(modules, (f"{prefix}.{branch.residual[0]}", branch.residual[1]), norms)
    return found


def _layer_places(host: PreTrainedModel, stack: str, index: int, prefix: str, layers: Layers) -> Iterator[Place]:
    config = host.config.get_text_config()
    width = config.hidden_size

    def at(name: str) -> str:
        return f"{prefix}.{name}"

    def projected(name: str, role: str, projection: Projection) -> Place:
        d_in, d_out = projection.sizes(host.get_submodule(at(projection.path)))
        heads = config.num_attention_heads if projection.per_head else 1
        return Place(
            f"{stack}.{index}.{name}", role, at(projection.path), stack, index, projection=projection, heads=heads,
            d_in=d_in, d_out=d_out,
        )  # fmt: skip

    for kind, branch in _known_branches(layers):
        for suffix, module in (("", branch.output), (".raw", branch.raw or branch.output)):
            yield Place(
                f"{stack}.{index}.{kind}{suffix}", kind + suffix, at(module), stack, index,
                residual=(at(branch.residual[0]), branch.residual[1]), norm=at(branch.norm) if branch.norm else None,
                d_in=width, d_out=width,
            )  # fmt: skip
    for role, projections in layers.projections.items():
        there = [p for p in projections if has_module(host, at(p.path))]
        for projection in there:
            yield projected(role if len(there) == 1 else f"{role}.{last_word(projection.path)}", role, projection)
        if role in INPUTS and len(there) == 1:
            place = projected(f"{role}.input", f"{role}.input", there[0])
            yield replace(place, projection=None, d_out=place.d_in, acts="input")
    for path, role in _whole_modules(layers).items():
        yield projected(role, role, Projection(path))
    for kind, role in ATTENTIONS.items():
        yield from _attention_places(host, kind, stack, index, prefix, layers.projections.get(role, ()))


def _attention_places(
    host: PreTrainedModel, kind: str, stack: str, index: int, prefix: str, keys: tuple[Projection, ...]
) -> Iterator[Place]:  # fmt: skip
    """The attention module is the one that holds the projection to keys."""
    for projection in keys:
        if has_module(host, f"{prefix}.{projection.path}"):
            module = f"{prefix}.{projection.path.rpartition('.')[0]}"
            d_in, d_out = projection.sizes(host.get_submodule(f"{prefix}.{projection.path}"))
            yield Place(f"{stack}.{index}.{kind}", kind, module, stack, index, d_in=d_in, d_out=d_out, acts="keys")


def _whole_modules(layers: Layers) -> dict[str, str]:
    """Each fused module by its path, with the roles of its parts in one word: 'qkv'."""
    fused: dict[str, str] = {}
    for role, projections in layers.projections.items():
        for projection in projections:
            if projection.parts > 1:
                fused[projection.path] = fused.get(projection.path, "") + role
    return fused
