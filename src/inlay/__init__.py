"""Inlay: small trainable pieces set into a frozen transformer, one set per task."""

from inlay.anatomy import Branch, Family, Layers, Projection, register_family
from inlay.checkpoint import load, save
from inlay.errors import AnatomyError, CheckpointError, ConfigError, InlayError, NamingError, SetupError
from inlay.heads import Head
from inlay.host import activate, activated, active, add, freeze, remove, strip, summary, train
from inlay.methods import METHODS, Bapna, Houlsby, Method, Parallel, Pfeiffer
from inlay.setup import Average, Rows, Setup, Stack

__all__ = [
    "METHODS",
    "AnatomyError",
    "Average",
    "Bapna",
    "Branch",
    "CheckpointError",
    "ConfigError",
    "Family",
    "Head",
    "Houlsby",
    "InlayError",
    "Layers",
    "Method",
    "NamingError",
    "Parallel",
    "Pfeiffer",
    "Projection",
    "Rows",
    "Setup",
    "SetupError",
    "Stack",
    "activate",
    "activated",
    "active",
    "add",
    "freeze",
    "load",
    "register_family",
    "remove",
    "save",
    "strip",
    "summary",
    "train",
]
