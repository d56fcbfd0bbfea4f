"""The maths: one method per file."""

from inlay.methods.base import METHODS, Method, method_from
from inlay.methods.bottleneck import Bapna, Bottleneck, Houlsby, Parallel, Pfeiffer

__all__ = ["METHODS", "Bapna", "Bottleneck", "Houlsby", "Method", "Parallel", "Pfeiffer", "method_from"]
