"""What a user does with a host: add, activate, train, freeze, remove, summary, strip. Each is a function over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import ATTRIBUTE
from inlay.errors import NamingError, SetupError
from inlay.host.heads import Head
from inlay.host.keys import name_attention
from inlay.host.offload import in_pieces
from inlay.host.registry import Inlay, Inlays, forget_compiled, key_of
from inlay.host.setup import Setup, names_in
from inlay.methods.base import Method
from inlay.storage.names import NAME, NAMES_HAVE


def add(
    host: nn.Module, name: str, method: Method, *,
    head: Head | None = None, norms: bool | None = None, tokenizer: Any = None,
) -> None:  # fmt: skip
    """Set a new inlay into a host. It does not act until it is activated.

    head:      a head of its own, which stands in for the host's while the inlay is active.
    norms:     whether it owns a copy of every norm of the host; None leaves that to the method.
    tokenizer: the host's, for a method that starts from a text: inlay.Prompt(text="…").
    """
    model = bare(host)
    free_name(model, name)
    if not isinstance(method, Method):
        raise SetupError(f"a method is an object such as inlay.Pfeiffer(reduction=16), got {method!r}")
    method = method.in_tokens(tokenizer)
    with registering(model) as inlays:
        inlay = Inlay(name, method, head, method.owns_norms() if norms is None else norms).fill(model, inlays.anatomy)
        inlay.check_head(inlays.anatomy)
        if not inlay.parts:
            raise SetupError(f"{method!r} has no place in {type(model).__name__}")
        inlays.admit(model, inlay)


@contextmanager
def registering(host: PreTrainedModel) -> Iterator[Inlays]:
    """The host's inlays, new ones if it has none yet; after an error the host is as it was."""
    known = getattr(host, ATTRIBUTE, None)
    if known is not None:
        yield known
        return
    inlays = Inlays(host)
    try:
        yield inlays
    except BaseException:
        inlays.unhook()
        raise
    setattr(host, ATTRIBUTE, inlays)


def activate(host: nn.Module, setup: Setup) -> None:
    """Make a setup act: a name, a Stack, Average or Rows of them, or None for the bare host."""
    model = bare(host)
    if setup is None and not hasattr(model, ATTRIBUTE):
        return
    inlays_of(model).activate(model, setup)


def activator(host: nn.Module, setup: Setup) -> Callable[[], None]:
    """A function that activates a setup, resolved once: it holds until inlays are added, removed or changed."""
    model, inlays = bare(host), inlays_of(host)
    return partial(inlays.switch, model, inlays.resolve(model, setup))


