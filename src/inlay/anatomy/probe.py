"""Where things are in a model family without a table entry: found by running the host on a few tokens.

    s0 ──(+ h)── s1 ──(+ h)── s2 = the layer's output    pre-LN: s1 is seen at the next norm's input
    s0 ──(+ h)─[norm]── s1 ──(+ h)─[norm]── s2           post-LN: the stream goes on after the norm
    s0 ──(+ h + h')── s2                                 both branches side by side

The inputs and outputs of all modules are recorded, and each layer is solved for the way of its residual stream from
its input to its output: which outputs h are added to which r. The same addition gives the same bits, so that there is
no tolerance to choose. A solution counts only if it is the only one, is the same in all layers, and still holds when
the host runs again with every h changed. Names tell attention from ffn and suggest the projections; those are then
tried out too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inlay.anatomy.modules import last_word, norm_modules
from inlay.anatomy.places import Branch, Family, Layers, Projection
from inlay.anatomy.record import (
    T_DECODER,
    B,
    Call,
    Known,
    T,
    Unsure,
    first_call,
    has_decoder,
    nudge,
    record,
    same,
    tensor_in,
)
from inlay.errors import AnatomyError


def probe(host: PreTrainedModel) -> Family:
    """Find out where things are in a host; raise AnatomyError, with the entry to fill in, where that is not certain."""
    try:
        return _probe(host)
    except Unsure as unsure:
        explained = _explain(host, str(unsure), unsure.known)
        try:
            return _without_branches(host, explained)
        except Unsure:
            raise AnatomyError(explained) from unsure.__cause__


def _without_branches(host: PreTrainedModel, why: str) -> Family:
    """Layers and attention projections alone: all that LoRA, trained biases and norms need."""
    calls = record(host)
    stacks = {}
    for name, path in _stacks(host, calls, whole=False).items():
        inner = [call for call in calls if call.path.startswith(f"{path}.0.")]
        linear = {
            call.path.removeprefix(f"{path}.0."): call for call in inner if isinstance(call.module, nn.Linear | Conv1D)
        }
        stacks[name or "encoder"] = Layers(path, None, None, _named_projections(host, calls, f"{path}.0.", linear))
    return Family(stacks, _not_norms(host, calls), no_branches=why)


def _named_projections(
    host: PreTrainedModel, calls: list[Call], layer: str, linear: Mapping[str, Call]
) -> dict[str, tuple[Projection, ...]]:
    """q, k, v and o where they prove right: o is the first linear map that reads what attention gave."""
    first = {role: call for role, name in NAMES.items() for p, call in linear.items() if name.fullmatch(last_word(p))}
    after = [p for p, call in linear.items() if first and call.start > max(c.end for c in first.values())]
    for o in after[:1]:
        found = _qkv(host, calls, layer, {p: call for p, call in linear.items() if p != o}, o)
        if found:
            roles: dict[str, tuple[Projection, ...]] = {role: (projection,) for role, projection in found.items()}
            return roles | {"o": (Projection(o),)}
    return {}


def _probe(host: PreTrainedModel) -> Family:
    calls = record(host)
    paths = _stacks(host, calls)
    solved: dict[str, list[list[Found]]] = {}
    branches: dict[str, dict[str, Branch]] = {path: {} for path in paths.values()}
    try:
        for path in branches:
            solved[path] = _solve(host, calls, path)
            branches[path] = _agree(path, solved[path])
    except Unsure as unsure:
        raise Unsure(str(unsure), branches | unsure.known) from None
    outputs = [
        f"{path}.{index}.{branch.output}"
        for path, layers in solved.items() for index in range(len(layers)) for branch in branches[path].values()
    ]  # fmt: skip
    nudged = record(host, dict.fromkeys(outputs, nudge), last=1)
    stacks = {}
    for name, path in paths.items():
        _check_again(path, branches[path], _solve(host, nudged, path))
        attention, ffn = branches[path]["attention"], branches[path]["ffn"]
        before, after = (tensor_in(first_call(c, f"{path}.0.{attention.output}").output) for c in (calls, nudged))
        if torch.equal(before[0, 1:], before[1, 1:]):
            raise Unsure(f"no token of {path}.0 attended to the first one", {path: branches[path]})
        causal = torch.equal(before[:, :-1], after[:, :-1])  # another last token, and none before it noticed
        roles = _projections(host, calls, path, solved[path])
        stacks[name or ("decoder" if causal else "encoder")] = Layers(path, attention, ffn, roles)
    return Family(stacks, _not_norms(host, calls))


def _not_norms(host: PreTrainedModel, calls: list[Call]) -> tuple[str, ...]:
    """Norms that see no rows of the batch: DeBERTa's norm of relative positions."""
    on_rows = {call.path for call in calls if call.on_rows}
    return tuple(path for path in norm_modules(host.base_model) if path not in on_rows)


