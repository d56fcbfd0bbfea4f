"""The maths: one method per file."""

from inlay.methods.base import METHODS, Method, method_from
from inlay.methods.bitfit import BitFit
from inlay.methods.bottleneck import AdapterDrop, Bapna, Bottleneck, Houlsby, Parallel, Pfeiffer
from inlay.methods.compacter import Compacter, CompacterPlusPlus
from inlay.methods.fusion import Fusion
from inlay.methods.head import HeadOnly
from inlay.methods.ia3 import IA3
from inlay.methods.lora import LoRA
from inlay.methods.lowrank import LowRank
from inlay.methods.mixture import Mixture
from inlay.methods.pal import PAL
from inlay.methods.phm import PHM
from inlay.methods.prefix import Prefix
from inlay.methods.prompt import Prompt
from inlay.methods.said import SAID
from inlay.methods.unipelt import UniPELT

__all__ = [
    "IA3",
    "METHODS",
    "PAL",
    "PHM",
    "SAID",
    "AdapterDrop",
    "Bapna",
    "BitFit",
    "Bottleneck",
    "Compacter",
    "CompacterPlusPlus",
    "Fusion",
    "HeadOnly",
    "Houlsby",
    "LoRA",
    "LowRank",
    "Method",
    "Mixture",
    "Parallel",
    "Pfeiffer",
    "Prefix",
    "Prompt",
    "UniPELT",
    "method_from",
]
