"""Inlay: small trainable pieces set into a frozen transformer, one set per task.

The whole public API is on this screen. Names load on first use, so that `import inlay` and `inlay --help` are quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.anatomy.families import register_family
    from inlay.anatomy.places import Branch, Family, Layers, Projection
    from inlay.checkpoints.export import export
    from inlay.checkpoints.load import load
    from inlay.checkpoints.ours import save
    from inlay.compose.activations import FusionActivations, fusion_activations
    from inlay.compose.average import average
    from inlay.compose.collapse import Collapse, collapse
    from inlay.compose.consistency import MixtureLoss, mixture_loss
    from inlay.compose.ensemble import ensemble, routing
    from inlay.compose.fold import fold, unfold
    from inlay.compose.fuse import add_fusion, penalty
    from inlay.compose.merge import merge
    from inlay.compose.prune import prune
    from inlay.errors import AnatomyError, CheckpointError, ConfigError, InlayError, NamingError, SetupError
    from inlay.host.count import count
    from inlay.host.heads import Head
    from inlay.host.setup import Average, Fuse, Rows, Setup, Stack
    from inlay.host.verbs import activate, activated, active, add, freeze, leave_out, remove, strip, summary, train
    from inlay.methods import (
        IA3,
        METHODS,
        PAL,
        PHM,
        SAID,
        AdapterDrop,
        Bapna,
        BitFit,
        Compacter,
        CompacterPlusPlus,
        HeadOnly,
        Houlsby,
        LoRA,
        LowRank,
        Method,
        Mixture,
        Parallel,
        Pfeiffer,
        Prefix,
        Prompt,
        UniPELT,
    )
    from inlay.report.plots import plot_fusion

__version__ = "0.1.0"

_PUBLIC = {
    "inlay.host.verbs": (
        "activate", "activated", "active", "add", "freeze", "leave_out", "remove", "strip", "summary", "train",
    ),
    "inlay.host.setup": ("Average", "Fuse", "Rows", "Setup", "Stack"),
    "inlay.host.heads": ("Head",),
    "inlay.host.count": ("count",),
    "inlay.compose.fuse": ("add_fusion", "penalty"),
    "inlay.compose.prune": ("prune",),
    "inlay.compose.collapse": ("Collapse", "collapse"),
    "inlay.compose.activations": ("FusionActivations", "fusion_activations"),
    "inlay.compose.consistency": ("MixtureLoss", "mixture_loss"),
    "inlay.compose.merge": ("merge",),
    "inlay.compose.ensemble": ("ensemble", "routing"),
    "inlay.compose.average": ("average",),
    "inlay.compose.fold": ("fold", "unfold"),
    "inlay.checkpoints.ours": ("save",),
    "inlay.checkpoints.load": ("load",),
    "inlay.checkpoints.export": ("export",),
    "inlay.report.plots": ("plot_fusion",),
    "inlay.methods": (
        "METHODS", "Method", "Houlsby", "Pfeiffer", "Parallel", "Bapna", "AdapterDrop", "PHM", "Compacter",
        "CompacterPlusPlus", "LowRank", "BitFit", "LoRA", "Mixture", "HeadOnly",
        "IA3", "Prefix", "Prompt", "SAID", "UniPELT", "PAL",
    ),
    "inlay.anatomy.families": ("register_family",),
    "inlay.anatomy.places": ("Branch", "Family", "Layers", "Projection"),
    "inlay.errors": ("AnatomyError", "CheckpointError", "ConfigError", "InlayError", "NamingError", "SetupError"),
}  # fmt: skip
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inlay' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
