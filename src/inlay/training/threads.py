"""How many threads torch should use on this machine."""

from __future__ import annotations

import os


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_threads() -> int:
    """Half of the cores that this process may use, at least one.

    Small layers gain little from many threads, and where cores are shared, threads that wait for each other can be ten
    times slower than one. It depends on the machine alone and not on its load: results stay bit-equal.
    """
    return max(1, cores() // 2)


def use_threads(count: int | None) -> int:
    """Set torch's threads; returns how many."""
    import torch

    count = count or usual_threads()
    torch.set_num_threads(count)
    return count
