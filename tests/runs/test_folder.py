"""Run folders: settings under their old names, one process at a time, an inlay in a run or alone."""

import subprocess
import sys

import pytest

import inlay
from inlay.cli.flags import merged
from inlay.runs.folder import OLD_NAMES, Run, inlay_in
from inlay.runs.settings import Settings

OLD = """\
task: own
train: /rows/train.jsonl
validation: /rows/validation.jsonl
test: /rows/test.jsonl
host: bert
"""


def test_settings_of_an_earlier_version_have_their_new_names(tmp_path):
    (tmp_path / "config.yaml").write_text(OLD)
    for found in (Run(tmp_path).config(), merged(tmp_path / "config.yaml", {})):
        assert not OLD_NAMES.keys() & found.keys()
        settings = Settings(**found | {"out": tmp_path})
        assert str(settings.train_file) == "/rows/train.jsonl"
        assert str(settings.validation_file) == "/rows/validation.jsonl"
        assert str(settings.test_file) == "/rows/test.jsonl"


def test_new_configs_have_new_names(tmp_path):
    with pytest.raises(inlay.ConfigError, match="no setting 'train'. Did you mean 'train_file'?"):
        Settings(host="bert", out=tmp_path, train=tmp_path / "t.jsonl")


@pytest.mark.parametrize("used", [True, False])
def test_whether_validation_rows_are_used_is_read_from_a_file(tmp_path, used):
    said = {"host": "bert", "task": "rte", "data_dir": str(tmp_path), "out": str(tmp_path / "run"), "validation": used}
    said |= {} if used else {"patience": 0}
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.write_config(Settings(**said).model_dump(mode="json", exclude_none=True))
    settings = Settings(**merged(run.folder / "config.yaml", {}) | {"out": tmp_path / "again"})
    assert settings.validation is used
    assert settings.validation_file is None


def test_a_run_in_use_is_refused_at_once_also_within_one_process(tmp_path):
    with Run(tmp_path / "run").locked(fresh=True):
        code = f"""
from pathlib import Path
import inlay
from inlay.runs.folder import Run
try:
    with Run(Path({str(tmp_path / "run")!r})).locked(fresh=False):
        print("entered")
except inlay.ConfigError as error:
    print(error)
"""
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "is in use by another process" in told.stdout
        with pytest.raises(inlay.ConfigError, match="is in use"), Run(tmp_path / "run").locked(fresh=False):
            pass
    assert not (tmp_path / "run").exists(), "nothing came of it"


def test_an_inlay_is_found_in_its_run_or_alone(tmp_path):
    assert inlay_in(tmp_path) == tmp_path
    run = Run(tmp_path)
    rows = {"train": 8, "validation": 4, "test": 0}
    run.note(status="finished", task=None, host="bert", mode="inlay", name=None, rows=rows, max_length=None)
    assert inlay_in(tmp_path) == tmp_path / "inlay"


def test_a_line_that_a_killed_process_left_half_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    run = Run(tmp_path)
    assert run.history() == [{"step": 1, "loss": 2.0}]
    run.log({"step": 3, "loss": float("nan")})
    run.forget_after(1)
    assert run.history() == [{"step": 1, "loss": 2.0}]
