"""A slow form of setups: the branch's formula, run directly, module by module, with hooks of its own.

It knows where a family's modules are (the anatomy) and nothing of sites, steps or plans. Only for evaluation: without
dropout all modules at a branch's end give the same h, so that everything acts at the last one, in the setup's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import inlay

Change = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""(h, what was seen at this branch) to the new h."""


@contextmanager
def slowly(host: nn.Module, setup: inlay.Setup) -> Iterator[None]:
    """The bare host with a setup acting by hand."""
    anatomy = host.inlays.anatomy
    handles, seen = [], {}
    ends = {module: name for name, end in anatomy.branches.items() for module in end.modules}

    def catch(module: nn.Module, args: tuple, kwargs: dict, name: str, at: int) -> None:
        seen[name] = {"r": (*args, *kwargs.values())[at]}

    def remember(module: nn.Module, args: tuple, output: Tensor, name: str, path: str) -> None:
        seen[name][f"input of {path}"] = args[0]

    def finish(module: nn.Module, args: tuple, output: Tensor, name: str) -> Tensor:
        places = [p for p in anatomy.places.values() if p.branch == name and p.changes]
        return changed(host, setup, places, output, seen.pop(name))

    def alone(module: nn.Module, args: tuple, output: Tensor, path: str) -> Tensor:
        places = [p for p in anatomy.places.values() if p.module == path and p.changes]
        return changed(host, setup, places, output, {f"input of {path}": args[0]})

    for name, end in anatomy.branches.items():
        residual = host.get_submodule(end.residual[0])
        handles.append(residual.register_forward_pre_hook(
            lambda m, a, k, n=name, e=end: catch(m, a, k, n, e.residual[1]), with_kwargs=True, prepend=True
        ))  # fmt: skip
        for path in end.modules:
            handles.append(
                host.get_submodule(path).register_forward_hook(lambda m, a, o, n=name, p=path: remember(m, a, o, n, p))
            )
        last = host.get_submodule(end.modules[-1])
        handles.append(last.register_forward_hook(lambda m, a, o, n=name: finish(m, a, o, n)))
    outputs = [p for p in anatomy.places.values() if p.changes and p.acts == "output"]
    for path in {p.module for p in outputs if p.module not in ends}:
        handles.append(host.get_submodule(path).register_forward_hook(lambda m, a, o, p=path: alone(m, a, o, p)))
    inlay.activate(host, None)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def changed(
    host: nn.Module, setup: inlay.Setup, places: list, h: Tensor, seen: dict[str, Tensor], around: Callable = lambda part: part
) -> Tensor:  # fmt: skip
    """What a setup makes of h, where one inlay acts at its places in the order projection, bias, before, after dropout.

    around: a part to the setup that would act if that part were alone in every Average around it.
    """
    if isinstance(setup, inlay.Stack):
        for at, part in enumerate(setup.parts):
            others = lambda inner, at=at: around(inlay.Stack(*setup.parts[:at], inner, *setup.parts[at + 1 :]))
            h = changed(host, part, places, h, seen, others)
        return h
    if isinstance(setup, inlay.Average):
        results = [changed(host, part, places, h, seen, around) for part in setup.parts]
        return sum(w * result for w, result in zip(setup.weights, results, strict=True))
    if setup is None:
        return h
    order = {
        "o": 0,
        "ffn_out": 0,
        "bias": 1,
        "head_bias": 1,
        "attention.raw": 2,
        "ffn.raw": 2,
        "attention": 3,
        "ffn": 3,
    }
    for place in sorted(places, key=lambda p: order.get(p.kind, 0)):
        module = host.inlays[setup].part(place)
        if module is None:
            continue
        x = read(host, host.inlays[setup].method.reads_at(place), place, h, seen, around(setup))
        delta = module(x)
        if place.projection is not None and place.projection.parts > 1:
            wide = torch.zeros_like(h)
            columns = torch.arange(h.shape[-1])
            p = place.projection
            blocks = (
                columns.view(place.heads, p.parts, -1)[:, p.part] if p.per_head else columns.view(p.parts, -1)[p.part]
            )
            wide[..., blocks.flatten()] = delta
            delta = wide
        h = h + delta
    return h


def read(host: nn.Module, reads: str, place, h: Tensor, seen: dict[str, Tensor], whole: inlay.Setup) -> Tensor:
    if reads == "output":
        return h
    if reads == "input":
        return seen[f"input of {place.module}"]
    if reads == "residual":
        return seen["r"].view_as(h)
    x = h + seen["r"].view_as(h)
    if reads == "stream" or place.norm is None:
        return x
    norm = host.get_submodule(place.norm)
    biases = [p for p in host.inlays.anatomy.places.values() if p.module == place.norm and p.changes]
    return changed(host, whole, biases, norm.forward(x), {})
