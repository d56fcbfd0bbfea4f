"""Folders of `peft`: LoRA, with or without a head and trained biases.

    adapter_config.json         peft_type LORA, r, lora_alpha, target_modules, patterns …
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight (r, D_in), .lora_B.weight (D_out, r)
                                base_model.model.<module>.base_layer.bias, or <module>.bias where there is no LoRA
                                base_model.model.<head module>.<parameter>        of modules_to_save

Which modules have a LoRA is told by the keys, and checked against target_modules as peft reads them. `fan_in_fan_out`
is not believed: the host's module knows how its weight lies. A bias there is a value, here a difference to the host's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.checkpoints.fitting import misfit
from inlay.checkpoints.foreign.adapterhub.heads import unchanged
from inlay.checkpoints.foreign.files import (
    Tensors,
    check_size,
    only,
    options,
    read_object,
    read_tensors,
    reading,
    shown,
)
from inlay.checkpoints.foreign.keys import Spot, poured
from inlay.checkpoints.foreign.patterns import Patterns
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import Head
from inlay.host.registry import Inlay, Inlays, key_of
from inlay.host.verbs import free_name, newcomer
from inlay.methods import LoRA
from inlay.methods.lora import LowRankChange, part_rows

CONFIG, SAFE, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
ROOT = "base_model.model."
_NOT_HERE = "it has no counterpart in LoRA as Inlay has it"
_BIASES: dict[Literal["none", "lora_only", "all"], Bias] = {"none": "none", "lora_only": "targets", "all": "all"}
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
_LEAVES = {"lora_A.weight": "down.weight", "lora_B.weight": "up.weight"}
_NOTES = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "runtime_config", "megatron_core", "qalora_group_size", "eva_config", "lora_ga_config",
}  # fmt: skip
"""Fields that only say where it comes from or how training began."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Names = tuple[str, ...] | str | None
Bias = Literal["none", "targets", "all"]


def _absent(*neutral: Any) -> Any:
    return only(None, *neutral, why=_NOT_HERE)


class PeftOptions(Config):
    """LoraConfig of peft 0.21, every field of it but `_NOTES`, and those of its first versions."""

    # what Inlay follows
    peft_type: Annotated[str, only("LORA", why="of peft's methods Inlay reads LoRA")]
    r: int = Field(default=8, ge=1)
    lora_alpha: Positive = 8
    target_modules: Names = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    exclude_modules: Names = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: Names = None
    # what the host tells better
    fan_in_fan_out: bool = False
    init_lora_weights: Annotated[
        bool | str | None,
        only(True, False, None, "gaussian", "eva", "orthogonal", why="this start changes the host's own weights, too"),
    ] = True
    # what it must not say
    alora_invocation_tokens: Annotated[Any, _absent()] = None
    arrow_config: Annotated[Any, _absent()] = None
    corda_config: Annotated[Any, _absent()] = None
    enable_lora: Annotated[Any, _absent()] = None
    ensure_weight_tying: Annotated[Any, _absent(False)] = False
    kasa_config: Annotated[Any, _absent()] = None
    layer_replication: Annotated[Any, _absent()] = None
    loftq_config: Annotated[Any, _absent({})] = None
    lora_bias: Annotated[Any, _absent(False)] = False
    megatron_config: Annotated[Any, _absent()] = None
    merge_weights: Annotated[Any, _absent(False)] = False
    monteclora_config: Annotated[Any, _absent()] = None
    target_parameters: Annotated[Any, _absent([])] = None
    trainable_token_indices: Annotated[Any, _absent()] = None
    use_bdlora: Annotated[Any, _absent(False)] = None
    use_dora: Annotated[Any, only(False, None, why="DoRA rescales the host's weights")] = False
    use_qalora: Annotated[Any, _absent(False)] = False
    velora_config: Annotated[Any, _absent()] = None


