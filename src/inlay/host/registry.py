"""What lives in the host's module tree: the inlays, the sites they act at, and the setup that is active.

host ── inlays (Inlays) ─┬─ all    name → Inlay ── parts   place → module
                         │                      └─ shared  what its modules have in common
                         ├─ sites  place → Site
                         └─ entry  Entry
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import inside
from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.errors import NamingError, SetupError, nearest
from inlay.host import steps
from inlay.host.heads import Head, PooledHead, bare_copy, build_head
from inlay.host.hooks import Entry, HeadSite, Site, is_hooked
from inlay.host.setup import Average, Fuse, Rows, Setup, Stack, check_setup, names_in, walk
from inlay.methods import acting, fusion
from inlay.methods.base import Method, Reads
from inlay.methods.fusion import Fusion
from inlay.methods.mixture import Mixture, alternatives

ATTRIBUTE = "inlays"
Around = Callable[[Setup], Setup]


def key_of(name: str) -> str:
    """A name as a module's name, which may have no dots and not be a word that modules use themselves."""
    key = name.replace(".", ":")
    return f"{key}:" if hasattr(nn.ModuleDict, key) else key


def id_of(key: str) -> str:
    """The place that a module's name stands for."""
    return key.replace(":", ".")


class Inlay(nn.Module):
    """A named set of small parameters for one host."""

    def __init__(self, name: str, method: Method, head: Head | None = None, norms: bool = False) -> None:
        super().__init__()
        self.name = name
        self.method = method
        self.head = head
        self.norms = norms
        self.shared = method.make_shared()
        self.parts = nn.ModuleDict()
        self.origin: tuple[str, str] | None = None
        """If it was loaded: the fingerprints of its file and of what it was on this host just then."""
        self.left_out = 0
        """In training: the first layers that this step leaves out."""
        self.passes = 1
        """A mixture: into how many equal parts a batch falls, each with draws of its own."""
        self.chosen: frozenset[str] | None = None
        """A fusion in training: the members that take part in this step."""

    def fill(self, host: PreTrainedModel, anatomy: Anatomy, device: str | None = None) -> Inlay:
        """Build every module in the dtype of its place, on that place's device or on the one given."""
        for place in self.method.places(anatomy):
            like = _parameter_near(host, place.module)
            self.shared.to(device or like.device, like.dtype)
            with torch.device(device or like.device):
                part = self.method.build(place, anatomy, host, self.shared)
            self.parts[key_of(place.id)] = part.to(like.dtype)
        if self.norms:
            for place in anatomy.of_kind("norm"):
                self.parts[key_of(place.id)] = bare_copy(host.get_submodule(place.module))
        if self.head is not None:
            like = _parameter_near(host, anatomy.head[-1] if anatomy.head else "")
            with torch.device(device or like.device):
                modules = build_head(host, anatomy, self.head)
            for place_id, part in modules.items():
                self.parts[key_of(place_id)] = part.to(device or like.device, like.dtype)
        return self

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

    def draw(self) -> None:
        """Once per step of training: what is left to chance for all layers together, from torch's own generator."""
        for choice in alternatives(self):
            choice.passes = self.passes  # until the next step, for gradient checkpointing may recompute this one
        depth = self.method.drawn_depth()
        self.left_out = int(torch.randint(0, depth + 1, ())) if depth else 0
        if isinstance(self.method, Fusion) and self.method.subset is not None:
            subset = torch.randperm(len(self.method.members))[: self.method.subset].tolist()
            self.chosen = frozenset(self.method.members[n] for n in subset)


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


