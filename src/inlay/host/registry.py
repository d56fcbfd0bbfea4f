"""What lives in the host's module tree: the inlays, the sites they act at, and the setup that is active.

host ── inlays (Inlays) ─┬─ all        name → Inlay ── parts   place → module
                         │                          └─ shared  what its modules have in common
                         ├─ sites      host module → Site
                         ├─ branches   branch → BranchInput
                         ├─ acting     what acts, in each thread
                         └─ entry      Entry
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from inlay.anatomy.modules import inside
from inlay.anatomy.places import Acts, Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import NamingError, SetupError, nearest
from inlay.host.entry import Entry
from inlay.host.front_sites import KeySite, TokenSite
from inlay.host.heads import Head, bare_copy, build_head
from inlay.host.keys import check_attention, name_attention
from inlay.host.labels import Labels
from inlay.host.offload import computes_on, in_pieces, offloaded, present, quantised
from inlay.host.plan import Active, Plan
from inlay.host.resolve import Resolver, layer_of, member_part
from inlay.host.setup import Setup, check_setup, names_in
from inlay.host.sites import BranchInput, HeadSite, Hooked, InputSite, LayerInput, Site, check_sites, is_hooked
from inlay.host.weight_sites import WeightSite
from inlay.methods.acting import Draw, Reads
from inlay.methods.base import Method, fusion_can_read

_TAKEN = frozenset(dir(nn.ModuleDict()))
"""No module in a ModuleDict can have the name of one of its attributes; `training` is one of an instance only."""


def key_of(name: str) -> str:
    """A name as a key of a ModuleDict, which cannot have dots or be the name of one of its attributes."""
    key = name.replace(".", ":")
    return f"{key}:" if key in _TAKEN else key


def site_key(path: str, acts: Acts = "output") -> str:
    """A host module's path as a key of a ModuleDict."""
    return f"{'at' if acts == 'output' else acts}:{path.replace('.', ':')}"


def id_of(key: str) -> str:
    """The id of the place that a key stands for."""
    return key.replace(":", ".")