def reader_of(folder: Path) -> Callable[[PreTrainedModel, Path, str | None, bool], str] | None:
    """What reads a folder of peft: its config says that it is one."""
    there = (folder / CONFIG).is_file() and not (folder / "adapter_setup.json").is_file()
    return load if there and "peft_type" in read_object(folder / CONFIG) else None


def load(host: PreTrainedModel, folder: Path, name: str | None, pickled: bool) -> str:
    """Set a LoRA into a host, under the name given or the folder's."""
    name = folder.resolve().name if name is None else name
    free_name(host, name)
    with newcomer(host) as inlays:
        inlays.admit(host, read(host, inlays.anatomy, folder, name, pickled))
    return name


def read(host: PreTrainedModel, anatomy: Anatomy, folder: Path, name: str, pickled: bool) -> Inlay:
    """The inlay of a folder, not yet on the host."""
    told = {key: value for key, value in read_object(folder / CONFIG).items() if key not in _NOTES}
    wanted = options(PeftOptions, told, folder / CONFIG)
    found = _without_copies(read_tensors(folder, SAFE, PICKLE, pickled), folder)
    places = whole_places(anatomy)
    modules = _lora_modules(found, places, folder)
    bias = _BIASES[wanted.bias] if _has_biases(wanted, modules, host, anatomy) else "none"
    with reading(folder):
        if problems := _check_targets(wanted, modules, places, anatomy.head):
            raise misfit(folder, problems)
        check_size(f"r = {wanted.r}", wanted.r, found)
        saved = _saved_modules(wanted, modules, host, anatomy)
        head = _head(host, anatomy, saved, found) if saved else None
        draft = Inlay(name, _method(wanted, modules, places, bias), head).fill(host, anatomy, "meta")
        found = _without_host_weights(found, host, saved)
        values = _differences(host, anatomy, found, modules, saved)
        inlay = poured(draft, _spots(draft, anatomy, host, saved), values, host, anatomy, folder)
        if hidden := _hidden(inlay, anatomy):
            _take_up(inlay, hidden, anatomy)
            rest = [path for path in modules if places[path] not in hidden]
            inlay.method = _method(wanted, rest, places, bias)
    return inlay


def whole_places(anatomy: Anatomy) -> dict[str, Place]:
    """Every projection that is a whole module, by that module."""
    return {p.module: p for p in anatomy.places.values() if p.projection is not None and p.projection.parts == 1}


def _without_copies(found: Tensors, folder: Path) -> Tensors:
    """With trained biases peft writes those of a saved head three times; what acts is the plain key."""
    kept: Tensors = {}
    for key, tensor in found.items():
        plain = re.sub(r"\.modules_to_save(\.default)?\.", ".", key)
        if ".original_module." in key and key.replace(".original_module.", ".") in found:
            continue
        if plain != key and plain in found and not torch.equal(found[plain], tensor):
            raise CheckpointError(f"{folder / SAFE}: {plain} and {key} should be the same.")
        kept[plain] = tensor
    return kept


def _without_host_weights(found: Tensors, host: PreTrainedModel, saved: Sequence[str]) -> Tensors:
    """Beside a LoRA of the output layer peft writes that layer's weight and the embeddings, which are the host's."""
    weights = {path: p.detach() for path, p in host.named_parameters(remove_duplicate=False) if path.endswith("weight")}

    def same(key: str, tensor: Tensor) -> bool:
        path = key.removeprefix(ROOT).replace(".base_layer.", ".")
        own = None if _inside(path, saved) else weights.get(path)
        return own is not None and own.shape == tensor.shape and torch.equal(own.cpu(), tensor.to(own.dtype))

    return {key: tensor for key, tensor in found.items() if not same(key, tensor)}


def _lora_modules(found: Tensors, places: Mapping[str, Place], folder: Path) -> list[str]:
    """The modules that have a LoRA, in the host's order."""
    named = {
        key.removeprefix(ROOT).removesuffix(f".{leaf}") for key in found for leaf in _LEAVES if key.endswith(f".{leaf}")
    }
    odd = [f"it changes {shown(path)}, which is no linear map of this host" for path in sorted(named - places.keys())]
    odd += [
        f"it changes the embeddings, which an inlay leaves alone: {shown(key)}"
        for key in sorted(found)
        if ".lora_embedding_" in key
    ]
    if odd:
        raise misfit(folder, odd)
    if not named:
        raise misfit(folder, ["it has no lora_A and lora_B"])
    return [path for path in places if path in named]


