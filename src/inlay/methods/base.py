"""What a method owes the rest of Inlay, and the table of methods.

A method is a frozen `Config` that names the places it acts at, what its modules read there, and builds one module per
place. A module computes a change δ that is added to the place's output:

    h' = h + δ(x)      x = what the method reads

A new method is one file here with one registered class. Adding, setups, saving, counting, the command line and the
tests follow by themselves; whatever is special about it is said by overriding what stands below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.config import Config
from inlay.errors import ConfigError, SetupError, nearest
from inlay.methods.acting import Add, Draw, PerThread, Reads, Spot, Step

METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class BottleneckForm:
    """A module written as a bottleneck, δ = upᵀ act(down x + down_bias) + up_bias: what a fusion reads of it."""

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
    """Whether its paper trains the host's norms too; see `owns_norms`."""
    rate: ClassVar[float] = 1e-4
    """Its paper's learning rate on encoders."""
    text_rate: ClassVar[float | None] = None
    """Its paper's learning rate on hosts that answer in text; None: the same."""
    epochs: ClassVar[int] = 30
    """Its paper's longest training."""
    standalone: ClassVar[bool] = True
    """Whether it can be added with its defaults alone."""
    reads_texts: ClassVar[bool] = False
    """Whether its modules read whole texts, and have to know which tokens are real."""
    attends: ClassVar[bool] = False
    """Whether its modules look at other tokens of a text, so that a decoder has to hand them the whole of it."""
    mixes: ClassVar[tuple[str, ...]] = ()
    """The projections of its modules that a mixture can hold alternatives of; none: no mixture can hold it."""

    # what every method says

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        """The places at which this method has a module."""
        raise NotImplementedError

    def build(self, place: Place, shared: nn.Module) -> nn.Module:
        """The module for one place; `shared` is what `make_shared` made for the whole inlay."""
        raise NotImplementedError

    def reads_at(self, place: Place) -> Reads:
        """What the module at this place reads."""
        raise NotImplementedError

    # what some methods say

    def usual_rate(self, text: bool = False) -> float:
        """Its paper's learning rate, on encoders or on hosts that answer in text."""
        return self.text_rate if text and self.text_rate is not None else self.rate

    def owns_norms(self) -> bool:
        """Whether an inlay of this method owns a copy of the host's norms unless told otherwise."""
        return self.trains_norms

    def make_shared(self) -> nn.Module:
        """Parameters that all modules of one inlay have in common."""
        return nn.Module()

    def make_draw(self, parts: nn.Module) -> Draw:
        """The random choices that an inlay of this method makes in a training step; `parts` are its modules."""
        return Draw()

    def start(self, part: nn.Module, module: nn.Module) -> None:
        """Initialise a new module from the host's own module at its place."""

    def in_tokens(self, tokenizer: Any) -> Method:
        """The same with its texts as tokens, if it has any; `tokenizer` is the host's, or None where there is none."""
        return self

    def moves(self, anatomy: Anatomy) -> int:
        """By how many positions it shifts the host's tokens."""
        return 0

    def merged(self, parts: Iterable[nn.Module]) -> Method | None:
        """Replace modules that only training needs by what is served, and return the method they then have.

        None: there is nothing to merge.
        """
        return None

    def watch(self, inlay: nn.Module, real: PerThread[Tensor]) -> None:
        """Give modules that read whole texts the slot in which the host's hooks put the mask of real tokens."""

    def needed_of(self, shared: nn.Module) -> nn.Module:
        """The shared parameters that are still needed once an inlay has been merged into this method."""
        return shared

    def step(self, spot: Spot) -> Step:
        """What the active setup runs at one place."""
        return Add(spot.module, self.reads_at(spot.place), spot.place, spot.draw, spot.norm)

    def compared_passes(self) -> int:
        """How many passes of a training step a consistency loss compares with each other."""
        return 1

    def penalty(self, parts: Iterable[nn.Module]) -> Tensor | None:
        """A regulariser to add to the loss, if the method has one."""
        return None

    def closed_form(self, places: Sequence[Place]) -> str | None:
        """The paper's formula for the weights alone, without norms and biases, and its value."""
        return None

    # methods that are made of other inlays

    @property
    def needs(self) -> tuple[str, ...]:
        """The inlays on the same host that it cannot do without."""
        return ()

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same with other names for the inlays it needs."""
        return self

    def why_not_plain(self, name: str) -> str | None:
        """Why an inlay of this method cannot be fused, averaged, folded or exported as it is; None: it can."""
        return None

    def check_pins(self, name: str, pinned: Mapping[str, float]) -> None:
        """Refuse weights that a setup fixes for members which this method does not have."""
        raise SetupError(f"Fuse({name!r}) needs a fusion, but {name!r} is a {self.kind} inlay.")

    def describe(self) -> dict[str, Any]:
        """The full config, as it stands in a file."""
        return {"kind": self.kind, **self.model_dump(mode="json")}


M = TypeVar("M", bound=Method)


def register(kind: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: make a method known by its name."""

    def add(method: type[M]) -> type[M]:
        method.kind = kind
        METHODS[kind] = method
        return method

    return add


def method_from(description: Mapping[str, Any]) -> Method:
    """A method from what `describe` gave."""
    fields = dict(description)
    kind = str(fields.pop("kind", None))
    if kind not in METHODS:
        raise ConfigError(f"unknown method {kind!r}.{nearest(kind, METHODS)}")
    return METHODS[kind](**fields)


def fusion_can_read(module: nn.Module) -> bool:
    """Whether a module can be written as a bottleneck: it then has `form(reads) -> BottleneckForm`."""
    return hasattr(module, "form")