# ── the stacks of layers ──


def _lists(host: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Lists of modules of one class, without the lists inside other lists."""
    lists: dict[str, nn.ModuleList] = {}
    for path, module in host.base_model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not path.startswith(tuple(f"{p}." for p in lists)):
            lists[path] = module
    return {path: layers for path, layers in lists.items() if len({type(layer) for layer in layers}) == 1}


def _stacks(host: PreTrainedModel, calls: list[Call], whole: bool = True) -> dict[str, str]:
    """The path of each stack of layers, by name; the name of an only stack is not known yet.

    whole: its layers have to take and give hidden states, as is needed to follow the residual stream.
    """
    count = Counter(call.path for call in calls)
    size = {p: len(layers) for p, layers in _lists(host).items() if all(count[f"{p}.{i}"] for i in range(len(layers)))}
    width = host.config.get_text_config().hidden_size
    stacks = {}
    for part in ("encoder", "decoder") if has_decoder(host) else ("",):
        longest = max((n for p, n in size.items() if p.startswith(part)), default=0)
        found = [p for p, n in size.items() if p.startswith(part) and n == longest]
        if len(found) != 1:
            which = f"its {part}'s" if part else "its"
            raise Unsure(f"no list of modules of one class was run that could be {which} layers" if not found else
                         f"several lists of modules may be {which} layers: {', '.join(found)}")  # fmt: skip
        path = stacks[part] = found[0]
        if any(count[f"{path}.{i}"] > 1 for i in range(longest)):
            raise shared_layers(type(host).__name__, f" ({path})")
        layer = first_call(calls, f"{path}.0")
        if whole and any(x is None or x.shape[-1] != width for x in (*layer.inputs[:1], layer.output)):
            raise Unsure(f"the layers of {path} do not take and give hidden states (rows, tokens, {width})", {path: {}})
    return stacks


def shared_layers(host: str, where: str = "") -> AnatomyError:
    """Why a host whose layers have one set of weights is refused."""
    return AnatomyError(
        f"{host} runs one layer's weights several times{where}, so an inlay could not tell its layers apart. "
        f"Hosts whose layers have their own weights work, such as bert or electra."
    )


# ── the branches of a layer ──


@dataclass(frozen=True)
class Sum:
    """r + h, or r + h + h' of branches side by side; then a norm, or none."""

    r: Tensor
    hs: tuple[Tensor, ...]
    norm: str = ""


@dataclass(frozen=True)
class Found:
    """One branch of one layer, with all names under which its tensors are seen."""

    kind: str
    """attention, cross or ffn."""
    outputs: list[str]
    """Modules that give h, in the order they end: a projection, its dropout, the module around them."""
    residuals: list[tuple[str, int]]
    norm: str
    window: list[Call]
    """The calls that make h."""


def _solve(host: PreTrainedModel, calls: list[Call], path: str) -> list[list[Found]]:
    """The branches of every layer of a stack."""
    layers = []
    for name, _ in host.base_model.get_submodule(path).named_children():
        prefix = f"{path}.{name}"
        layer = first_call(calls, prefix)
        inner = [replace(c, path=c.path.removeprefix(f"{prefix}.")) for c in calls if c.path.startswith(f"{prefix}.")]
        count = Counter(call.path for call in inner)
        once = [call for call in inner if count[call.path] == 1]  # a module called twice is no place for a hook
        ways = list(_ways(tensor_in(layer.inputs[0]), -1, (), once, tensor_in(layer.output)))
        whole = [sums for sums, arrived in ways if arrived]
        if len(whole) != 1:
            known = _branches(max((sums for sums, _ in ways), key=len), inner, once)
            ways_found = "several ways" if whole else "no way"
            raise Unsure(
                f"there is {ways_found} to add up outputs of modules to what {prefix} gives",
                {path: {found.kind: _branch([found]) for found in known}},
            )
        layers.append(_branches(whole[0], inner, once))
    return layers


def _ways(
    s: Tensor, now: int, sums: tuple[Sum, ...], calls: list[Call], goal: Tensor
) -> Iterator[tuple[tuple[Sum, ...], bool]]:
    """Every way of the residual stream on from s, and whether it arrives at the layer's output."""
    arrived = bool(sums) and same(s, goal)
    yield sums, arrived
    if arrived:
        return
    for norm in calls:
        if norm.is_norm and norm.plain and norm.start > now and same(norm.inputs[0], s):
            after = (*sums[:-1], replace(sums[-1], norm=sums[-1].norm or norm.path)) if sums else ()
            yield from _ways(tensor_in(norm.output), norm.end, after, calls, goal)
    later = _distinct([c for c in calls if c.plain and c.end > now], s.shape)
    alone = False
    for end, h in later:
        t = s + h
        if same(t, goal) or any(same(t, x) for c in calls if c.start > end for x in c.inputs):
            alone = True
            yield from _ways(t, end, (*sums, Sum(s, (h,))), calls, goal)
    for (_, a), (_, b) in itertools.combinations(later, 2) if not alone else ():
        if any(same(t, goal) for t in ((a + b) + s, (a + s) + b, (b + s) + a)):  # each order rounds in its own way
            yield (*sums, Sum(s, (a, b))), True


def _distinct(calls: list[Call], shape: torch.Size) -> list[tuple[int, Tensor]]:
    """Every output once, with the time it was first there; not those of zeros, which any sum would hold for."""
    found: list[tuple[int, Tensor]] = []
    for call in sorted(calls, key=lambda c: c.end):
        h = call.output
        if h is not None and h.shape == shape and bool(h.any()) and not any(same(h, other) for _, other in found):
            found.append((call.end, h))
    return found


def _branches(sums: tuple[Sum, ...], inner: list[Call], once: list[Call]) -> list[Found]:
    def giving(h: Tensor | None) -> list[Call]:
        return sorted((call for call in once if call.plain and same(call.output, h)), key=lambda c: c.end)

    chains = []
    for total in sums:
        for chain in map(giving, total.hs):
            # Gemma 2 norms a branch's output: what it norms is the raw output
            before = giving(chain[0].inputs[0]) if chain[0].is_norm else []
            chains.append((total, before + chain))
    found: list[Found] = []
    since = -1
    for total, chain in sorted(chains, key=lambda item: item[1][-1].end):
        window = [call for call in inner if since < call.start < chain[-1].end]
        since = chain[-1].end
        seen = [(c, i) for c in once if c.start < chain[0].end for i, x in enumerate(c.inputs) if same(x, total.r)]
        seen.sort(key=lambda at: (len(at[0].inputs), at[1], at[0].start))  # an only input cannot change its place
        kind = _kind(window, tensor_in(chain[-1].output))
        found.append(Found(kind, [c.path for c in chain], [(c.path, i) for c, i in seen], total.norm, window))
    return found


def _kind(window: list[Call], h: Tensor) -> str:
    workers = (c for c in window if not c.is_norm and not isinstance(c.module, nn.Dropout))  # post_attention_layernorm
    if not any(re.search("attn|attention", f"{c.path} {type(c.module).__name__}", re.IGNORECASE) for c in workers):
        return "ffn"
    longer = (x for c in window for x in c.inputs if x is not None and x.shape[-1] == h.shape[-1] and x.shape[1] >= T)
    return "cross" if h.shape[1] == T_DECODER and any(True for _ in longer) else "attention"


def _branch(found: list[Found]) -> Branch:
    """What one branch has in common in all layers; ? where there is nothing."""
    outputs = [name for name in found[0].outputs if all(name in f.outputs for f in found)] or ["?"]
    residuals = [at for at in found[0].residuals if all(at in f.residuals for f in found)] or [("?", 0)]
    norm = found[0].norm if len({f.norm for f in found}) == 1 else "?"
    return Branch(outputs[-1], residuals[0], norm, outputs[0] if len(outputs) > 1 else "")


def _agree(path: str, layers: list[list[Found]]) -> dict[str, Branch]:
    """One answer for all layers of a stack."""
    by_kind: dict[str, list[Found]] = {}
    for found in itertools.chain.from_iterable(layers):
        by_kind.setdefault(found.kind, []).append(found)
    known = {kind: _branch(found) for kind, found in by_kind.items()}
    for index, layer in enumerate(layers):
        kinds = sorted(found.kind for found in layer)
        if kinds not in (["attention", "ffn"], ["attention", "cross", "ffn"]):
            seen = ", ".join(f"{found.outputs[-1]} ({found.kind})" for found in layer)
            raise Unsure(f"{path}.{index} should have one attention and one ffn branch, but has {seen}", {path: known})
    unclear = [kind for kind, branch in known.items() if "?" in (branch.output, branch.residual[0], branch.norm)]
    if unclear:
        raise Unsure(f"no module of {path} is the place of the {' or '.join(unclear)} in all layers", {path: known})
    return known


def _check_again(path: str, branches: dict[str, Branch], layers: list[list[Found]]) -> None:
    """With every h changed, the sums have to hold at the same modules: then they were no coincidence."""
    for index, layer in enumerate(layers):
        now = {found.kind: found for found in layer}
        for kind, b in branches.items():
            found = now.get(kind)
            held = found and b.output in found.outputs and b.residual in found.residuals and b.norm == found.norm
            if not held:
                raise Unsure(f"changing what {path}.{index}.{b.output} gives did not change the sum", {path: branches})


# ── projections ──

NAMES = {
    role: re.compile(rf"(w|to_)?({role}|{word})(_?(proj|projection|lin|linear|layer))?", re.IGNORECASE)
    for role, word in (("q", "query"), ("k", "key"), ("v", "value"))
}


def _projections(
    host: PreTrainedModel, calls: list[Call], path: str, layers: list[list[Found]]
) -> dict[str, tuple[Projection, ...]]:
    """Linear maps by role, of all layers together; a role that is not certain is left out."""
    roles: dict[str, dict[Projection, None]] = {}
    for found in itertools.chain.from_iterable(layers):
        linear = {c.path: c for c in found.window if isinstance(c.module, (nn.Linear, Conv1D))}
        last = [name for name in linear if name in found.outputs]
        if len(last) != 1:  # a mixture of experts adds up several
            continue
        linear.pop(last[0])
        first = [c.inputs[0] for c in linear.values()]
        new = {"ffn_out" if found.kind == "ffn" else "o": [Projection(last[0])]}
        if found.kind != "ffn":
            if found in layers[0]:
                new |= {role: [p] for role, p in _qkv(host, calls, f"{path}.0.", linear, last[0]).items()}
            new = {f"cross_{role}" if found.kind == "cross" else role: p for role, p in new.items()}
        elif first and all(same(x, first[0]) for x in first):
            new["ffn_in"] = [Projection(name) for name in linear]
        for role, projections in new.items():
            roles.setdefault(role, {}).update(dict.fromkeys(projections))
    return {role: tuple(projections) for role, projections in roles.items()}


def _qkv(
    host: PreTrainedModel, calls: list[Call], layer: str, linear: Mapping[str, Call], o: str
) -> dict[str, Projection]:
    """The first guess that proves right: by names, or three parts of one map, one after the other or head by head."""
    named = {r: Projection(p) for r, name in NAMES.items() for p in linear if name.fullmatch(last_word(p))}
    guesses = [named] if len(named) == 3 else []
    for path, call in linear.items() if not named else ():
        x, y = call.inputs[0], call.output
        if x is not None and y is not None and y.shape[-1] == 3 * x.shape[-1]:
            guesses += [{r: Projection(path, i, 3, heads) for i, r in enumerate("qkv")} for heads in (False, True)]
    return next((guess for guess in guesses if _attends(host, calls, layer, guess, o)), {})


def _attends(host: PreTrainedModel, calls: list[Call], layer: str, guess: Mapping[str, Projection], o: str) -> bool:
    """Whether doubling every value and the first token's query doubles what the other tokens get, to the bit.

    Another key of the first token would change what the others attend to: so this tells queries from keys as well.
    """
    heads = getattr(host.config.get_text_config(), "num_attention_heads", 1)

    def doubled(p: Projection, tokens: slice, y: Tensor) -> Tensor:
        blocks = heads if p.per_head else 1
        if y.shape[0] != B or y.shape[-1] % (blocks * p.parts):  # DeBERTa projects its relative positions too
            return y
        parts = y.unflatten(-1, (blocks, p.parts, -1)).clone()
        parts[:, tokens, :, p.part] *= 2
        return parts.flatten(-3)

    def change(path: str, y: Tensor) -> Tensor:
        for role, tokens in (("q", slice(1)), ("v", slice(None))):
            y = doubled(guess[role], tokens, y) if guess[role].path == path else y
        return y

    changes = {layer + p.path: (lambda y, path=p.path: change(path, y)) for p in guess.values()}
    before, after = (first_call(c, layer + o).inputs[0] for c in (calls, record(host, changes, until=layer + o)))
    if before is None or after is None or not bool(before.any()):
        return False
    return same(2 * before[:, 1:], after[:, 1:])


# ── when it is not certain ──


def _explain(host: PreTrainedModel, reason: str, known: Known) -> str:
    """Why, what the layers are made of, and the entry to fill in."""
    lists = list(known) or list(_lists(host))
    lines = [f"{type(host).__name__} has no entry in Inlay's table, and probing it was not certain: {reason}."]
    for path in lists:
        layer = host.base_model.get_submodule(f"{path}.0")
        lines.append(f"{path}.0 is a {type(layer).__name__}:")
        lines += [f"    {name:<40} {type(module).__name__}" for name, module in layer.named_modules() if name]
    lines.append("Fill in each ? and call this before anything else (stack: 'decoder' if causal; norm: '' if pre-LN):")
    lines.append(f"inlay.register_family({host.config.get_text_config().model_type!r}, inlay.Family({{")
    both = has_decoder(host)
    for path in lists if both or len(lists) == 1 else ["?"]:
        stack = next((part for part in ("encoder", "decoder") if both and path.startswith(part)), "?")
        lines.append(f"    {stack!r}: inlay.Layers(\n        {path!r},")
        for kind in ("attention", "ffn"):
            b = known.get(path, {}).get(kind, Branch("?", ("?", 0), "?"))
            lines.append(f"        {kind}=inlay.Branch({b.output!r}, {b.residual!r}, norm={b.norm!r}, raw={b.raw!r}),")
        lines.append("    ),")
    return "\n".join([*lines, "}))"])