@contextmanager
def activated(host: nn.Module, setup: Setup) -> Iterator[None]:
    """Activate a setup for the length of a `with` block, then restore what was active before."""
    before = active(host)
    activate(host, setup)
    try:
        yield
    finally:
        activate(host, before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a `with` block; then every module has its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def active(host: nn.Module) -> Setup:
    """The setup that acts now."""
    inlays = getattr(bare(host), ATTRIBUTE, None)
    return inlays.active if inlays is not None else None


def reads_whole_texts(host: nn.Module) -> bool:
    """Whether what acts in a decoder attends to all tokens of a text, so that no cache can stand for them."""
    inlays = getattr(bare(host), ATTRIBUTE, None)
    return inlays is not None and inlays.acting.plan.whole_texts


HALF = (torch.bfloat16, torch.float16)


def train(
    host: nn.Module, setup: Setup, *, only: Sequence[str] | None = None, host_too: bool = False,
    keep_dtype: bool = False,
) -> None:  # fmt: skip
    """Activate a setup and let it train: its inlays, or only those named, require gradients; all else is frozen.

    Parameters in bfloat16 or float16 that train are converted to float32, because a usual step is too small for these
    dtypes and would be lost. The frozen host stays as it is, and so does the dtype of its outputs.

    host_too:   the host's own weights train as well, except its head if every inlay of the setup has one of its own.
                With `Rows("a", "b")` several tasks then share what they learn (multi-task training). A host in half
                precision becomes float32 as a whole.
    keep_dtype: leave every parameter in its dtype, for an optimizer that keeps exact copies itself.
    """
    inlays = inlays_of(host)
    if setup is None:
        raise SetupError("nothing to train: the bare host has no inlay. Name one, as in inlay.train(host, 'rte').")
    if inlays.folded is not None:
        inlays.folded.refuse()
    learners = names_in(setup) if only is None else ((only,) if isinstance(only, str) else tuple(only))
    for name in learners:
        inlays[name]
        if name not in names_in(setup):
            raise SetupError(f"{name!r} cannot train: it is not part of {setup!r}.")
    if not keep_dtype:
        own = [parameter for _, parameter in _own_parameters(bare(host))] if host_too else []
        _check_convertible([*own, *(parameter for name in learners for parameter in inlays[name].parameters())])
    activate(host, setup)
    freeze(host)
    for name in learners:
        inlays[name].requires_grad_(True)
    if host_too:
        _train_host(bare(host), inlays, all(inlays[name].head is not None for name in names_in(setup)))
    if not keep_dtype:
        _in_single_precision(parameter for name in learners for parameter in inlays[name].parameters())
        if host_too:  # also its head that does not train: it reads what the others give
            _in_single_precision(parameter for _, parameter in _own_parameters(bare(host)))
    host.train()


def _check_convertible(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse half-precision parameters in pieces: they would say float32, and their pieces would stay as they are."""
    if odd := {parameter.dtype for parameter in parameters if parameter.dtype in HALF and in_pieces(parameter)}:
        raise SetupError(
            f"what is to train is in {' and '.join(map(str, odd))}, has to be float32, and cannot be converted any "
            f"more: each process has a piece of it. Call inlay.train before the host is sharded, or with "
            f"keep_dtype=True."
        )


def _in_single_precision(parameters: Iterable[nn.Parameter]) -> None:
    """Half-precision parameters as float32, in place: who has hold of them, such as an optimizer, still has."""
    for parameter in parameters:
        if parameter.dtype in HALF:
            parameter.data, parameter.grad = parameter.data.float(), None


def _train_host(host: PreTrainedModel, inlays: Inlays, own_heads: bool) -> None:
    """Every weight of the host. What own heads stand in for does not train: no gradient reaches it."""
    idle = inlays.anatomy.head if own_heads else ()
    for path, parameter in _own_parameters(host):
        if not any(path.startswith(f"{module}.") for module in idle):
            parameter.requires_grad_(True)


def _own_parameters(host: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of the host itself, without its inlays'."""
    return ((path, p) for path, p in host.named_parameters() if not path.startswith(f"{ATTRIBUTE}."))


def freeze(host: nn.Module, name: str | None = None) -> None:
    """Stop one inlay from training; or, without a name, the host and all its inlays."""
    (bare(host) if name is None else inlays_of(host)[name]).requires_grad_(False)


def remove(host: nn.Module, name: str) -> None:
    """Take an inlay off the host."""
    inlays = inlays_of(host)
    inlays[name]
    if name in names_in(inlays.active):
        raise SetupError(f"{name!r} is active. Activate something else first, for instance inlay.activate(host, None).")
    for other in inlays:
        if name in other.method.needs:
            raise SetupError(f"{name!r} is a member of the {other.method.kind} {other.name!r}. Remove that first.")
    inlays.dismiss(name)
    inlays.activate(bare(host), inlays.active)


def leave_out(host: nn.Module, name: str, layers: int | str | Sequence[int | str]) -> None:
    """Take an inlay's modules out of some layers for good (AdapterDrop): 3 is layer 3 of every stack, 'decoder.3' one.

    It costs nothing there any more. An inlay trained with `drop_first` is prepared for it.
    """
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    layers = (layers,) if isinstance(layers, int | str) else tuple(layers)
    if not hasattr(inlay.method, "leave_out"):
        raise SetupError(f"{name!r} ({inlay.method.kind}) has no layers that could be left out.")
    if inlays.folded is not None and inlays.folded.name == name:
        inlays.folded.refuse()
    inlays.anatomy.check_layers(layers)
    method = inlay.method.model_copy(update={"leave_out": (*inlay.method.leave_out, *layers)})
    stays = {place.id for place in method.places(inlays.anatomy)}  # what `load` will look for in a saved inlay
    changing = {i for i in inlay.place_ids() if inlays.anatomy.places[i].changes}
    if not stays & changing:
        raise SetupError(f"{name!r} would have no module left. Remove it instead: inlay.remove(host, {name!r}).")
    for place_id in changing - stays:
        del inlay.parts[key_of(place_id)]
    with torch.random.fork_rng(devices=[]):  # the run's random numbers stay as they are
        fresh = Inlay(name, method).fill(model, inlays.anatomy, device="meta")
    for shared in inlay.shared._modules.keys() - fresh.shared._modules.keys():  # of stacks where nothing is left
        delattr(inlay.shared, shared)
    inlay.take_method(method)
    inlays.unhook_unneeded()
    inlays.activate(model, inlays.active)


def strip(host: nn.Module) -> None:
    """Take everything off: the host is again exactly what it was before the first `add`."""
    model = bare(host)
    inlays = getattr(model, ATTRIBUTE, None)
    if inlays is None:
        return
    if inlays.folded is not None:
        inlays.folded.refuse()
    inlays.activate(model, None)
    name_attention(model, False)
    inlays.unhook()
    delattr(model, ATTRIBUTE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in inlays.trainable_before)
    forget_compiled()


@dataclass(frozen=True)
class Row:
    """One inlay in a summary."""

    name: str
    method: str
    parameters: int
    percent: float
    active: bool
    trainable: bool


@dataclass(frozen=True)
class Summary:
    """What is on a host; prints as a table."""

    host: str
    host_parameters: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        table = [("inlay", "method", "parameters", "% of host", "")]
        for row in self.rows:
            marks = " ".join(word for word in ("active", "trainable") if getattr(row, word))
            table.append((row.name, row.method, f"{row.parameters:,}", f"{row.percent:.3f}", marks))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"{self.host}, {self.host_parameters:,} parameters"]
        for name, method, *numbers, marks in table:
            cells = [name.ljust(widths[0]), method.ljust(widths[1])]
            cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=False)]
            lines.append("  ".join([*cells, marks]).rstrip())
        return "\n".join(lines)


