"""Inlay: small trainable pieces set into a frozen transformer, one set per task.

The whole public API is on this screen. Names load on first use, so that `import inlay` and `inlay --help` are quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.analysis.activations import FusionActivations, fusion_activations
    from inlay.analysis.plots import plot_fusion
    from inlay.anatomy import Branch, Family, Layers, Projection, register_family
    from inlay.checkpoint import load, save
    from inlay.errors import AnatomyError, CheckpointError, ConfigError, InlayError, NamingError, SetupError
    from inlay.fusions import Collapse, add_fusion, collapse, penalty, prune
    from inlay.heads import Head
    from inlay.host import activate, activated, active, add, freeze, leave_out, remove, strip, summary, train
    from inlay.interop import export
    from inlay.methods import (
        METHODS,
        PHM,
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
    )
    from inlay.mixtures import MixtureLoss, average, ensemble, fold, merge, mixture_loss, routing, unfold
    from inlay.parameters import count
    from inlay.setup import Average, Fuse, Rows, Setup, Stack

__version__ = "0.1.0"

_PUBLIC = {
    "inlay.host": (
        "activate",
        "activated",
        "active",
        "add",
        "freeze",
        "leave_out",
        "remove",
        "strip",
        "summary",
        "train",
    ),
    "inlay.checkpoint": ("load", "save"),
    "inlay.interop": ("export",),
    "inlay.fusions": ("Collapse", "add_fusion", "collapse", "penalty", "prune"),
    "inlay.analysis.activations": ("FusionActivations", "fusion_activations"),
    "inlay.analysis.plots": ("plot_fusion",),
    "inlay.setup": ("Average", "Fuse", "Rows", "Setup", "Stack"),
    "inlay.heads": ("Head",),
    "inlay.methods": (
        "METHODS",
        "Method",
        "Houlsby",
        "Pfeiffer",
        "Parallel",
        "Bapna",
        "AdapterDrop",
        "PHM",
        "Compacter",
        "CompacterPlusPlus",
        "LowRank",
        "BitFit",
        "LoRA",
        "Mixture",
        "HeadOnly",
    ),
    "inlay.mixtures": ("MixtureLoss", "average", "ensemble", "fold", "merge", "mixture_loss", "routing", "unfold"),
    "inlay.parameters": ("count",),
    "inlay.anatomy": ("Branch", "Family", "Layers", "Projection", "register_family"),
    "inlay.errors": ("AnatomyError", "CheckpointError", "ConfigError", "InlayError", "NamingError", "SetupError"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inlay' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