class Inlay(nn.Module):
    """A named set of small parameters for one host.

    It is made out of torch.inference_mode, wherever that is on: what is made within it can never train.
    """

    @torch.inference_mode(False)
    def __init__(self, name: str, method: Method, head: Head | None = None, norms: bool = False) -> None:
        super().__init__()
        if head is not None and not isinstance(head, Head):
            raise SetupError(f"a head is an object such as inlay.Head(labels=3), got {head!r}")
        self.name = name
        self.method = method
        self.head = head
        self.norms = norms
        self.shared = method.make_shared()
        self.parts = nn.ModuleDict()
        self.origin: tuple[str, str] | None = None
        """If it was loaded: the fingerprints of its file and of what it was on this host just then."""
        self.draw = Draw()
        """What it leaves to chance in a training step."""

    @torch.inference_mode(False)
    def fill(self, host: PreTrainedModel, anatomy: Anatomy, device: str | None = None) -> Inlay:
        """Build every module in the dtype of its place, on that place's device or on the one given.

        What modules share is where the first of them is: on hosts spread over devices the others fetch it.
        """
        settled: set[nn.Module] = set()
        for place in self.method.places(anatomy):
            if place.acts == "weights":
                _check_changeable(host, self.method.kind)
            like, own = _parameter_near(host, place.module), host.get_submodule(place.module)
            if _is_shared_out(host, place):
                raise SetupError(
                    f"{place.id} is split among processes (tensor parallelism): each has a part of its numbers, of "
                    f"which {self.method.kind} knows nothing. Bottlenecks, Compacter, PALs and prompts act where all "
                    f"have the whole; for {self.method.kind}, open the host without a tp_plan."
                )
            at = device or computes_on(host, like)
            with torch.device(at):
                part = self.method.build(place, self.shared)
            self.parts[key_of(place.id)] = part.to(like.dtype)
            for module in [module for module in self.shared.modules() if module not in settled]:
                module.to(at, like.dtype)
                settled.add(module)
            with present(own):
                self.method.start(part, own)
        if self.norms:
            for place in anatomy.of_kind("norm"):
                self.parts[key_of(place.id)] = bare_copy(host.get_submodule(place.module))
        if self.head is not None:
            like = _parameter_near(host, anatomy.head[-1] if anatomy.head else "")
            at = device or computes_on(host, like)
            with torch.device(at):
                modules = build_head(host, anatomy, self.head)
            for place_id, part in modules.items():
                self.parts[key_of(place_id)] = part.to(at, like.dtype)
        self.take_method(self.method)
        return self

    def start_like(self, other: Inlay, places: Iterable[Place]) -> None:
        """Take over another inlay's own modules at these places, where both have one."""
        for place in places:
            mine, theirs = self.part(place), other.part(place)
            if mine is not None and theirs is not None:
                mine.load_state_dict(theirs.state_dict())

    def drop_head(self) -> None:
        """Go on without the own head."""
        self.head = None
        for key in [key for key in self.parts if key.startswith("head:")]:
            del self.parts[key]

    def check_head(self, anatomy: Anatomy) -> None:
        """Refuse what would change the host's head while an own one stands in for it."""
        places = [anatomy.places[i] for i in self.place_ids()]
        lost = [place.id for place in places if place.changes and inside(place.module, anatomy.head)]
        if self.head is not None and lost:
            raise SetupError(
                f"{', '.join(lost)} would change the host's head, but this inlay has a head of its own. "
                f"Leave these places out, or the head."
            )

    def part(self, place: Place) -> nn.Module | None:
        return self.parts._modules.get(key_of(place.id))

    def place_ids(self) -> list[str]:
        return [id_of(key) for key in self.parts]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved: tensors by `<place>.<parameter>` and `shared.<parameter>`."""
        found = {f"shared.{k}": v for k, v in self.shared.state_dict().items()}
        for key, part in self.parts.items():
            found |= {f"{id_of(key)}.{k}": v for k, v in part.state_dict().items()}
        return found

    def take_method(self, method: Method) -> None:
        """Go on as an inlay of another method, whose modules it has already."""
        self.method = method
        self.draw = method.make_draw(self.parts)


def _is_shared_out(host: PreTrainedModel, place: Place) -> bool:
    """Whether each process of a tensor-parallel host sees a part of what an inlay would change or copy there."""
    if (getattr(host, "_tp_size", None) or 1) == 1:
        return False
    branch = place.acts == "output" and place.kind.removesuffix(".raw") in ("attention", "ffn")
    whole = branch or place.acts == "tokens"
    return not whole and any(map(in_pieces, host.get_submodule(place.module).parameters()))


def _check_changeable(host: PreTrainedModel, kind: str) -> None:
    """Refuse a host whose weights cannot be changed."""
    if offloaded(host):
        raise SetupError(
            f"{kind} changes the host's weights, and those of this host are elsewhere until it runs. Load it without "
            f"offloading."
        )
    if odd := [name for name, weight in host.base_model.named_parameters() if quantised(weight)]:
        raise SetupError(
            f"{kind} changes the host's weights, and those of this host are quantised: {', '.join(odd[:4])}. Load it "
            f"without quantisation."
        )


def _layer_read(inlay: Inlay, place: Place) -> str:
    """The layer whose input an inlay's module at a place reads; empty if it reads something else."""
    ends = place.kind in ("ffn", "ffn.raw") and place.changes
    return layer_of(place) if ends and inlay.method.reads_at(place) == "layer" else ""


def _parameter_near(host: nn.Module, path: str) -> nn.Parameter:
    """A floating-point parameter at or above a module, for its device and dtype."""
    while True:
        for parameter in host.get_submodule(path).parameters():
            if parameter.is_floating_point():
                return parameter
        if not path:
            raise SetupError("the host has no floating-point parameters")
        path = path.rpartition(".")[0]


@dataclass(frozen=True)
class Folded:
    """A LoRA inlay that is part of the host's weights, and what these were before."""

    name: str
    weights: dict[str, torch.Tensor]

    def refuse(self) -> NoReturn:
        raise SetupError(f"{self.name!r} is folded into the host's weights. inlay.unfold(host) first.")


