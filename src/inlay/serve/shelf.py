"""The models on the host: each under a name of its own there, resolved once, taken off when its last row is done.

What is set into the host is counted: a member that several fusions share, or that is served by itself as well, is there
once and goes with the last of them. Everything here that changes the host runs in the model thread, between batches.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from inlay.checkpoints.load import load
from inlay.checkpoints.manifest import read_manifest
from inlay.data.task import Task
from inlay.errors import InlayError, nearest
from inlay.host.joined import Joiner
from inlay.host.plan import Plan
from inlay.host.setup import Fuse, Setup
from inlay.host.verbs import bare, free_name, inlays_of, registering, remove
from inlay.methods.fusion import Fusion
from inlay.runs.allowed import Allowed
from inlay.runs.use import codec_for
from inlay.serve.errors import Invalid, NotFound, TooLarge
from inlay.serve.pieces import Piece
from inlay.training.codec import Codec
from inlay.training.workbench import Workbench

KEPT = 32
"""Plans of a fusion with members off or pinned that are kept."""


@dataclass(eq=False)
class Model:
    """One model, ready to run."""

    name: str
    piece: Piece
    inlay: str | None
    """Its name on the host; None: the host alone answers."""
    plan: Plan
    codec: Codec
    group: Hashable
    """With which others it may share a batch."""
    likeness: int = 0
    """Models for which this is the same act together where their rows lie side by side."""
    members: dict[str, str] = field(default_factory=dict)
    """A fusion's members: what people call them → their names on the host."""
    method: str = "host"
    uses: tuple[str, ...] = ()
    """What it has on the host."""
    created: float = field(default_factory=time.time)
    waiting: int = 0
    """Requests that it has not answered yet."""
    piece_mark: tuple[Any, ...] = ()
    """What its folder looked like when it was last read."""
    pinned: OrderedDict[Setup, Plan] = field(default_factory=OrderedDict)

    def facts(self) -> dict[str, Any]:
        """What it is, for people and programs."""
        task = self.codec.task
        return {
            "task": task.name, "kind": task.kind, "labels": list(task.labels), "method": self.method,
            "members": list(self.members), "pair": task.pair is not None, "max_length": self.codec.max_length,
            "columns": task.columns(labelled=False),
            "reads": {"text": task.text, "pair": task.pair, "choices": task.choices},
        }  # fmt: skip


