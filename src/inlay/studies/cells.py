"""A study's folder, and the cells in it.

study.json              the study, and the digests of its hosts and rows: enough to make tables on another machine
cells/<name>/           one cell: a run folder, and cell.json when it is done
cells/<name>/cell.json  what tables and figures need of it, small, signed, without a row of the data
records/<name>.json     the same of a cell that was run elsewhere: it counts as done
failed/<name>.json      how often a cell broke, and how
leases/<name>           held by the process that runs the cell, and free again when that ends, however it ends
log.jsonl               when each cell was begun, and how it ended
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from inlay.errors import CheckpointError, ConfigError
from inlay.runs.record import signed
from inlay.storage.files import write_whole
from inlay.storage.plain_json import as_json, digest_of, read_json

FORMAT = 1
STUDY, RESULT, LOG, RECORDS, FAILED = "study.json", "cell.json", "log.jsonl", "records", "failed"
PART, PARTS = "part.json", "parts"
"""Which joint cell a cell is a part of; what a joint cell knows of each task."""
LARGEST_RESULT = 32 << 20
Result = dict[str, Any]
"""What cell.json holds."""
Word = Annotated[str, Field(pattern=r"^\w")]
"""Of what tables write as it is: a spreadsheet takes what begins with another sign for a formula."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Scores = dict[Word, Number | None]