def _check_targets(
    wanted: PeftOptions, modules: Sequence[str], places: Iterable[str], head: Sequence[str]
) -> list[str]:
    """Where the keys and target_modules differ; whether `all-linear` means a head, too, depends on its task."""
    if wanted.target_modules is None:
        return []
    patterns = Patterns()
    meant = {path for path in places if _is_target(path, wanted, patterns)}
    unsure = {path for path in meant if _all_linear(wanted) and _inside(path, head)}
    return [
        *(f"{path} has a LoRA, but is not among the target_modules" for path in modules if path not in meant),
        *(
            f"{path} is among the target_modules, but its tensors are missing"
            for path in sorted(meant - unsure - set(modules))
        ),
    ]


def _all_linear(wanted: PeftOptions) -> bool:
    return isinstance(wanted.target_modules, str) and wanted.target_modules.lower() == "all-linear"


def _is_target(path: str, wanted: PeftOptions, patterns: Patterns) -> bool:
    """As peft decides it: a text is a pattern, a list has the ends of paths, and only a list knows of layers."""
    if _named(path, wanted.exclude_modules or (), patterns):
        return False
    if any(f".{name}." in f".{path}." for name in wanted.modules_to_save or ()):
        return False
    targets, layers = wanted.target_modules or (), wanted.layers_to_transform
    if _all_linear(wanted):
        return True
    if isinstance(targets, str) or path in targets or layers is None or layers == ():
        return _named(path, targets, patterns)
    number = _layer_of(path, wanted.layers_pattern, patterns)
    return _named(path, targets, patterns) and number in ((layers,) if isinstance(layers, int) else layers)


def _named(path: str, names: Sequence[str], patterns: Patterns) -> bool:
    if isinstance(names, str):
        return patterns.matches(names, path)
    return any(path == name or path.endswith(f".{name}") for name in names)


def _layer_of(path: str, lists: Names, patterns: Patterns) -> int | None:
    """The number of a module's layer: the first in its path, or the first after one of these lists of layers."""
    words = path.split(".")
    numbers = [at for at, word in enumerate(words[:-1]) if at and word.isdecimal()]
    for text in ([lists] if isinstance(lists, str) else lists) or [r"[^.]+\.[^.]*"]:
        for at in numbers:
            if patterns.matches(rf"(?:.*\.)?(?:{text})", ".".join(words[:at])):
                return int(words[at])
    return None


def _saved_modules(
    wanted: PeftOptions, modules: Iterable[str], host: PreTrainedModel, anatomy: Anatomy
) -> list[str]:  # fmt: skip
    """Which of the host's head modules it has its own copy of; peft lists names that need not exist."""
    paths = [path for path, _ in host.named_modules()]
    saved = [
        path for path in paths for name in wanted.modules_to_save or () if path == name or path.endswith(f".{name}")
    ]
    odd = [path for path in saved if path not in anatomy.head]
    if odd:
        raise ConfigError(
            f"modules_to_save: Inlay keeps own copies of a head's modules ({', '.join(anatomy.head)}), "
            f"not of {', '.join(odd)}"
        )
    hidden = [path for path in modules if _inside(path, saved)]
    if hidden:
        raise ConfigError(f"{', '.join(hidden)} has a LoRA, but lies in a module that modules_to_save replaces")
    return saved


def _head(host: PreTrainedModel, anatomy: Anatomy, saved: Sequence[str], found: Tensors) -> Head:
    """A copy of the host's head, with as many outputs as the file has."""
    last = anatomy.head[-1]
    linears = [(name, m) for name, m in host.get_submodule(last).named_modules() if isinstance(m, nn.Linear)]
    if last not in saved or not linears:
        return Head()
    name, linear = linears[-1]
    weight = found.get(ROOT + ".".join(filter(None, (last, name, "weight"))))
    return Head() if weight is None or weight.shape[0] == linear.out_features else Head(labels=weight.shape[0])


