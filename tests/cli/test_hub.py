"""Hosts of the hub by their name, without a network: from the cache that an earlier download left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from inlay.cli import main
from tests.cli.words import ROWS

COMMIT = "5" * 40


@pytest.fixture(scope="module")
def cache(place, tmp_path_factory):
    """The hub's cache with the tiny host as me/tiny: blobs, and a snapshot that links to them."""
    folder = tmp_path_factory.mktemp("hub") / "models--me--tiny"
    snapshot = folder / "snapshots" / COMMIT
    for part in (folder / "refs", folder / "blobs", snapshot):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted((place / "bert").iterdir())):
        blob = folder / "blobs" / f"{number:040}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return folder.parent


@pytest.fixture
def inlay_away(place, cache, tmp_path):
    """Run several `inlay …` in one process with that cache, where the host's own folder is not; hands back what each says."""
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    env = os.environ | {
        "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "INLAY_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = (
        "import json, sys\nfrom inlay.cli import main\nfor words in json.load(sys.stdin): main(words); print('\\0')"
    )

    def run(*commands: tuple[str, ...]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script], input=json.dumps(commands), cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout.split("\0")[:-1]

    return run


def test_a_host_is_had_by_its_name(inlay_away, tmp_path):
    flags = ("--epochs", "2", "--batch-size", "16", "--lr", "0.02", "--threads", "1", "--quiet")
    trained, measured, said, counted = map(
        json.loads,
        inlay_away(
            ("train", "--host", "me/tiny", *ROWS, *flags, "--out", "run", "--json"),
            ("eval", "run/inlay", "--file", "validation.jsonl", "--json"),
            ("predict", "run", "w1 good w2"),
            ("params", "me/tiny", "--method", "pfeiffer", "--options", "reduction=16", "--json"),
        ),
    )
    assert trained["host"] == "me/tiny", "a name stays a name: the run is of use on another machine"
    assert json.loads((tmp_path / "run" / "inlay" / "inlay.json").read_text())["host"]["name"] == "me/tiny"
    assert measured["scores"] == trained["scores"]
    assert said["label"] in ("negative", "positive")
    layers, width, size = 2, 16, 1
    assert counted["trainable"] == layers * (width * size + size + size * width + width)


def test_a_host_that_is_not_there_is_one_clear_error(place, tmp_path, monkeypatch, capsys):
    """In this process: nothing of the hub's cache is needed to find nothing in it."""
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as left:
        main(["train", "--host", "me/other", *ROWS, "--out", str(tmp_path / "run")])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "no host 'me/other': neither a folder with a config.json nor a model that the hub would give" in told
    assert not (tmp_path / "run").exists()
