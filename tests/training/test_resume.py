"""20 + resume + 20 steps are 40 steps, bit for bit; and a run can be killed at any moment."""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import nullcontext

import pytest
import safetensors
import torch

import inlay
from inlay.checkpoints.ours import read
from inlay.runs.folder import Run
from inlay.runs.settings import Settings
from inlay.runs.train import train_run
from inlay.training.interrupt import Interrupted, Interrupts
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import objective_for
from inlay.training.recipe import Recipe
from tests.training.ready import ready, state

RECIPE = Recipe(
    lr=1e-2, epochs=7, max_steps=40, batch_size=16, accumulate=2, eval_every=9, save_every=20, patience=0, seed=3
)


@pytest.fixture
def members(small, tmp_path):
    """Two inlays to fuse."""
    model, *_ = ready(small)
    for name in ("a", "b"):
        inlay.add(model, name, inlay.Pfeiffer(reduction=2), head=inlay.Head(labels=("negative", "positive")))
        inlay.save(model, name, tmp_path / name)
    return [tmp_path / "a", tmp_path / "b"]


def setups(small, members):
    def fused():
        model, codec, train_rows, validation = ready(small, "head")
        inlay.activate(model, None)
        inlay.remove(model, "own")
        names = [inlay.load(model, folder) for folder in members]
        inlay.add_fusion(
            model, "own", names, dropout=0.1, head=inlay.Head(labels=("negative", "positive"), pooling="mean")
        )
        inlay.train(model, "own")
        return model, codec, train_rows, validation

    yield "inlay", lambda: ready(small)
    yield "robust", lambda: ready(small, method=inlay.Pfeiffer(reduction=2, drop_first=2, dropout=0.2))
    yield "full", lambda: ready(small, "full")
    yield "mixture", lambda: ready(small, method=inlay.Mixture(inlay.Pfeiffer(reduction=2), modules=3))
    yield "fusion", fused


@pytest.mark.long
def test_twenty_and_twenty_are_forty(small, members, tmp_path, monkeypatch):
    for name, build in setups(small, members):
        straight, parts = tmp_path / f"{name}-straight", tmp_path / f"{name}-parts"
        model, *rest = build()
        whole = TrainingLoop(model, *rest, RECIPE, objective=objective_for(model, "own"), checkpoint=straight).run()
        log: list[dict] = []
        broken, *rest = build()
        with monkeypatch.context() as patch:
            patch.setattr("inlay.training.loop.TrainingLoop._leave_if_asked", _leave_at(20))
            with pytest.raises(Interrupted):
                TrainingLoop(
                    broken, *rest, RECIPE, objective=objective_for(broken, "own"), checkpoint=parts, log=log.append
                ).run()
        resumed, *rest = build()
        torch.manual_seed(12345)
        objective = objective_for(resumed, "own")
        outcome = TrainingLoop(resumed, *rest, RECIPE, objective=objective, checkpoint=parts, log=log.append).run()
        assert log == whole.history, name
        assert outcome.scores == whole.scores, name
        for key, tensor in state(model).items():
            assert torch.equal(tensor, state(resumed)[key]), (name, key)


def _leave_at(step):
    def leave(self, interrupts):
        if self.position.step == step:
            self._save()
            raise Interrupted(signal.SIGTERM)

    return leave


def settings(small, out, **more):
    return Settings(
        host=str(small / "bert"), validation_file=small / "validation.jsonl", out=out, threads=1, name="own",
        **{"train_file": small / "train.jsonl", "options": {"reduction": 2}, "lr": 1e-2, "epochs": 1, "batch_size": 16, "save_every": 1} | more,
    )  # fmt: skip


def test_a_signal_saves_the_run_and_resuming_finishes_it(small, tmp_path, monkeypatch):
    whole = train_run(settings(small, tmp_path / "whole"))
    seen = []

    def step(self, rows, original=TrainingLoop._train_step):
        original(self, rows)
        if self.position.step == 5 and not seen:
            seen.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("inlay.training.loop.TrainingLoop._train_step", step)
    with pytest.raises(Interrupted):
        train_run(settings(small, tmp_path / "cut"))
    run = Run.opened(tmp_path / "cut")
    assert run.record()["status"] == "interrupted"
    resumed = train_run(Settings(**run.config() | {"out": run.folder}), resume=True)
    assert (resumed.folder / "metrics.jsonl").read_text() == (whole.folder / "metrics.jsonl").read_text()
    assert (resumed.inlay / "weights.safetensors").read_bytes() == (whole.inlay / "weights.safetensors").read_bytes()
    assert not resumed.checkpoint.exists()
    for finish in (False, True):
        with pytest.raises(inlay.ConfigError, match="is finished"):
            train_run(Settings(**run.config() | {"out": run.folder}), resume=True, finish=finish)