class StudyFacts(BaseModel):
    """What study.json holds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    study: dict[str, Any]
    hosts: dict[str, str]
    """The digest of each host."""
    rows: dict[str, str]
    """… of each task's rows."""
    code: int = 1

    @field_validator("study")
    @classmethod
    def _named(cls, study: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(study.get("name"), str):
            raise ValueError("it has no name")
        return study


class TaskFacts(BaseModel):
    """What a result says of its task, as far as tables read it."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    kind: str
    metrics: list[str] = Field(min_length=1)


class Attention(BaseModel):
    """What a fusion listens to: of each member its share at each place."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    members: list[str]
    places: dict[str, list[float]]

    @model_validator(mode="after")
    def _agrees(self) -> Attention:
        if any(len(shares) != len(self.members) for shares in self.places.values()):
            raise ValueError("each place has to have a share of each member")
        return self


class KnownFacts(BaseModel):
    """The form of what tables, figures and pages read in a result, which may be anybody's."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    identity: dict[str, Any]
    work: str
    task: TaskFacts
    rows: dict[str, int]
    judged: str
    scores: Scores = Field(min_length=1)
    validation: Scores
    selected: Number | None
    trained_parameters: int
    host_parameters: int
    seconds: Number
    judged_sha256: str | None = None
    right: str | list[int] | list[float] | None = None
    said: str | list[int] | list[float] | None = None
    points: list[float] | None = None
    loss: Number | None = None
    costs: dict[str, int] | None = None
    stored_bytes: int | None = None
    host_bytes: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    best_step: int | None = None
    whole_seconds: Number | None = None
    rows_per_second: Number | None = None
    resumed: bool | None = None
    peak_megabytes: Number | None = None
    notes: list[str] | None = None
    versions: dict[str, str] | None = None
    history: list[Annotated[list[Number | None], Field(min_length=3, max_length=3)]] | None = None
    point: dict[Word, Number | str] | None = None
    attention: Attention | None = None
    seen_before: dict[str, int] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> KnownFacts:
        if not {"train", self.judged} <= self.rows.keys():
            raise ValueError(f"rows has no number of the rows of train and {self.judged}")
        if (self.right is None) != (self.said is None) or len(self.right or ()) != len(self.said or ()):
            raise ValueError("right and said have to be of the same rows")
        return self


@dataclass(frozen=True)
class Failure:
    """A cell that broke."""

    tries: int
    error: str
    final: bool = False
    """Whether trying again is of no use."""


class StudyFolder:
    """Where a study's cells are."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.cells = self.folder / "cells"

    # the study itself

    def claim(self, facts: dict[str, Any]) -> None:
        """Note whose folder this is; one of another study, or of something else, is refused and left as it is."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; a study needs a folder.")
        file = self.folder / STUDY
        if file.is_file():
            other = self.facts()["study"]["name"]
            if other != facts["study"]["name"]:
                raise ConfigError(
                    f"{self.folder} belongs to the study {other!r}, not to {facts['study']['name']!r}. "
                    f"Choose another folder with --out, or give the study its name."
                )
        elif self.folder.exists() and (there := sorted(f.name for f in self.folder.iterdir() if f.name[0] != ".")):
            raise ConfigError(
                f"{self.folder} is no study's folder and is not empty (it holds {', '.join(there[:5])}). "
                f"Choose another with --out."
            )
        if not file.is_file() or self.facts() != facts:
            write_whole(file, as_json(signed(facts), indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        """What study.json holds."""
        file = self.folder / STUDY
        if not file.is_file():
            raise CheckpointError(f"{self.folder} is not a study's folder: it has no {STUDY}.")
        found = read_json(file)
        if not isinstance(found, dict) or found.pop("sha256", None) != digest_of(found):
            raise CheckpointError(f"{file} is cut or altered: its content does not match its sha256.")
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{file} has format {found.get('format')!r}; this version of Inlay reads {FORMAT}.")
        try:
            return StudyFacts.model_validate(found).model_dump()
        except ValidationError as error:
            raise CheckpointError(f"{file} is not that of a study: {_listed(error)}.") from None

    # one cell

    def cell(self, name: str) -> Path:
        return self.cells / name

    def lease(self, name: str) -> Path:
        leases = self.folder / "leases"
        leases.mkdir(parents=True, exist_ok=True)
        return leases / name

    def result(self, name: str) -> Result | None:
        """What a cell that is done has to say; None where it is not done.

        A record comes first: where a cell is run again for its weights alone, nothing that is known changes.
        """
        for file in (self.record(name), self.cells / name / RESULT):
            try:
                content = file.read_bytes()
            except FileNotFoundError:
                continue
            return read_result(content, file, name)
        return None

    def begun(self) -> set[str]:
        """The cells that may have a result: those with a folder or a record. Asking each of them costs two opens."""
        folders, records = (
            folder.iterdir() if folder.is_dir() else () for folder in (self.cells, self.folder / RECORDS)
        )
        return {folder.name for folder in folders} | {record.stem for record in records}

    def record(self, name: str) -> Path:
        """Where the record of a cell that was run elsewhere is."""
        return self.folder / RECORDS / f"{name}.json"

    def write_result(self, name: str, result: Result) -> None:
        """The last thing that is written of a cell."""
        write_whole(self.cells / name / RESULT, as_json(signed({"format": FORMAT, "cell": name} | result)) + "\n")

    def as_record(self, name: str) -> None:
        """Of a cell whose weights are gone, keep the result as a record, so that the cell's folder is free."""
        file = self.cells / name / RESULT
        if file.is_file():
            self.record(name).parent.mkdir(exist_ok=True)
            file.replace(self.record(name))
            shutil.rmtree(self.cells / name, ignore_errors=True)

    def failure(self, name: str) -> Failure | None:
        file = self._failure_file(name)
        if not file.is_file():
            return None
        try:
            found = read_json(file)
        except CheckpointError:
            if file.is_file():
                raise
            return None  # another runner has just forgiven it
        try:
            return Failure(int(found["tries"]), str(found["error"]), bool(found["final"]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file} does not say how a cell broke. Delete it to run the cell again.") from None

    def failures(self) -> set[str]:
        """The cells that broke at least once."""
        folder = self.folder / FAILED
        return {file.stem for file in folder.iterdir()} if folder.is_dir() else set()

    def note_failure(self, name: str, error: str, *, final: bool) -> Failure:
        before = self.failure(name)
        failure = Failure(1 + (before.tries if before else 0), error[-4000:], final)
        write_whole(self._failure_file(name), as_json(vars(failure)) + "\n")
        return failure

    def forgive(self, name: str) -> None:
        """Forget that a cell broke."""
        self._failure_file(name).unlink(missing_ok=True)

    def _failure_file(self, name: str) -> Path:
        return self.folder / FAILED / f"{name}.json"

    def log(self, event: str, name: str, **more: Any) -> None:
        """One line, written at once: several processes may write to the same log."""
        line = as_json({"time": round(time.time(), 3), "event": event, "cell": name, "process": os.getpid()} | more)
        with (self.folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def is_running(self, name: str) -> bool:
        """Whether a process holds the cell."""
        from inlay.storage.locks import InUse, locked

        if not (self.folder / "leases" / name).exists():
            return False
        try:
            with locked(self.lease(name), wait=False):
                return False
        except InUse:
            return True

    def has_weights(self, name: str) -> bool:
        """Whether what a cell trained is here, and not its record alone."""
        if (whole := self.joint_of(name)) is not None:
            return (self.place(name) / "inlay.json").is_file() and (self.cells / whole / PARTS).is_dir()
        folder = self.cells / name
        return (folder / "inlay" / "inlay.json").is_file() or (folder / PARTS).is_dir()

    # one task of a joint training

    def joint_of(self, name: str) -> str | None:
        """The joint cell that a cell is one task of; None: it was trained by itself."""
        part = self._part(name)
        return None if part is None else part[0]

    def note_part(self, name: str, whole: str, task: str) -> None:
        write_whole(self.cells / name / PART, as_json({"cell": whole, "task": task}) + "\n")

    def place(self, name: str) -> Path:
        """The run of a cell, or the inlay of one task of a joint one."""
        part = self._part(name)
        return self.cells / name if part is None else self.cells / part[0] / "inlays" / part[1]

    def _part(self, name: str) -> tuple[str, str] | None:
        """The joint cell of which a cell is a part, and its task there; both are also names of folders."""
        file = self.cells / name / PART
        if not file.is_file():
            return None
        found = read_json(file)
        part = (found.get("cell"), found.get("task")) if isinstance(found, dict) else ()
        if not part or not all(isinstance(one, str) and Path(one).name == one and one.strip(".") for one in part):
            raise CheckpointError(f"{file} does not say of which joint cell and task it is. Delete {file.parent}.")
        return str(part[0]), str(part[1])

    def host_of(self, names: Sequence[str]) -> str | None:
        """The host that joint training left, where these cells are tasks of it."""
        for name in names:
            whole = self.joint_of(name)
            if whole is not None and (self.cells / whole / "host" / "config.json").is_file():
                return str(self.cells / whole / "host")
        return None

    def drop_host(self, name: str) -> None:
        """Delete the host of a cell of full fine-tuning; its scores and its page stay."""
        shutil.rmtree(self.cell(name) / "host", ignore_errors=True)


def read_result(content: bytes, file: Path, name: str) -> Result:
    """A cell's result, whole and under its own name."""
    try:
        if len(content) > LARGEST_RESULT:
            raise ValueError("it is larger than a result can be")
        found = json.loads(content.decode())
        if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("cell") != name:
            raise ValueError(f"it is not the result of the cell {name}")
        if found.get("sha256") != digest_of(found):
            raise ValueError("its content does not match its sha256")
        KnownFacts.model_validate(found)
    except ValidationError as error:
        raise CheckpointError(f"{file} is not the result of a cell: {_listed(error)}.") from None
    except (ValueError, RecursionError) as error:
        what = f"the folder {file.parent}" if file.name == RESULT else "it"
        raise CheckpointError(f"{file} is cut or altered: {error}. Delete {what} to run the cell again.") from None
    return found


def _listed(error: ValidationError) -> str:
    """What is wrong with a file, the first things of it."""
    return "; ".join(f"{'.'.join(map(str, e['loc'][:3]))}: {e['msg']}" for e in error.errors()[:5])
