"""A study without its weights: study.json and one small record per cell, to be kept with the text that quotes it.

`inlay study table`, `figure` and `report` read such a folder like the study's own. `inlay study run` goes on from it: a
cell with a record is done, and is trained again only where another cell needs its weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from inlay.errors import ConfigError
from inlay.studies.cells import RESULT, STUDY
from inlay.studies.plan import view_of


def export(folder: Path, out: Path) -> tuple[int, int]:
    """Copy what tables need of every cell that is done; how many there are, and their bytes."""
    view = view_of(folder)
    if out.resolve() == Path(folder).resolve():
        raise ConfigError(f"{out} is the study's own folder. Choose another with --out.")
    if out.exists() and any(out.iterdir()) and not (out / STUDY).is_file():
        raise ConfigError(f"{out} is not empty and holds no study. Choose another folder.")
    size = 0
    cells = out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    for name in view.results:
        (cells / name).mkdir(exist_ok=True)
        shutil.copyfile(view.folder.cell(name) / RESULT, cells / name / RESULT)
        size += (cells / name / RESULT).stat().st_size
    shutil.copyfile(Path(folder) / STUDY, out / STUDY)
    return len(view.results), size + (out / STUDY).stat().st_size
