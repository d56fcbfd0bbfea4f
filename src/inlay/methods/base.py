"""What a method owes the rest of Inlay, and the table of methods.

A method is a frozen `Config` that names the places it acts at, what its modules read there, and builds one module per
place. A module computes a change δ that is added to the place's output:

    h' = h + δ(x)      x = what the method reads

A new method is one file here with one registered class; saving, setups, counting and the tests follow by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.config import Config
from inlay.errors import ConfigError, nearest

Reads = Literal["output", "residual", "stream", "normed", "input"]
"""What a module reads at its place:

output     h, the branch's output
residual   r, what the branch's output is added to
stream     h + r
normed     LN(h + r) in post-LN hosts, with the host's own norm of that place; h + r in pre-LN hosts
input      the hooked module's own input (projections)
"""

METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class Form:
    """A module written as a bottleneck, δ = upᵀ act(down x + down_bias) + up_bias: what a fusion needs of it."""

    reads: Reads
    standardised: bool
    """Whether what it reads is first made zero mean and unit variance."""
    activation: str
    down: Tensor  # (b, D_x)
    down_bias: Tensor  # (b,)
    up: Tensor  # (b, D)
    up_bias: Tensor  # (D,)


class Method(Config):
    """Base of all methods."""

    kind: ClassVar[str]
    """The method's name in files and on the command line."""
    trains_norms: ClassVar[bool] = False
    """Whether an inlay of this method owns a copy of the host's norms unless told otherwise."""

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        """The places at which this method has a module."""
        raise NotImplementedError

    def build(self, place: Place, anatomy: Anatomy, host: nn.Module, shared: nn.Module) -> nn.Module:
        """The module for one place; `shared` is what `make_shared` made for the whole inlay."""
        raise NotImplementedError

    def make_shared(self) -> nn.Module:
        """Parameters that all modules of one inlay have in common."""
        return nn.Module()

    def reads_at(self, place: Place) -> Reads:
        """What the module at this place reads."""
        raise NotImplementedError

    def drawn_depth(self) -> int:
        """In training, up to how many of the first layers may be left out at random in a step."""
        return 0

    def describe(self) -> dict[str, Any]:
        """The full config, as it stands in a file."""
        return {"kind": self.kind, **self.model_dump(mode="json")}


def register(kind: str) -> Any:
    """Class decorator: make a method known by its name."""

    def add(method: type[Method]) -> type[Method]:
        method.kind = kind
        METHODS[kind] = method
        return method

    return add


def method_from(description: dict[str, Any]) -> Method:
    """A method from what `describe` gave."""
    fields = dict(description)
    kind = str(fields.pop("kind", None))
    if kind not in METHODS:
        raise ConfigError(f"unknown method {kind!r}.{nearest(kind, METHODS)}")
    return METHODS[kind](**fields)
