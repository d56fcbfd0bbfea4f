"""One task's training job, ready before its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from inlay.data import Prepared
from inlay.host.verbs import inlays_of
from inlay.runs.settings import Settings
from inlay.training.codec import Answer, Codec, EncodedSplit


@dataclass(frozen=True)
class Job:
    """Everything that is ready before the first step."""

    settings: Settings
    prepared: Prepared
    host: PreTrainedModel
    codec: Codec
    name: str | None
    """The inlay's name; None where the host alone trains."""

    def split(self, name: str) -> EncodedSplit:
        return self.codec.encode(self.prepared.split(name))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth saying before the first step."""
        return self.prepared.notes

    @property
    def members(self) -> dict[str, Path]:
        """What is fused, by its names on the host."""
        if self.settings.mode != "fusion" or self.name is None:
            return {}
        return dict(zip(inlays_of(self.host)[self.name].method.needs, self.settings.members, strict=True))


Finishing = Callable[[Job, EncodedSplit, list[Answer]], None]
"""Is given a job with its best state, the judged rows and the answers to them, before the run counts as finished."""
