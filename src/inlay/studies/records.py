"""A study without its weights: study.json and one small record per cell, to be kept with the text that quotes it.

`inlay study table`, `figure` and `report` read such a folder like the study's own. `inlay study run --records` goes on
from it and adds to it: a cell with a record is done, and is trained again only where another cell needs its weights.
No row of the data is in a record, and no path of the machine that made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import ConfigError
from inlay.runs.record import signed
from inlay.runs.settings import PATHS
from inlay.storage.files import write_whole
from inlay.storage.plain_json import as_json
from inlay.studies.cells import FAILED, RECORDS, RESULT, STUDY, StudyFolder, read_result
from inlay.studies.plan import View, view_of

ABSOLUTE = re.compile(r"(?<![\w/.])(/[^\s'\"/]+)+/(?=[^\s'\"/])")
"""The folders of an absolute path, up to its last part."""


@dataclass
class Records:
    """A folder of records beside a study: what it holds counts as done, what is done is added to it."""

    folder: Path
    kept: set[str] = field(default_factory=set)
    """Cells whose records are there."""

    def check(self, study: StudyFolder, facts: Mapping[str, Any]) -> None:
        """Refuse what is no folder of records, or that of a study of another name, or of other hosts or rows."""
        if self.folder.resolve() == study.folder.resolve():
            raise ConfigError(f"{self.folder} is the study's own folder. Choose another one for records.")
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; records need a folder.")
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / STUDY).is_file():
            raise ConfigError(f"{self.folder} is not empty and holds no study. Choose another folder.")
        if not (self.folder / STUDY).is_file():
            return
        there, name = StudyFolder(self.folder).facts(), facts["study"]["name"]
        if (other := there["study"]["name"]) != name:
            raise ConfigError(f"{self.folder} has the records of the study {other!r}, not of {name!r}.")
        differ = [
            f"{what} {name!r}" for what, field in (("the host", "hosts"), ("the rows of", "rows"))
            for name, seen in there[field].items() if facts[field].get(name, seen) != seen
        ]  # fmt: skip
        if differ:
            raise ConfigError(
                f"{self.folder} has records of other files than those given here: {', '.join(differ)}. None of its "
                f"cells that use them would count, and its tables would lose them. Give the very files that the "
                f"records were made with (the same bytes), or another folder for the records."
            )

    def bring(self, study: StudyFolder) -> int:
        """Copy every record that the study has no result of into it; how many there were."""
        count = 0
        there = self.folder / RECORDS
        for file in sorted(there.glob("*.json")) if there.is_dir() else []:
            name = file.stem
            self.kept.add(name)
            if not (study.record(name).is_file() or (study.cell(name) / RESULT).is_file()):
                content = file.read_bytes()
                read_result(content, file, name)  # a broken one is told of here, before anything runs
                write_whole(study.record(name), content)
                count += 1
        return count

    def add(self, view: View) -> int:
        """A record of every cell that is done and has none yet, and the study as it is; the bytes of what is new."""
        study, size = view.folder, 0
        facts = dict(view.plan.facts()) | {"study": _without_places(view.plan.facts()["study"])}
        size += _write(self.folder / STUDY, as_json(signed(facts), indent=1) + "\n")
        for name in view.results:
            if name not in self.kept:
                file = study.record(name)
                file = file if file.is_file() else study.cell(name) / RESULT
                size += _write(self.folder / RECORDS / f"{name}.json", file.read_text(encoding="utf-8"))
                self.kept.add(name)
        failed = self.folder / FAILED
        for file in failed.glob("*.json") if failed.is_dir() else []:
            if file.stem not in view.failures:
                file.unlink(missing_ok=True)  # two runners may have the same records
        for name, failure in view.failures.items():
            last = ABSOLUTE.sub("", failure.error.strip().split("\n")[-1])
            _write(failed / f"{name}.json", as_json(vars(failure) | {"error": last}) + "\n")
        return size


def export(folder: Path, out: Path) -> tuple[int, int]:
    """Write what tables need of every cell that is done; how many there are, and their bytes."""
    view, records = view_of(folder), Records(out)
    records.check(view.folder, view.plan.facts())
    size = records.add(view)
    return len(view.results), size


def _write(file: Path, text: str) -> int:
    content = text.encode()
    if not file.is_file() or file.read_bytes() != content:
        write_whole(file, content)
    return len(content)


def _without_places(value: Any, name: str = "") -> Any:
    """Paths by their last part alone: where things were is nobody's business, and decides nothing."""
    if isinstance(value, Mapping):
        return {key: _without_places(inner, name if name == "hosts" else key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(inner, name) for inner in value]
    is_place = isinstance(value, str) and name in ("hosts", *PATHS) and Path(value).is_absolute()
    return Path(value).name if is_place else value
