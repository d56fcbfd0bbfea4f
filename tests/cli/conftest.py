import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.words import DATA, RUN
from tests.training.small import rows, save_bert, write_rows


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a tiny host and rows, where all runs of these tests go."""
    folder = tmp_path_factory.mktemp("place")
    save_bert(folder / "bert")
    write_rows(folder / "train.jsonl", rows(96))
    write_rows(folder / "validation.jsonl", rows(40, seed=1))
    return folder


@pytest.fixture(scope="session")
def inlay_process(place):
    """Run `inlay …` as a process in that folder."""

    def run(*words: str, code: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"INLAY_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*RUN, *words], cwd=place, env=env, input=stdin, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run


@dataclass(frozen=True)
class Said:
    stdout: str
    stderr: str


@pytest.fixture
def inlay_cli(place, monkeypatch, capsys):
    """The same in this process, which spares the import of torch; `inlay_process` is for what is about the process."""

    def run(*words: str, code: int = 0) -> Said:
        from inlay.cli import main

        monkeypatch.chdir(place)
        monkeypatch.setenv("INLAY_CACHE", str(place / "cache"))
        capsys.readouterr()
        left = 0
        try:
            main([*words])
        except SystemExit as end:
            left = int(end.code or 0)
        told = Said(*capsys.readouterr())
        assert left == code, f"{words}\n{told.stdout}\n{told.stderr}"
        return told

    return run


@pytest.fixture
def inlay_here(inlay_cli):
    """The same; hands back what it says."""
    return lambda *words: inlay_cli(*words).stdout


@pytest.fixture(scope="session")
def trained(inlay_process, place) -> Path:
    """Two runs: inlays of two sizes."""
    from inlay.runs.settings import Settings
    from inlay.runs.train import train_run

    inlay_process("train", *DATA, "--name", "a", "--options", "reduction=2", "--out", "runs/a")
    files = {"train_file": place / "train.jsonl", "validation_file": place / "validation.jsonl"}
    options = {"reduction": 4}
    train_run(
        Settings(
            host=str(place / "bert"),
            **files,
            batch_size=16,
            epochs=3,
            lr=0.02,
            name="b",
            options=options,
            out=place / "runs" / "b",
        )
    )
    return place / "runs"


@pytest.fixture(scope="session")
def fused(inlay_process, trained) -> Path:
    told = inlay_process("fuse", "runs/a", "runs/b", *DATA, "--name", "both", "--json", "--out", "runs/fused")
    assert json.loads(told.stdout)["mode"] == "fusion"
    return trained / "fused"


@pytest.fixture
def there(place, tmp_path, monkeypatch):
    """An empty folder with the tiny host and rows in reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    for name in ("bert", "train.jsonl", "validation.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    return tmp_path


@pytest.fixture
def mistake(capsys):
    """Run `inlay …` in this process and hand back what it says when it leaves with exit code 2."""

    def run(*words):
        with pytest.raises(SystemExit) as left:
            from inlay.cli import main

            main(list(words))
        assert left.value.code == 2
        return capsys.readouterr().err

    return run
