"""Every place of one host, by its family's entry or by probing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy import families
from inlay.anatomy.modules import biased_modules, has_module, head_modules, inside, name_of, norm_modules
from inlay.anatomy.places import Family, Layers, Place, Projection
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
        raise AnatomyError(
            f"{kind} runs one layer's weights several times, so an inlay could not tell its layers apart. "
            f"Hosts whose layers have their own weights work, such as bert or electra."
        )
    if kind in families.BY_CONFIG:
        return families.BY_CONFIG[kind](host.config)
    if kind not in families.FAMILIES:
        from inlay.anatomy.probe import probe

        return probe(host)
    return families.FAMILIES[kind]


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
