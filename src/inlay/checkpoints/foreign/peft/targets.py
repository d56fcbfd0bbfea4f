"""Which modules of a host the names and patterns of a peft config mean, and how to write such names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inlay.anatomy.modules import ATTRIBUTE, inside, last_word
from inlay.checkpoints.foreign.patterns import Patterns
from inlay.checkpoints.foreign.peft.options import Names, PeftOptions

V = TypeVar("V")


def target_problems(
    wanted: PeftOptions, modules: Sequence[str], places: Iterable[str], head: Sequence[str]
) -> list[str]:  # fmt: skip
    """Where the modules that have a LoRA in the file are not those of target_modules.

    Whether `all-linear` includes the head depends on peft's task type, so there the file decides.
    """
    if wanted.target_modules is None:
        return []
    patterns = Patterns()
    meant = {path for path in places if _is_target(path, wanted, patterns)}
    unsure = {path for path in meant if wanted.all_linear and inside(path, head)}
    missing = sorted(meant - unsure - set(modules))
    return [
        *(f"{path} has a LoRA, but is not among the target_modules" for path in modules if path not in meant),
        *(f"{path} is among the target_modules, but its tensors are missing" for path in missing),
    ]


def without_a_scale(
    targets: Sequence[str], excluded: Sequence[str], saved: Sequence[str], places: Iterable[str], scaled: Sequence[str]
) -> list[str]:  # fmt: skip
    """The target_modules of an IA3 that its file has no scale for."""
    if targets == "all-linear":
        return []
    patterns = Patterns()
    return [
        path for path in places
        if path not in scaled and _is_named(path, targets, patterns) and not _is_out(path, excluded, saved, patterns)
    ]  # fmt: skip


def _is_out(path: str, excluded: Sequence[str], saved: Sequence[str], patterns: Patterns) -> bool:
    """Excluded by name, or replaced as a whole."""
    return _is_named(path, excluded, patterns) or any(f".{name}." in f".{path}." for name in saved)


def _is_target(path: str, wanted: PeftOptions, patterns: Patterns) -> bool:
    """As peft decides it: a text is a pattern, a list has the ends of paths, and only a list is limited to layers."""
    if _is_out(path, wanted.exclude_modules or (), wanted.modules_to_save or (), patterns):
        return False
    targets, layers = wanted.target_modules or (), wanted.layers_to_transform
    if wanted.all_linear:
        return True
    if isinstance(targets, str) or path in targets or layers is None or layers == ():
        return _is_named(path, targets, patterns)
    number = _layer_of(path, wanted.layers_pattern, patterns)
    return _is_named(path, targets, patterns) and number in ((layers,) if isinstance(layers, int) else layers)


def _is_named(path: str, names: Sequence[str], patterns: Patterns) -> bool:
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


def host_modules(host: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The host's own modules, as peft sees them."""
    return ((path, module) for path, module in host.named_modules() if not inside(path, [ATTRIBUTE]))


def saved_by(names: Sequence[str], paths: Iterable[str]) -> list[str]:
    """The modules that modules_to_save means: those that end like one of the names, even in the middle of a word.

    So `classifier` means DistilBERT's pre_classifier too.
    """
    return [path for path in paths if path.endswith(tuple(names))]


def by_pattern(rules: Mapping[str, V] | None, path: str, usual: V, patterns: Patterns) -> V:
    """The value of the first pattern that matches a path or its end, as peft looks it up."""
    found = (value for text, value in (rules or {}).items() if patterns.matches(rf"(.*\.)?({text})", path))
    return next(found, usual)


def target_names(changed: Sequence[str], host: PreTrainedModel) -> tuple[str, ...]:
    """target_modules for these modules: their last words where all modules of that name change, else whole paths."""
    linears = [path for path, module in host_modules(host) if isinstance(module, nn.Linear | Conv1D)]

    def name(path: str) -> str:
        end = last_word(path)
        alike = {other for other in linears if other == end or other.endswith(f".{end}")}
        return end if alike <= set(changed) else path

    return tuple(dict.fromkeys(map(name, changed)))
