"""run.json: what a run says of itself, read as strictly as every other file, and signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay.errors import CheckpointError
from inlay.storage.plain_json import digest_of, finite, read_json

Status = Literal["running", "interrupted", "diverged", "finished"]
Scores = dict[str, float | None]


class Record(BaseModel):
    """What run.json may hold. Every field is optional: a record grows, and earlier versions noted less."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    status: Status | None = None
    task: dict[str, Any] | None = None
    host: str | None = None
    mode: Literal["inlay", "head", "full", "fusion", "mt-a"] | None = None
    method: str | None = None
    name: str | None = None
    rows: dict[str, int] | None = None
    notes: list[str] | None = None
    trained_parameters: int | None = None
    host_parameters: int | None = None
    max_length: int | None = Field(default=None, ge=2)
    threads: int | None = None
    seed: int | None = None
    versions: dict[str, str] | None = None
    processes: int | None = None
    judged: Literal["train", "validation", "test"] | None = None
    scores: Scores | None = None
    validation: Scores | None = None
    best_step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    examples_per_second: float | None = None
    padding: float | None = None
    pruned_from: str | None = None
    faster: float | None = None
    """A pruned fusion: how many times as fast it answers."""
    settings: dict[str, Any] | None = None
    """Every setting of the run; config.yaml is the same for people."""
    rows_sha256: dict[str, str] | None = None
    host_weights: str | None = None
    """The fingerprint of the host's weights when the run began."""
    inlay_sha256: str | None = None
    """The digest of the inlay's manifest, and with it of its weights."""
    files: dict[str, str] | None = None
    """After full fine-tuning: the digests of the host's files."""
    peak_megabytes: float | None = None
    tasks: dict[str, dict[str, Any]] | None = None
    """A joint run: of each task what a run of its own would say."""
    members_sha256: dict[str, str] | None = None
    """A fusion: what its members were when it began."""
    attention: dict[str, dict[str, float]] | None = None
    """A fusion: the mean weight of each member at each place, on the rows that it was judged by."""
    sha256: str | None = None


NEEDED = ("status", "task", "host", "mode", "name", "rows", "max_length")
"""What a run that is used must have said."""


def read_record(file: Path) -> dict[str, Any]:
    """A record that is whole and of a run of ours."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not the record of a run: it holds no object.")
    if "sha256" in found and found["sha256"] != digest_of(found):
        raise CheckpointError(f"{file} is cut or altered: its content does not match its sha256.")
    try:
        Record.model_validate(found)
    except ValidationError as error:
        listed = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise CheckpointError(f"{file} is not the record of a run: {listed}.") from None
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise CheckpointError(f"{file} is not the record of a run: it says nothing about {', '.join(missing)}.")
    return found


def signed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its own digest."""
    whole = finite(record)
    return whole | {"sha256": digest_of(whole)}