def test_a_run_does_not_go_on_with_other_rows(small, tmp_path, monkeypatch):
    own = tmp_path / "train.jsonl"
    shutil.copyfile(small / "train.jsonl", own)
    begun = settings(small, tmp_path / "run", train_file=own)
    with monkeypatch.context() as patch:
        patch.setattr("inlay.training.loop.TrainingLoop._leave_if_asked", _leave_at(2))
        with pytest.raises(Interrupted):
            train_run(begun)
    own.write_text(own.read_text() + '{"text": "w1", "label": "third"}\n' * 3)
    with pytest.raises(inlay.ConfigError, match=r"not those that the run began with .*'train': 96.*'train': 99.*third"):
        train_run(begun, resume=True)


@pytest.mark.parametrize("alone", [True, False])
def test_a_second_signal_leaves_at_once_unless_a_launcher_sent_it(alone):
    with Interrupts(alone=alone) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) if alone else nullcontext():
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.seen == signal.SIGINT


@pytest.mark.long
def test_killed_at_any_moment_a_run_can_be_resumed(small, tmp_path):
    """Fifty SIGKILLs. After each everything in the folder is whole, and the next start goes on from it.

    Every other one strikes at a random moment; the others as a random touch of the disk begins, so that the saving is
    struck however slow the machine is.
    """
    expected = train_run(settings(small, tmp_path / "whole"))
    out = tmp_path / "run"
    chance = random.Random(0)
    began = time.monotonic()
    train_run(settings(small, tmp_path / "timed"))
    length = time.monotonic() - began
    finished = 0
    for kill in range(50):
        struck = (
            _killed(settings(small, out), touches=chance.randrange(200))
            if kill % 2
            else _killed(settings(small, out), seconds=chance.uniform(0, length))
        )
        assert struck or Run(out).record()["status"] == "finished"
        _is_whole(Run(out))
        if Run(out).record().get("status") == "finished":
            _is_equal(Run(out), expected)
            finished += 1
            out = tmp_path / f"run{finished}"
    _is_equal(train_run(settings(small, out), resume=out.exists()), expected)


def test_a_fusion_run_keeps_its_members_whole_or_not_at_all(small, members, tmp_path, monkeypatch):
    fusing = settings(small, tmp_path / "fused", mode="fusion", members=members, options={})

    def copy(source, target, original=shutil.copyfile):
        if target.name == "weights.safetensors" and ".b." in str(target):
            target.write_bytes(source.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy)
        with pytest.raises(OSError, match="No space"):
            train_run(fusing)
    run = Run(fusing.out)
    assert sorted(member.name for member in run.members.iterdir()) == ["a"]
    train_run(fusing, resume=True)
    for member in ("a", "b"):
        read(run.members / member)


def _killed(settings, *, seconds=None, touches=None) -> bool:
    """Whether a run in a process of its own was killed, after so many seconds or touches of the disk, before its end."""
    child = os.fork()
    if child == 0:
        if touches is not None:
            _die_at_touch(touches)
        code = 1
        try:
            train_run(settings, resume=settings.out.exists())
            code = 0
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run ended by an error of its own"
    return os.WIFSIGNALED(status)


def _die_at_touch(touches: int) -> None:
    """Kills this process as it makes, moves, removes or opens for writing its so-manieth file."""
    left = touches

    def hook(event, arguments):
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_whole(run: Run) -> None:
    if run.checkpoint.exists():
        with safetensors.safe_open(run.checkpoint, "pt") as file:
            assert json.loads(file.metadata()["position"])["step"] >= 1
    if run.inlay.exists():
        read(run.inlay)


def _is_equal(run: Run, expected: Run) -> None:
    assert run.report.exists()
    assert (run.folder / "metrics.jsonl").read_text() == (expected.folder / "metrics.jsonl").read_text()
    assert (run.inlay / "weights.safetensors").read_bytes() == (expected.inlay / "weights.safetensors").read_bytes()
