"""What is measured also arrives at a tracker of accelerate's; here one that keeps it in a list."""

from __future__ import annotations

import json

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType

from inlay.cli import main
from tests.cli.words import TRAIN


class Kept(accelerate.tracking.GeneralTracker):
    """Keeps what it is told."""

    name = "wandb"
    requires_logging_directory = False
    told: list = []

    def __init__(self, run_name, **options):
        super().__init__()
        self.told.append(("run", run_name))

    @property
    def tracker(self):
        return self.told

    def store_init_configuration(self, values):
        self.told.append(("config", values))

    def log(self, values, step=None, **options):
        self.told.append((step, values))

    def finish(self):
        self.told.append(("finish", None))


@pytest.fixture
def kept(monkeypatch):
    """The tracker in the place of wandb, as if that were installed."""
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Kept)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    monkeypatch.setattr(Kept, "told", [])
    return lambda: Kept.told


def words(small, out, *more):
    files = (TRAIN, str(small / "train.jsonl"), "--validation-file", str(small / "validation.jsonl"))
    steps = ("--batch-size", "16", "--epochs", "2", "--lr", "0.02", "--seed", "7", "--threads", "1", "--quiet")
    return ["train", "--host", str(small / "bert"), *files, *steps, "--out", str(out), *more]


def test_every_evaluation_arrives(small, tmp_path, kept):
    main(words(small, tmp_path / "run", "--trackers", "wandb"))
    (first, run), (second, config), *evaluations, (last, _) = kept()
    assert (first, run, second, last) == ("run", "inlay", "config", "finish")
    assert config == {"task": "own", "seed": 7}
    assert [step for step, _ in evaluations] == [0, 6, 12]
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": step, **values} for step, values in evaluations] == entries
    assert {"loss", "lr", "epoch", "validation_accuracy", "validation_macro_f1"} == set(evaluations[0][1])


def test_without_being_asked_no_tracker_is_told(small, tmp_path, kept):
    main(words(small, tmp_path / "run"))
    assert kept() == []


def test_what_a_tracker_is_told_changes_nothing(small, tmp_path, kept):
    for name, more in (("with", ("--trackers", "wandb")), ("without", ())):
        main(words(small, tmp_path / name, "--name", "own", *more))
    weights = [(tmp_path / name / "inlay" / "weights.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


def test_a_tracker_that_nobody_has_heard_of_is_refused(small, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(words(small, tmp_path / "run", "--trackers", "tensorbored"))
    assert left.value.code == 2
    assert "tensorbored" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.filterwarnings("ignore:.*no supported trackers are currently installed")
def test_a_tracker_that_is_not_installed_is_refused_before_training(small, tmp_path, tracker, monkeypatch, capsys):
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    with pytest.raises(SystemExit) as left:
        main(words(small, tmp_path / "run", "--max-steps", "1", "--trackers", tracker))
    assert left.value.code == 2
    assert tracker in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