class OwnConfigs:
    """Gives a host copies of its configs, because hosts that were made from one config object share it.

    What is written there for this host, the labels of an active head or the name of our attention, would make another
    host compute something else.
    """

    def __init__(self, host: nn.Module) -> None:
        memo: dict[int, Any] = {}  # one: a config and the configs inside it stay together
        self.swapped = [
            (module, name, config, copy.deepcopy(config, memo))
            for module in host.modules()
            for name, config in vars(module).items()
            if isinstance(config, PreTrainedConfig)
        ]
        for module, name, _, own in self.swapped:
            setattr(module, name, own)

    def put_back(self) -> None:
        """The configs that the host came with; unless somebody has changed the host's own, or given it others."""
        same = lambda own, theirs: vars(own) == vars(theirs)  # their own == leaves out how they attend
        if all(getattr(module, name) is own and same(own, theirs) for module, name, theirs, own in self.swapped):
            for module, name, theirs, _ in self.swapped:
                setattr(module, name, theirs)


class Inlays(nn.Module):
    """All inlays of one host."""

    def __init__(self, host: PreTrainedModel) -> None:
        super().__init__()
        if is_hooked(host):
            raise SetupError(
                f"this {type(host).__name__} already has inlays, but on a model inside it or around it, as host and "
                f"host.base_model are. Go on with that one, or inlay.strip it first."
            )
        self.anatomy = Anatomy(host)
        self.trainable_before = frozenset(name for name, p in host.named_parameters() if p.requires_grad)
        self.all = nn.ModuleDict()
        self.sites = nn.ModuleDict()
        self.branches = nn.ModuleDict()
        self.acting = Active()
        self.entry = Entry(host, self.anatomy, self.acting, self.branches, self.sites)
        self.folded: Folded | None = None
        self.configs = OwnConfigs(host)
        self.labels = Labels(host)

    def unhook(self) -> None:
        """Leave the host to itself: hooks off, its configs back."""
        for hooked in (*self.sites.values(), *self.branches.values(), self.entry):
            hooked.unhook()  # type: ignore[operator]
        self.labels.put_back()
        self.configs.put_back()

    # names

    def __contains__(self, name: str) -> bool:
        return key_of(name) in self.all

    def __getitem__(self, name: str) -> Inlay:
        inlay = self.all._modules.get(key_of(name))
        if inlay is None:
            raise NamingError(f"no inlay named {name!r} on this host.{nearest(name, self.names())}")
        return inlay  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Inlay]:
        return iter(self.all.values())  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return [inlay.name for inlay in self]

    # coming and going

    def admit(self, host: PreTrainedModel, inlay: Inlay) -> None:
        """Take in a filled inlay, which learns nothing until `train` says so, and hook the modules that are new."""
        inlay.train(host.training).requires_grad_(False)
        inlay.method.watch(inlay, self.entry.real)
        self.all[key_of(inlay.name)] = inlay
        for place in self.places_of(inlay):
            if site_key(place.module, place.acts) not in self.sites:
                self.sites[site_key(place.module, place.acts)] = self._site(host, place)
            if (layer := _layer_read(inlay, place)) and site_key(layer) not in self.branches:
                attention = self.anatomy.branches[f"{layer}.attention"]
                self.branches[site_key(layer)] = LayerInput(host, layer, attention, self.acting)
        forget_compiled()

    def _site(self, host: PreTrainedModel, place: Place) -> Hooked:
        if place.acts == "input":
            return InputSite(host, place.module, self.acting)
        if place.acts == "keys":
            return KeySite(host, place.module, self.acting, self.entry)
        if place.acts == "weights":
            return WeightSite(host, self.anatomy, self.acting)
        if place.acts == "tokens":
            return TokenSite(host, self.anatomy, self.acting, self.entry)
        if place.kind in ("head", "head_bias") or inside(place.module, self.anatomy.head):
            return HeadSite(host, place.module, self.acting, self.entry.hidden, self.entry.mask)
        if place.branch and site_key(place.branch) not in self.branches:
            end = self.anatomy.branches[place.branch]
            self.branches[site_key(place.branch)] = BranchInput(host, place.branch, end, self.acting)
        branch = self.branches[site_key(place.branch)] if place.branch else None
        stack = place.stack or place.branch.partition(".")[0]  # norms and biases have none of their own
        alone = self.anatomy.causal or stack != "decoder"
        layer = site_key(place.branch.removesuffix(".ffn")) if place.branch.endswith(".ffn") else ""
        return Site(
            host, place.module, self.acting, branch, self.entry.real if alone else self.entry.written,  # type: ignore[arg-type]
            self.branches, layer,
        )  # fmt: skip

    def places_of(self, inlay: Inlay) -> list[Place]:
        places = [self.anatomy.places[place_id] for place_id in inlay.place_ids()]
        if self.anatomy.causal and any(place.acts == "tokens" for place in places):
            places += self.anatomy.attention_places("self_attention")  # tokens act there as keys and values
        return places

    def dismiss(self, name: str) -> None:
        """Let an inlay go."""
        del self.all[key_of(name)]
        self.unhook_unneeded()

    def unhook_unneeded(self) -> None:
        """Take the hooks off the modules where no inlay has anything any more."""
        places = [place for inlay in self for place in self.places_of(inlay)]
        layers = {_layer_read(inlay, place) for inlay in self for place in self.places_of(inlay)}
        for table, needed in (
            (self.sites, {site_key(place.module, place.acts) for place in places}),
            (self.branches, {site_key(name) for name in {place.branch for place in places} | layers}),
        ):
            for key in [key for key in table if key not in needed]:
                table[key].unhook()  # type: ignore[operator]
                del table[key]
        forget_compiled()

    # acting

    @property
    def active(self) -> Setup:
        """The setup that acts in this thread."""
        return self.acting.plan.setup

    def activate(self, host: PreTrainedModel, setup: Setup) -> None:
        """Resolve a setup everywhere first, then switch over: an error changes nothing."""
        resolver = self._resolver(host)
        plan = self._resolve(resolver, setup)
        if plan.attends:
            check_attention(host)
        self.switch(host, plan)
        name_attention(host, self.acting.attends())  # also where the host was told to attend in another way meanwhile
        self.labels.show(resolver.row_heads(setup))

    def resolve(self, host: PreTrainedModel, setup: Setup) -> Plan:
        """What a setup does, to be switched to later, as often as one likes; nothing acts yet."""
        return self._resolve(self._resolver(host), setup)

    def switch(self, host: PreTrainedModel, plan: Plan) -> None:
        """Let a plan act in this thread, at next to no cost. The labels that the host shows stay as they are."""
        before = self.acting.attends()
        if plan.attends and not before:
            check_attention(host)
        self.acting.switch(plan)
        if self.acting.attends() != before:
            name_attention(host, not before)

    def _resolver(self, host: PreTrainedModel) -> Resolver:
        return Resolver(host, self.anatomy, self.__getitem__, self.folded is not None)

    def _resolve(self, resolver: Resolver, setup: Setup) -> Plan:
        check_setup(setup)
        for name in names_in(setup):
            self[name]
        if self.folded is not None and setup != self.folded.name:
            self.folded.refuse()
        plan = resolver.plan(setup, [site.path for site in self.sites.values() if isinstance(site, Site)])
        check_sites(resolver.host, self.sites, plan)
        return plan

    def member_part(self, name: str, place: Place) -> tuple[nn.Module, Reads] | None:
        """A member's module at a place and what it reads."""
        return member_part(self[name], place, self.anatomy)

    def check_members(self, members: tuple[str, ...]) -> None:
        """Refuse members that a fusion cannot mix."""
        for member in members:
            inlay = self[member]
            if reason := inlay.method.why_not_plain(member):
                raise SetupError(reason)
            changing = [part for key, part in inlay.parts.items() if self.anatomy.places[id_of(key)].changes]
            if not changing or not all(map(fusion_can_read, changing)):
                raise SetupError(f"{member!r} ({inlay.method.kind}) has no bottleneck that a fusion could mix.")


def forget_compiled() -> None:
    """torch.compile does not watch hooks: what it compiled before hooks came or went has to be compiled anew."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