class Shelf:
    """All models of one host."""

    def __init__(self, bench: Workbench, host_name: str, allowed: Allowed, most: int) -> None:
        self.bench, self.allowed, self.most = bench, allowed, most
        self.host = bare(bench.host.eval())
        self.host_path = host_name
        self.host_name = Path(host_name).name if Path(host_name).is_dir() else host_name
        self.tokenizer = bench.tokenizer if bench.form == "labels" else deepcopy(bench.tokenizer)
        """The model thread's own where it cuts texts too, so that it and requests do not wait for each other."""
        with registering(self.host) as inlays:
            self.joiner = Joiner(inlays.anatomy)
        self.models: dict[str, Model] = {}
        self.retired: list[Model] = []
        self.used: Counter[str] = Counter()
        self.shared: dict[str, str] = {}
        """Digest of a member's manifest → its name on the host."""
        self.numbers = count(1)
        self.bare = self._bare() if bench.form == "text" else None
        """The host by itself, where it writes."""
        self.lock = threading.Lock()
        """Held while a model is found and claimed, published, or seen to have no claims."""

    def __getitem__(self, name: str) -> Model:
        if self.bare is not None and name == self.host_name:
            return self.models.get(name, self.bare)
        return self.loaded(name)

    @property
    def names(self) -> set[str]:
        """The names of all that answers: the models and, if it writes text, the host by itself."""
        return {*self.models, *(() if self.bare is None else (self.host_name,))}

    def loaded(self, name: str) -> Model:
        """A model that was loaded and can be taken off again, which the host itself cannot."""
        if name in self.models:
            return self.models[name]
        if self.bare is not None and name == self.host_name:
            raise NotFound(f"{name!r} is the host itself, which stays as long as the server does.")
        raise NotFound(f"no model {name[:80]!r}.{nearest(name[:80], self.models)}")

    def _bare(self) -> Model:
        bench = self.bench.for_task(Task(name=self.host_name, kind="text"))
        piece = Piece(self.host_name, Path(), bench.task, 1 << 30, self.host_name, None)
        plan = inlays_of(self.host).resolve(self.host, None)
        return Model(self.host_name, piece, None, plan, bench.codec(1 << 30), ("alone", 0))

    def claim(self, name: str) -> Model:
        """A model that stays on the host until it is released."""
        with self.lock:
            model = self[name]
            model.waiting += 1
        return model

    def release(self, model: Model) -> None:
        with self.lock:
            model.waiting -= 1

    # coming

    def put(self, piece: Piece) -> Model:
        """Load a model and publish it under its name, whole or not at all; one of that name retires."""
        if piece.name not in self.models and len(self.models) >= self.most:
            raise TooLarge(f"{self.most} models are loaded, which is the limit. Delete one first.")
        if piece.own_host and Path(str(piece.host)).resolve() != Path(self.host_path).resolve():
            raise Invalid(f"{piece.name!r} changed the whole host, so it cannot join the others on this one.")
        model = self._made(piece)
        with self.lock:
            old = self.models.get(piece.name)
            self.models[piece.name] = model
        if old is not None:
            self.retired.append(old)
            self.sweep()
        return model

    def _made(self, piece: Piece) -> Model:
        bench, mark = self.bench.for_task(piece.task), piece.mark
        fresh: list[str] = []
        try:
            for folder in piece.members:
                self._member(folder, fresh)
            own = None if piece.inlay is None else self._loaded(piece.inlay, piece.name, fresh, head=True)
            if own is not None:
                bench.check_head(own)
            plan = inlays_of(self.host).resolve(self.host, own)
        except BaseException:
            self._forget(fresh)
            raise
        method = None if own is None else inlays_of(self.host)[own].method
        needs = () if method is None else method.needs
        uses = (*needs, *(() if own is None else (own,)))
        self.used.update(uses)
        self._forget([name for name in fresh if not self.used[name]])  # a member that was there already was taken
        codec = codec_for(bench, piece.max_length, piece.config)
        alone = self.joiner.must_be_alone(plan) or codec.form != "labels"
        return Model(
            piece.name, piece, own, plan, codec, ("alone", next(self.numbers)) if alone else "together",
            self.joiner.likeness(plan),
            _by_name(piece, method) if isinstance(method, Fusion) else {},
            "host" if method is None else method.kind, uses, piece_mark=mark,
        )  # fmt: skip

    def _member(self, folder: Path, fresh: list[str]) -> None:
        digest = read_manifest(folder).sha256
        there = self.shared.get(digest)
        if there is None or there not in inlays_of(self.host):
            self.shared[digest] = self._loaded(folder, folder.name, fresh, head=False)

    def _loaded(self, folder: Path, name: str, fresh: list[str], head: bool) -> str:
        """Set an inlay into the host under a name that no other has."""
        own = f"{name[:48]}.{next(self.numbers)}"
        free_name(self.host, own)
        load(self.host, folder, name=own, head=head, any_host=self.allowed.any_host)
        fresh.append(own)
        return own

    # going

    def drop(self, name: str) -> None:
        """Publish a model no more; it leaves the host when its last row is done."""
        with self.lock:
            self.retired.append(self.loaded(name))
            del self.models[name]
        self.sweep()

    def sweep(self) -> None:
        """Take what no request waits for any more off the host."""
        if not self.retired:
            return
        with self.lock:
            done = [model for model in self.retired if model.waiting == 0]
        for model in done:
            self.retired.remove(model)
            self.used.subtract(model.uses)
            self._forget([name for name in reversed(model.uses) if self.used[name] <= 0])

    def _forget(self, names: list[str]) -> None:
        """Fusions before their members."""
        inlays = inlays_of(self.host)
        inlays.switch(self.host, Plan())
        there = [name for name in names if name in inlays]
        for name in sorted(there, key=lambda name: not inlays[name].method.needs):
            remove(self.host, name)
        for name in names:
            self.used.pop(name, None)
            self.shared = {digest: there for digest, there in self.shared.items() if there != name}

    # running

    def plan_of(self, model: Model, off: tuple[str, ...], pin: Mapping[str, float]) -> Plan:
        """A fusion with members off or pinned; the last ones asked for are kept."""
        if not off and not pin:
            return model.plan
        known = model.members
        for name in (*off, *pin):
            if name not in known:
                raise Invalid(f"{name[:80]!r} is not a member of {model.name!r}.{nearest(name[:80], known)}")
        assert model.inlay is not None
        try:
            asked = Fuse(model.name, off=off, pin=pin)  # checked under the names that the client has for them
            setup = Fuse(model.inlay, pin={known[name]: weight for name, weight in asked.pinned})
            if setup not in model.pinned:
                model.pinned[setup] = inlays_of(self.host).resolve(self.host, setup)
        except InlayError as error:
            raise Invalid(str(error).replace(model.inlay, model.name)) from None
        model.pinned.move_to_end(setup)
        while len(model.pinned) > KEPT:
            model.pinned.popitem(last=False)
        return model.pinned[setup]


def _by_name(piece: Piece, fusion: Fusion) -> dict[str, str]:
    """A fusion's members by the names that it was saved with, whatever they are called on this host."""
    assert piece.inlay is not None
    saved = read_manifest(piece.inlay).method["members"]
    return dict(zip(saved, fusion.members, strict=True))
