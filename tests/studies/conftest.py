from pathlib import Path

import pytest

from tests.studies.tiny import place, run_here, study_in


@pytest.fixture(scope="session")
def here(tmp_path_factory) -> Path:
    """A tiny host and rows."""
    return place(tmp_path_factory.mktemp("studies"))


@pytest.fixture(scope="session")
def finished(here):
    """The tiny study, done: its folder, its view, and the cells that were run."""
    out = here / "finished"
    view, ran = run_here(study_in(here), out)
    return out, view, ran