def summary(host: nn.Module) -> Summary:
    """Names, methods, parameters, share of the host, and what is active and trainable."""
    model = bare(host)
    inlays = getattr(model, ATTRIBUTE, None)
    ours = set(inlays.parameters()) if inlays is not None else set()
    size = sum(p.numel() for p in model.parameters() if p not in ours)
    acting = names_in(active(model))
    rows = []
    for inlay in inlays or ():
        count = sum(p.numel() for p in inlay.parameters())
        trainable = any(p.requires_grad for p in inlay.parameters())
        rows.append(Row(inlay.name, inlay.method.kind, count, 100 * count / size, inlay.name in acting, trainable))
    return Summary(type(model).__name__, size, tuple(rows))


def bare(host: nn.Module) -> PreTrainedModel:
    """The transformers model inside torch.compile's, DDP's or accelerate's wrapper."""
    while not isinstance(host, PreTrainedModel):
        inner = getattr(host, "_orig_mod", None) or getattr(host, "module", None)
        if not isinstance(inner, nn.Module):
            raise SetupError(f"a host is a transformers model, got {type(host).__name__}")
        host = inner
    return host


def inlays_of(host: nn.Module) -> Inlays:
    inlays = getattr(bare(host), ATTRIBUTE, None)
    if inlays is None:
        raise NamingError(
            "this host has no inlays yet. Start with inlay.add(host, name, method) or inlay.load(host, path)."
        )
    return inlays


def free_name(host: PreTrainedModel, name: str) -> None:
    """Refuse a name that is badly formed or taken."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise NamingError(f"{name!r} cannot be a name: {NAMES_HAVE}.")
    inlays = getattr(host, ATTRIBUTE, None)
    if inlays is not None and name in inlays:
        raise NamingError(f"the name {name!r} is taken. Choose another, or inlay.remove(host, {name!r}) first.")