def _has_biases(wanted: PeftOptions, modules: Iterable[str], host: PreTrainedModel, anatomy: Anatomy) -> bool:
    """Whether there are biases to train at all: T5 and Llama have none."""
    paths = modules if wanted.bias == "lora_only" else [place.module for place in anatomy.of_kind("bias", "head_bias")]
    return any(_host_bias(host, path) is not None for path in paths)


def _host_bias(host: PreTrainedModel, module: str) -> Tensor | None:
    bias = getattr(host.get_submodule(module), "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def _method(wanted: PeftOptions, modules: Sequence[str], places: Mapping[str, Place], bias: Bias) -> LoRA:
    chosen, patterns = [places[path] for path in modules], Patterns()
    ranks = {places[path].id: _by_pattern(wanted.rank_pattern, path, wanted.r, patterns) for path in modules}
    alphas = {places[path].id: _by_pattern(wanted.alpha_pattern, path, wanted.lora_alpha, patterns) for path in modules}
    return LoRA(
        rank=wanted.r, alpha=wanted.lora_alpha, dropout=wanted.lora_dropout, rank_stabilised=wanted.use_rslora,
        targets=_targets(chosen, places.values()), bias=bias,
        ranks={place: rank for place, rank in ranks.items() if rank != wanted.r},
        alphas={place: alpha for place, alpha in alphas.items() if alpha != wanted.lora_alpha},
    )  # fmt: skip


def _targets(chosen: Sequence[Place], places: Iterable[Place]) -> tuple[str, ...]:
    """Roles where all places of a role are chosen, single places otherwise."""
    everybody: dict[str, set[str]] = {}
    for place in places:
        everybody.setdefault(place.kind, set()).add(place.id)
    ids = {place.id for place in chosen}
    return tuple(dict.fromkeys(place.kind if everybody[place.kind] <= ids else place.id for place in chosen))


def _by_pattern(rules: Mapping[str, Any] | None, path: str, usual: Any, patterns: Patterns) -> Any:
    """The first pattern that is the path or its end, as peft looks it up."""
    found = (value for text, value in (rules or {}).items() if patterns.matches(rf"(.*\.)?({text})", path))
    return next(found, usual)


def _spots(inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel, saved: Sequence[str]) -> dict[str, Spot]:
    """A bias that the host has not stays zero here and has no key there."""
    places = [anatomy.places[i] for i in inlay.place_ids()]
    wrapped = {place.module for place in places if place.projection is not None}
    found: dict[str, Spot] = {}
    for place in places:
        if place.kind == "head":
            leaves = inlay.parts[key_of(place.id)].state_dict() if place.module in saved else {}
            found |= {f"{place.id}.{leaf}": Spot(f"{ROOT}{place.module}.{leaf}") for leaf in leaves}
        elif place.projection is None:
            if _host_bias(host, place.module) is not None and not _inside(place.module, saved):
                found[f"{place.id}.bias"] = Spot(_bias_key(place.module, wrapped))
        else:
            found |= {f"{place.id}.{ours}": Spot(f"{ROOT}{place.module}.{theirs}") for theirs, ours in _LEAVES.items()}
    return found


def _bias_key(module: str, wrapped: Iterable[str]) -> str:
    return f"{ROOT}{module}.base_layer.bias" if module in wrapped else f"{ROOT}{module}.bias"


def _inside(module: str, saved: Iterable[str]) -> bool:
    return any(module == path or module.startswith(f"{path}.") for path in saved)


def _differences(
    host: PreTrainedModel, anatomy: Anatomy, found: Tensors, modules: Sequence[str], saved: Sequence[str]
) -> Tensors:
    """Trained biases as differences to the host's."""
    changed = dict(found)
    for place in anatomy.of_kind("bias", "head_bias"):
        key, bias = _bias_key(place.module, modules), _host_bias(host, place.module)
        fits = key in found and bias is not None and bias.shape == found[key].shape
        if fits and not _inside(place.module, saved):
            changed[key] = found[key].to(bias) - bias
    return changed


def _hidden(inlay: Inlay, anatomy: Anatomy) -> list[Place]:
    """Places inside a module that an own head stands in for, where nothing of the host acts."""
    if inlay.head is None:
        return []
    places = map(anatomy.places.__getitem__, inlay.place_ids())
    return [p for p in places if p.changes and p.module not in anatomy.head and _inside(p.module, anatomy.head)]


def _take_up(inlay: Inlay, hidden: Sequence[Place], anatomy: Anatomy) -> None:
    """peft saves single modules of a head, and here all are copied: a copy takes up what changes the others."""
    for place in hidden:
        above = next(p for p in anatomy.of_kind("head") if _inside(place.module, [p.module]))
        copy = inlay.parts[key_of(above.id)].get_submodule(place.module.removeprefix(f"{above.module}."))
        part = inlay.parts[key_of(place.id)]
        with torch.no_grad():
            if isinstance(part, LowRankChange):
                copy.weight += part.weight()
                del inlay.parts[key_of(place.id)]
            elif copy.bias is not None:
                copy.bias += part.bias
                part.bias.zero_()


# writing


def write(host: PreTrainedModel, inlays: Inlays, inlay: Inlay) -> dict[str, Any]:
    """The files of a LoRA inlay in their format, by name."""
    method, anatomy = inlay.method, inlays.anatomy
    if not isinstance(method, LoRA):
        raise ConfigError(f"peft has no counterpart of the method {method.kind!r}; of Inlay's methods it knows LoRA")
    if inlay.norms:
        raise ConfigError("it owns layer norms, which a LoRA of peft does not have")
    if inlay.head is not None and inlay.head.pooling is not None:
        raise ConfigError("it has a pooling head, which the host does not have; peft saves only modules of the host")
    changes = _changes(inlay, anatomy, host)
    saved = [
        p.module
        for p in anatomy.of_kind("head")
        if inlay.part(p) is not None and (_is_output(p, anatomy) or not unchanged(inlay, host, p))
    ]
    copied = {*saved, *(place.module for place in _hidden(inlay, anatomy))}
    hidden = [path for path in changes if _inside(path, copied)]
    if hidden:
        raise ConfigError(f"it changes {', '.join(hidden)} and has its own copy of it; peft can only do one of both")
    tensors = {key: tensor for path, change in changes.items() for key, tensor in change.tensors(path).items()}
    tensors |= _biases(inlay, anatomy, host, changes, saved)
    for place in anatomy.of_kind("head"):
        if place.module in saved:
            tensors |= {
                f"{ROOT}{place.module}.{leaf}": tensor
                for leaf, tensor in inlay.parts[key_of(place.id)].state_dict().items()
            }
    ranks = {path: change.rank for path, change in changes.items()}
    alphas = {path: change.alpha(method.rank_stabilised) for path, change in changes.items()}
    rank, alpha = _usual(ranks.values()), _usual(alphas.values())
    config = PeftOptions(
        peft_type="LORA", r=rank, lora_alpha=alpha, lora_dropout=method.dropout,
        use_rslora=method.rank_stabilised,
        bias=next(theirs for theirs, ours in _BIASES.items() if ours == method.bias),
        target_modules=_short(changes, host),
        modules_to_save=tuple(path.rpartition(".")[2] for path in saved) or None,
        rank_pattern={path: there for path, there in ranks.items() if there != rank},
        alpha_pattern={path: there for path, there in alphas.items() if there != alpha},
        fan_in_fan_out=all(isinstance(host.get_submodule(path), Conv1D) for path in changes),
    )  # fmt: skip
    said = config.model_dump(mode="json", exclude_defaults=True) | {
        "r": config.r,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "bias": config.bias,
        "inference_mode": True,
        "base_model_name_or_path": str(getattr(host.config, "name_or_path", "") or "") or None,
        "task_type": next((task for end, task in _TASKS.items() if type(host).__name__.endswith(end)), None),
    }
    return {CONFIG: said, SAFE: {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}}


def _usual(values: Collection[Any]) -> Any:
    """The most frequent: many servers of peft's files know one rank and one alpha only."""
    return Counter(values).most_common(1)[0][0]


def _is_output(place: Place, anatomy: Anatomy) -> bool:
    return place.module == anatomy.head[-1]


class Change:
    """What is added to one module: one LoRA, or those of its parts put together."""

    def __init__(self, parts: Sequence[tuple[Tensor, LowRankChange]], rows: int) -> None:
        """`parts`: the output rows of each part, and its change."""
        self.scale = parts[0][1].scale
        self.down = torch.cat([change.down.weight.detach() for _, change in parts])  # (Σr, D_in)
        self.rank = self.down.shape[0]
        self.up = self.down.new_zeros(rows, self.rank)  # (D_out, Σr), zero where a part does not reach
        at = 0
        for mine, change in parts:
            rank = change.up.weight.shape[1]
            factor = change.scale / self.scale
            up = change.up.weight.detach()
            self.up[mine, at : at + rank] = up if factor == 1 else up * factor
            at += rank

    def alpha(self, rank_stabilised: bool) -> float:
        """The alpha that gives this scale at this rank."""
        alpha = self.scale * (math.sqrt(self.rank) if rank_stabilised else self.rank)
        return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha

    def tensors(self, path: str) -> Tensors:
        return {f"{ROOT}{path}.lora_A.weight": self.down, f"{ROOT}{path}.lora_B.weight": self.up}


def _changes(inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel) -> dict[str, Change]:
    """One change per module, in the host's order."""
    parts: dict[str, list[tuple[Tensor, LowRankChange]]] = {}
    rows: dict[str, int] = {}
    for place in map(anatomy.places.__getitem__, inlay.place_ids()):
        if place.projection is not None:
            change = inlay.parts[key_of(place.id)]
            assert isinstance(change, LowRankChange)
            rows[place.module] = place.projection.sizes(host.get_submodule(place.module))[1] * place.projection.parts
            mine = part_rows(place, rows[place.module]).to(change.up.weight.device)
            parts.setdefault(place.module, []).append((mine, change))
    return {path: Change(found, rows[path]) for path, found in parts.items()}


def _biases(
    inlay: Inlay, anatomy: Anatomy, host: PreTrainedModel, changed: Iterable[str], saved: Sequence[str]
) -> Tensors:
    """The host's biases plus our differences."""
    found: Tensors = {}
    for place in map(anatomy.places.__getitem__, inlay.place_ids()):
        if place.kind in ("bias", "head_bias") and not _inside(place.module, saved):
            bias, change = _host_bias(host, place.module), inlay.tensors()[f"{place.id}.bias"]
            if bias is not None:
                found[_bias_key(place.module, changed)] = bias + change
            elif change.any():
                raise ConfigError(
                    f"it gives {place.module} a bias, which the host has not; peft trains only biases that are there"
                )
    return found


def _short(changed: Iterable[str], host: PreTrainedModel) -> tuple[str, ...]:
    """Names of modules: their last words where all modules of that name are changed, whole paths otherwise."""
    changed = list(changed)
    linears = [path for path, module in host.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    named: list[str] = []
    for path in changed:
        end = path.rpartition(".")[2]
        alike = [other for other in linears if other == end or other.endswith(f".{end}")]
        named.append(end if set(alike) <= set(changed) else path)
    return tuple(dict.fromkeys(named))


def read_back(host: PreTrainedModel, inlays: Inlays, inlay: Inlay, folder: Path) -> Inlay:
    """What a written folder gives when it is read, not yet on the host."""
    return read(host, inlays.anatomy, folder, inlay.name, False)
