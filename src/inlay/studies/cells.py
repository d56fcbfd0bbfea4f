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
from typing import Any

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
        return found

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
        return Failure(int(found["tries"]), str(found["error"]), bool(found["final"]))

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
        file = self.cells / name / PART
        return str(read_json(file)["cell"]) if file.is_file() else None

    def note_part(self, name: str, whole: str, task: str) -> None:
        write_whole(self.cells / name / PART, as_json({"cell": whole, "task": task}) + "\n")

    def place(self, name: str) -> Path:
        """The run of a cell, or the inlay of one task of a joint one."""
        file = self.cells / name / PART
        if not file.is_file():
            return self.cells / name
        found = read_json(file)
        return self.cells / found["cell"] / "inlays" / found["task"]

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
    except (ValueError, RecursionError) as error:
        what = f"the folder {file.parent}" if file.name == RESULT else "it"
        raise CheckpointError(f"{file} is cut or altered: {error}. Delete {what} to run the cell again.") from None
    return found
