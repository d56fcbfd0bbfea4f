"""What cells will cost: time, memory and disk, guessed before anything has run, better with each cell that is done.

The guess counts multiplications: 2 for each weight and token forwards, twice that backwards where everything trains and
half of it where the host is frozen; a small product of matrices says how many this machine does in a second.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from inlay.studies.plan import Cell, View
from inlay.studies.ways import Draft, Slot

USUAL_ROWS, USUAL_JUDGED = 3000, 1500
"""Training and judged rows where nothing is known."""
BASE_MEGABYTES = 600.0
"""A process with torch and transformers in it."""
Key = tuple[Any, ...]


class Costs:
    """Of the cells of one study."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.took: dict[Key, list[float]] = defaultdict(list)
        """Seconds of cells that are done, by what they have in common."""
        self.peaks: dict[Key, float] = {}
        self.ratios: list[float] = []
        """How far guesses were off."""
        self.known: set[str] = set()
        self.chains: dict[str, float] = {}
        """Seconds of the longest chain that waits for a way, until more is learned."""
        self.learn()

    def learn(self) -> None:
        """From the cells that have been done since the last time."""
        self.chains.clear()
        cells = self.view.names()
        for name, result in self.view.results.items():
            if name in self.known or name not in cells:
                continue
            self.known.add(name)
            draft = cells[name].draft
            peak = result.get("peak_megabytes")
            if peak:
                key = self._like(draft.slot)
                self.peaks[key] = max(peak, self.peaks.get(key, 0.0))
            seconds = result.get("whole_seconds")  # with reading, opening and judging
            if seconds and not result.get("resumed"):
                self.took[draft.slot.way, draft.slot.task, draft.slot.rows, draft.slot.host].append(seconds)
                self.ratios.append(seconds / max(1e-6, self.guess(draft)))

    def _like(self, slot: Slot) -> Key:
        return slot.host, self.view.plan.study.ways[slot.way].kind

    def seconds(self, cell: Cell) -> float:
        return self.seconds_of(cell.draft)

    def seconds_of(self, draft: Draft) -> float:
        """What cells of the same slots took; else the guess, corrected by how the others were."""
        slot = draft.slot
        took = self.took.get((slot.way, slot.task, slot.rows, slot.host))
        if took:
            return statistics.mean(took)
        return self.guess(draft) * (statistics.median(self.ratios) if self.ratios else 1.0)

    def urgency(self, cell: Cell) -> float:
        """Seconds of the cell and of the longest chain of ways that waits for it: the longest chain is begun first."""
        return self.seconds(cell) + self._chain(cell.slot.way)

    def _chain(self, way: str) -> float:
        if way not in self.chains:
            study = self.view.plan.study
            waiting = [name for name, other in study.ways.items() if way in other.needs()]
            self.chains[way] = max((self._usual(name) + self._chain(name) for name in waiting), default=0.0)
        return self.chains[way]

    def _usual(self, way: str) -> float:
        """Of one cell of a way."""
        draft = next((made[0] for slot, made in self.view.plan.drafts.items() if slot.way == way), None)
        return self.seconds_of(draft) if draft is not None else 0.0

    def guess(self, draft: Draft) -> float:
        """Seconds, by counting multiplications."""
        if draft.work == "part":
            return 0.1
        host = self.view.plan.study.hosts[draft.slot.host]
        size, settings = host_size(host), draft.settings
        rows = draft.slot.rows or self._rows(draft.slot.task)
        epochs = settings.get("epochs") or {"embeddings": 1, "route": 0}.get(draft.work, 10)
        tokens = min(int(settings.get("max_length", 256)), 48)
        judged = USUAL_JUDGED + epochs * min(settings.get("eval_rows") or 1000, 1000, max(50, rows // 10))
        train = {"full": 6.0, "mt-a": 6.0, "head": 2.0}.get(settings["mode"], 4.0) * (len(draft.members) / 8 + 1)
        if draft.work == "embeddings":
            train = 2.0
        elif draft.work == "setfit":  # texts in pairs: of n rows about 0.6 n² pairs
            epochs, train, rows = draft.more["epochs"], 6.0, int(1.2 * rows * rows)
        rows *= len(settings.get("tasks", ("one",)))
        passes = 2 if settings.get("method") == "mixture" else 1
        seen = rows * epochs
        if settings.get("max_steps"):
            seen = min(seen, settings["max_steps"] * settings.get("batch_size", 32))
        work = (size / 4 - looked_up(host)) * tokens * (seen * train * passes + 2.0 * judged)
        return 1.0 + work / (self.speed() * 1e9)

    def _rows(self, task: str) -> int:
        """Training rows of a task, as those of its cells that are done say."""
        for result in self.view.results.values():
            if result["task"]["name"] == task:
                return int(result["rows"]["train"])
        return USUAL_ROWS

    @staticmethod
    @cache
    def speed() -> float:
        """Thousand million operations that one thread does in a second on small matrices."""
        import numpy as np
        from threadpoolctl import threadpool_limits

        one = np.ones((256, 384), dtype=np.float32)
        other = np.ones((384, 384), dtype=np.float32)
        with threadpool_limits(1):
            one @ other
            began, count = time.process_time(), 0
            while time.process_time() - began < 0.05:
                one @ other
                count += 1
        return 0.5 * count * 2 * 256 * 384 * 384 / (time.process_time() - began) / 1e9

    def megabytes(self, cell: Cell) -> float:
        """What cells of this kind needed at most; else the host's weights, and four times them if they train."""
        known = self.peaks.get(self._like(cell.slot))
        if known is not None:
            return known
        size = host_size(self.view.plan.study.hosts[cell.slot.host]) / 1024**2
        whole = cell.draft.work == "setfit" or cell.draft.settings["mode"] in ("full", "mt-a")
        return BASE_MEGABYTES + size * (5 if whole else 2)

    def disk(self, draft: Draft) -> float:
        """Megabytes that stay: an inlay's, a fusion's with its members, or a host's where it is kept."""
        size = host_size(self.view.plan.study.hosts[draft.slot.host]) / 1024**2
        if draft.work == "joint":
            return size * 1.1 if draft.settings["mode"] == "mt-a" else 0.1 * size
        if draft.work != "train":
            return 0.01
        mode = draft.settings["mode"]
        if mode == "full":
            return size if self.view.plan.study.keep == "all" else 0.1
        return {"head": 0.1, "fusion": 0.15 * size + 0.02 * size * len(draft.members)}.get(mode, 0.02 * size) + 0.2

    def left(self) -> float | None:
        """Seconds of one process for all that is not done; None where nothing is known yet."""
        if not self.known:
            return None
        view, total = self.view, 0.0
        for slot, made in view.plan.drafts.items():
            if slot in view.filled or slot in view.failed:
                continue
            if slot in view.cells:
                total += sum(self.seconds(cell) for cell in view.cells[slot] if cell.name not in view.results)
            else:
                total += sum(map(self.seconds_of, made))
        return total


@cache
def host_size(host: str) -> float:
    """Bytes of a host's weights; of one that is not here yet, those of a small one."""
    folder = Path(host)
    found = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    found = found or (sum(file.stat().st_size for file in folder.glob("*.bin")) if folder.is_dir() else 0)
    return float(found or 440e6)


@cache
def looked_up(host: str) -> float:
    """Weights that are looked up instead of multiplied with: a row for each word."""
    try:
        config = json.loads((Path(host) / "config.json").read_text(encoding="utf-8"))
        words = config["vocab_size"] * config.get("hidden_size", config.get("d_model", 0))
    except (OSError, ValueError, KeyError):
        return 0.0
    return float(words) if words < host_size(host) / 4 else 0.0
