from pathlib import Path

import pytest

from tests.training.small import rows, save_bert, save_t5, write_rows


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny hosts and toy rows: bert, t5, train.jsonl, validation.jsonl."""
    folder = tmp_path_factory.mktemp("small")
    save_bert(folder / "bert")
    save_t5(folder / "t5")
    write_rows(folder / "train.jsonl", rows(96))
    write_rows(folder / "validation.jsonl", rows(40, seed=1))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