class Original:
    """What the host was like: its trainable parameters before the first inlay, its labels before the first own head."""

    def __init__(self, host: PreTrainedModel) -> None:
        self.requires_grad = frozenset(name for name, p in host.named_parameters() if p.requires_grad)
        self.remember_labels(host)

    def remember_labels(self, host: PreTrainedModel) -> None:
        self.num_labels: int | None = getattr(host, "num_labels", None)
        self.id2label: dict[int, str] | None = getattr(host.config, "id2label", None)
        self.label2id: dict[str, int] | None = getattr(host.config, "label2id", None)
        self.problem_type: str | None = getattr(host.config, "problem_type", None)


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
        self.original = Original(host)
        self.all = nn.ModuleDict()
        self.sites = nn.ModuleDict()
        self.entry = Entry(host, self.anatomy, self.sites)
        self.active: Setup = None
        self.labelled = False
        """Whether the host shows the labels of an own head."""
        self.folded: Folded | None = None

    # names

    def __contains__(self, name: str) -> bool:
        return key_of(name) in self.all

    def __getitem__(self, name: str) -> Inlay:
        if name not in self:
            raise NamingError(f"no inlay named {name!r} on this host.{nearest(name, self.names())}")
        return self.all[key_of(name)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Inlay]:
        return iter(self.all.values())  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return [inlay.name for inlay in self]

    # coming and going

    def admit(self, host: PreTrainedModel, inlay: Inlay) -> None:
        """Take in a filled inlay, which learns nothing until `train` says so, and hook the places that are new."""
        inlay.train(host.training).requires_grad_(False)
        self.all[key_of(inlay.name)] = inlay
        for place_id in inlay.place_ids():
            if key_of(place_id) not in self.sites:
                place = self.anatomy.places[place_id]
                site = HeadSite(host, place, self.entry) if place.kind == "head" else Site(host, place)
                self.sites[key_of(place_id)] = site
        forget_compiled()

    def dismiss(self, name: str) -> None:
        """Let an inlay go."""
        del self.all[key_of(name)]
        self.unhook_unneeded()

    def unhook_unneeded(self) -> None:
        """Take the hooks off the places where no inlay has a module any more."""
        needed = {place_id for inlay in self for place_id in inlay.place_ids()}
        for key in [key for key in self.sites if id_of(key) not in needed]:
            self.sites[key].unhook()  # type: ignore[operator]
            del self.sites[key]
        forget_compiled()

    # acting

    def activate(self, host: PreTrainedModel, setup: Setup) -> None:
        """Resolve a setup at every place first, then switch over: an error changes nothing."""
        check_setup(setup)
        for name in names_in(setup):
            self[name]
        if self.folded is not None and setup != self.folded.name:
            raise SetupError(f"{self.folded.name!r} is folded into the host's weights. inlay.unfold(host) first.")
        for part in walk(setup):
            if isinstance(part, Fuse):
                self._check_fuse(part)
        heads = self.heads(setup)
        made = {key: self._step(host, setup, site.place) for key, site in self.sites.items()}  # type: ignore[arg-type]
        rows = next((len(s.parts) * s.each for s in walk(setup) if isinstance(s, Rows)), None)
        for key, step in made.items():
            if rows and step is not None and self.sites[key].place.module in self.anatomy.not_norms:  # type: ignore[union-attr]
                raise SetupError(f"{setup}: {id_of(key)} acts on what all rows share, so they cannot differ there.")
        for key, step in made.items():
            self.sites[key].step = step  # type: ignore[assignment]
        self.active = setup
        self.entry.expect(
            rows=rows,
            pools=any(head.pooling for head in heads),
            drawn=[self[name] for name in names_in(setup)],
        )
        labelled = any(head.names is not None for head in heads)
        if labelled and not self.labelled:
            self.original.remember_labels(host)
        if labelled or self.labelled:
            show_labels(host, heads, self.original)
        self.labelled = labelled

    def _check_fuse(self, setup: Fuse) -> None:
        method = self[setup.name].method
        if not isinstance(method, Fusion):
            raise SetupError(f"Fuse({setup.name!r}) needs a fusion, but {setup.name!r} is a {method.kind} inlay.")
        pinned = dict(setup.pinned)
        for member in pinned.keys() - set(method.members):
            raise SetupError(f"{member!r} is not a member of {setup.name!r}.{nearest(member, method.members)}")
        if len(pinned) == len(method.members) and abs(sum(pinned.values()) - 1) > 1e-6:
            raise SetupError(f"Fuse({setup.name!r}): all members are off or pinned, so their weights must sum to 1.")

    def heads(self, setup: Setup) -> list[Head]:
        """The own heads that stand in for the host's; several only under Rows."""
        if setup is None:
            return []
        if isinstance(setup, str | Fuse):
            head = self[name_in(setup)].head
            return [head] if head is not None else []
        found = [heads for part in setup.parts if (heads := self.heads(part))]
        if isinstance(setup, Stack):
            return found[-1] if found else []
        flat = [head for heads in found for head in heads]
        if isinstance(setup, Average) and len(flat) > 1:
            if len(found) < len(setup.parts):
                raise SetupError(
                    f"{setup}: some parts have a head of their own and some have not. Give all or one of them a head."
                )
            if len({head.names for head in flat}) > 1:
                raise SetupError(
                    f"{setup}: its parts have heads with different labels, which have no mean. Use Rows, or one head."
                )
        return flat

    def _step(self, host: nn.Module, setup: Setup, place: Place) -> acting.Step | None:
        if place.kind == "norm":
            return self._stand_in(setup, place, steps.HostNorm(host.get_submodule(place.module)))
        if place.kind == "head":
            return self._stand_in(setup, place, steps.Unchanged())
        return self._change(host, setup, place, lambda part: part)

    def _change(self, host: nn.Module, setup: Setup, place: Place, around: Around) -> acting.Step | None:
        """`around` a part: the whole setup as the rows of that part see it, for the norms that stand in there."""
        if setup is None:
            return None
        if isinstance(setup, str | Fuse):
            inlay = self[name_in(setup)]
            if (module := inlay.part(place)) is None or (self.folded is not None and place.projection is not None):
                return None
            norm = self._norm(host, around(setup), place)
            if isinstance(inlay.method, Fusion):
                return self._fused(inlay, place, norm, dict(setup.pinned) if isinstance(setup, Fuse) else {})
            return acting.Change(module, inlay.method.reads_at(place), place, inlay, norm)
        if isinstance(setup, Stack):
            each = []
            for at, part in enumerate(setup.parts):

                def outside(inner: Setup, at: int = at) -> Setup:
                    return around(setup.with_part(at, inner))

                each.append(self._change(host, part, place, outside))
            active = tuple(step for step in each if step is not None)
            return steps.Chain(active) if len(active) > 1 else (active[0] if active else None)
        return _branches(setup, lambda part: self._change(host, part, place, around), steps.Unchanged())

    def _fused(self, inlay: Inlay, place: Place, norm: acting.Step | None, pinned: dict[str, float]) -> fusion.Fused:
        assert isinstance(inlay.method, Fusion)
        names = inlay.method.at(place.id)
        members = tuple(self.member_part(name, place) for name in names)
        return fusion.Fused(inlay.part(place), inlay, place, names, members, norm, pinned)  # type: ignore[arg-type]

    def member_part(self, name: str, place: Place) -> tuple[nn.Module, Reads] | None:
        """A member's module at a place and what it reads; before or after the dropout is the same to a fusion."""
        inlay = self[name]
        for near in (place.id, f"{place.id}.raw", place.id.removesuffix(".raw")):
            if near in self.anatomy.places and (part := inlay.part(self.anatomy.places[near])) is not None:
                return part, inlay.method.reads_at(self.anatomy.places[near])
        return None

    def check_members(self, members: tuple[str, ...]) -> None:
        """Refuse members that a fusion cannot mix."""
        for member in members:
            inlay = self[member]
            if isinstance(inlay.method, Fusion):
                inner = ", ".join(inlay.method.members)
                raise SetupError(f"{member!r} is itself a fusion. Fuse its members {inner}, or collapse it first.")
            if isinstance(inlay.method, Mixture):
                raise SetupError(f"{member!r} is a mixture. Merge it first: inlay.merge(host, {member!r}).")
            changing = [part for key, part in inlay.parts.items() if self.anatomy.places[id_of(key)].changes]
            if not changing or not all(hasattr(part, "form") for part in changing):
                raise SetupError(f"{member!r} ({inlay.method.kind}) has no bottleneck that a fusion could mix.")

    def _norm(self, host: nn.Module, setup: Setup, place: Place) -> acting.Step | None:
        if place.norm is None:
            return None
        fallback = steps.HostNorm(host.get_submodule(place.norm))
        norm = self.anatomy.at("norm", place.norm)
        return (self._stand_in(setup, norm, fallback) if norm is not None else None) or fallback

    def _stand_in(self, setup: Setup, place: Place, fallback: acting.Step) -> acting.Step | None:
        """In a Stack the uppermost part that owns the module stands in; elsewhere each part has its own."""
        if setup is None:
            return None
        if isinstance(setup, str | Fuse):
            module = self[name_in(setup)].part(place)
            if isinstance(module, PooledHead):
                return steps.PooledStandIn(module)
            return steps.StandIn(module) if module is not None else None
        if isinstance(setup, Stack):
            upper: acting.Step | None = None
            for part in setup.parts:
                upper = self._stand_in(part, place, upper or fallback) or upper
            return upper
        if isinstance(setup, Average) and place.kind == "head":
            owners = [step for part in setup.parts if (step := self._stand_in(part, place, fallback)) is not None]
            if len(owners) == 1:
                return owners[0]
        return _branches(setup, lambda part: self._stand_in(part, place, fallback), fallback)


def name_in(setup: str | Fuse) -> str:
    return setup.name if isinstance(setup, Fuse) else setup


def _branches(
    setup: Average | Rows, step_of: Callable[[Setup], acting.Step | None], absent: acting.Step
) -> acting.Step | None:
    """The step of an Average or Rows from those of its parts; `absent` where a part does nothing."""
    if isinstance(setup, Average):
        each = [step_of(part) for part in setup.parts]
        if all(step is None for step in each):
            return None
        return steps.Mean(tuple(step or absent for step in each), setup.weights)
    groups: dict[Setup, list[int]] = {}
    for row, part in enumerate(setup.parts):
        groups.setdefault(part, []).append(row)
    by_part = {part: step_of(part) for part in groups}
    if all(step is None for step in by_part.values()):
        return None
    return steps.Split(tuple(step or absent for step in by_part.values()), tuple(map(tuple, groups.values())))


def show_labels(host: PreTrainedModel, heads: Iterable[Head], original: Original) -> None:
    """Losses and pipelines of transformers ask the host for its labels: give them those of the head that is active."""
    heads = [head for head in heads if head.names is not None]
    names: tuple[str, ...] | None = None
    if len({head.names for head in heads}) == 1:
        names = heads[0].names
    elif heads:  # Rows over several tasks: the logits are as wide as the widest
        names = tuple(f"LABEL_{i}" for i in range(max(len(head.names or ()) for head in heads)))
    config: Any = host.config
    if names is None:
        num, id2label, label2id, problem = (
            original.num_labels,
            original.id2label,
            original.label2id,
            original.problem_type,
        )
    else:
        num, id2label = len(names), dict(enumerate(names))
        label2id, problem = {name: i for i, name in id2label.items()}, heads[0].problem_type
    if original.num_labels is not None:
        host.num_labels = num  # type: ignore[assignment]
    if original.id2label is not None:
        config.id2label, config.label2id, config.problem_type = id2label, label2id, problem


def forget_compiled() -> None:
    """torch.compile does not watch hooks: what it compiled before hooks came or went has to be compiled anew."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
