"""What a user can get wrong: a clear message, exit code 2, nothing half written."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inlay.cli import main
from tests.cli.words import JOB as TRAIN
from tests.cli.words import RUN
from tests.training.small import rows, write_rows


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        (None, ("--text", "txet"), "no column 'txet'. Did you mean 'text'?"),
        (None, ("--label", "lable"), "no column 'lable'. Did you mean 'label'?"),
        (None, ("--batch-size", "1000"), "96 training rows are fewer than a batch of 1000"),
        (None, ("--host", "no-such-host"), "no host 'no-such-host'"),
        (None, ("--method", "pfeifer"), "unknown method 'pfeifer'. Did you mean 'pfeiffer'?"),
        (None, ("--options", "reductoin=2"), "has no setting 'reductoin'. Did you mean 'reduction'?"),
        (None, ("--options", "reduction"), "an option is name=value"),
        (None, ("--epochs", "0"), "epochs"),
        (None, ("--lables", "x"), "--lables"),
        ("", (), "is empty"),
        ('{"text": "a", "label": "x"}\n{"text"\n', (), "rows.jsonl, line 2"),
        (b'{"text": "\xff", "label": "x"}\n', (), "line 1: byte 0xff is not UTF-8"),
        ([*rows(20), {"text": "w1", "label": "odd"}], (), "single row of the class 'odd'"),
        (rows(20)[::2], (), "only one class"),
    ],
)
def test_mistakes_are_named(there, mistake, lines, flags, message):
    file = there / "rows.jsonl"
    if lines is None:
        file = there / "train.jsonl"
    elif isinstance(lines, list):
        write_rows(file, lines)
    else:
        file.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    assert message in mistake(*TRAIN, "--train-file", str(file), *flags)
    assert not (there / "run").exists(), "nothing is left of what came to nothing"


def test_all_errors_of_a_config_at_once(there, mistake):
    (there / "job.yaml").write_text(
        "hots: bert\nout: run\nepochs: -1\nlr: fast\nprecision: half\ntrain_file: train.jsonl\n"
    )
    told = mistake("train", "--config", "job.yaml")
    assert "no setting 'hots'. Did you mean 'host'?" in told
    assert all(name in told for name in ("epochs", "lr", "precision"))
    told = mistake(*TRAIN, "--train-file", "train.jsonl", "--host", "nowhere", "--method", "none", "--text", "txet")
    assert all(message in told for message in ("no host 'nowhere'", "unknown method 'none'", "no column 'txet'"))


def test_messages_name_flags_here_and_arguments_in_python(there, mistake):
    """One place translates: `as_flags`."""
    from inlay.errors import ConfigError
    from inlay.runs.settings import Settings

    wrong = {"lr": "-1", "batch_size": "0", "max_length": "1", "start": "x\udcff", "hub": "a/b"}
    flags = [
        word
        for name, value in wrong.items()
        for word in (f"--{name.replace('_', '-').replace('start', 'from')}", value)
    ]
    told = mistake(*TRAIN, "--train-file", "train.jsonl", *flags[:6])
    assert [line.split(": ")[-2 if "error" in line else 0] for line in told.splitlines()] == [
        "--lr", "--batch-size", "--max-length"
    ]  # fmt: skip
    assert "--from: a text must be whole" in mistake(*TRAIN, "--train-file", "train.jsonl", *flags[6:8])
    assert "only, but --train-file and --hub are given" in mistake(*TRAIN, "--train-file", "train.jsonl", *flags[8:])
    assert "a smaller --batch-size." in mistake(*TRAIN, "--train-file", "train.jsonl", "--batch-size", "1000")
    assert "there is no setting 'epoch'" in mistake(*TRAIN, "--config", write_yaml(there, "epoch: 1\n"))
    with pytest.raises(ConfigError) as caught:
        Settings(host="bert", out=there, task="rte", **wrong | {"start": None, "hub": None})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "Settings.lr", "Settings.batch_size", "Settings.max_length"
    ]  # fmt: skip


def write_yaml(there, text):
    (there / "job.yaml").write_text(text)
    return "job.yaml"


def test_a_label_that_training_did_not_see(there, mistake):
    write_rows(there / "other.jsonl", [*rows(10), {"text": "w1", "label": "neutral"}])
    words = [word if word != "validation.jsonl" else "other.jsonl" for word in TRAIN]
    assert "other.jsonl, line 11: label 'neutral' was not seen in training" in mistake(
        *words, "--train-file", "train.jsonl"
    )


def test_verbs_and_paths_that_do_not_exist(there, mistake):
    assert "Did you mean 'train'?" in mistake("trian")
    assert "has no inlay.json" in mistake("eval", "bert")
    for more in (("--split", "test"), ("--data-dir", ".")):
        assert "--file names others" in mistake("eval", "bert", "--file", "validation.jsonl", *more)
    assert "is not a folder" in mistake("predict", "nowhere", "text")
    (there / "list.yaml").write_text("- a\n")
    assert "must have settings" in mistake("train", "--config", "list.yaml")


def test_a_run_folder_that_is_not_empty_or_in_use(there, mistake):
    (there / "run").mkdir()
    (there / "run" / "thesis.txt").write_text("three years of work")
    assert "is not empty (it holds thesis.txt)" in mistake(*TRAIN, "--train-file", "train.jsonl")
    assert (there / "run" / "thesis.txt").read_text() == "three years of work"
    from inlay.runs.folder import Run

    with Run(there / "busy").locked(fresh=True):  # a lock of an open file: also this process cannot take it twice
        assert "is in use by another process" in mistake(*TRAIN, "--train-file", "train.jsonl", "--out", "busy")


def test_a_full_disk_loses_nothing(there, capsys, monkeypatch):
    from inlay.training import state

    written = []

    def full(path, content):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        write(path, content)

    write = state.write_whole
    monkeypatch.setattr(state, "write_whole", full)
    with pytest.raises(SystemExit) as left:
        main([*TRAIN, "--train-file", "train.jsonl", "--epochs", "2", "--batch-size", "16", "--save-every", "1"])
    assert left.value.code == 2
    assert "the disk is full" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(there)
    main(["train", "--resume", "run", "--quiet"])
    assert json.loads((there / "run" / "run.json").read_text())["status"] == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_behind_stdout(there):
    with Path("/dev/full").open("w") as full:
        told = subprocess.run([*RUN, "ls"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=there)
    assert told.returncode == 2
    assert "the disk is full" in told.stderr


def test_a_reader_that_leaves_early_is_no_mistake(there):
    ours, theirs = os.pipe()
    os.close(ours)
    told = subprocess.run([*RUN, "ls"], stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=there)
    os.close(theirs)
    assert (told.returncode, told.stderr) == (0, "")


def test_ctrl_c_saves_and_says_how_to_go_on(there):
    long = ("--batch-size", "8", "--epochs", "500", "--patience", "0", "--eval-every", "6000", "--save-every", "20")
    words = [*RUN, *TRAIN[:-1], "--train-file", "train.jsonl", *long]
    process = subprocess.Popen(words, cwd=there, stderr=subprocess.PIPE, text=True)
    while not (there / "run" / "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "To go on: inlay train --resume run" in told
    assert json.loads((there / "run" / "run.json").read_text())["status"] == "interrupted"


def without(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `inlay …` in a process in which a module is not installed."""
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['inlay', *{list(words)!r}]; "
        "from inlay.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("click", ("--help",)),
        ("yaml", ("train", "--help")),
        ("accelerate", ("train", "--host", "bert", "--task", "rte", "--out", "run")),
    ],
)
def test_a_verb_says_which_extra_it_needs(module, words):
    told = without(module, *words)
    verb = "" if words[0].startswith("-") else f" {words[0]}"
    assert told.returncode == 2, told.stderr
    assert told.stderr == f"error: `inlay{verb}` needs {module}. Install it with: pip install 'inlay[learn]'\n"


def test_a_fault_of_ours_is_not_taken_for_a_missing_extra():
    assert without("inlay.runs.settings", "train", "--help").returncode == 1


def test_flags_that_a_server_does_not_take_are_spelt_as_flags(there, mistake):
    told = mistake("predict", "model", "w1", "--server", "http://127.0.0.1:1", "--max-new-tokens", "4", "--host", "x")
    assert "--host, --max-new-tokens says how" in told
    told = mistake("predict", "model", "w1", "--server", "http://127.0.0.1:1", "--threads", "2", "--any-host")
    assert "--any-host, --threads says how" in told


def test_a_setting_that_is_a_number_or_a_word_takes_both_as_a_flag(there, mistake):
    words = ("validate", "--host", "bert", "--tasks", "a,b", "--alpha")
    assert "'often' is neither a number nor annealed" in mistake(*words, "often")
    assert "lies between 0 (evenly) and 1" in mistake(*words, "2")
    told = mistake(*words, "annealed")
    assert "alpha" not in told, told
    assert "is not a built-in task" in told


def test_without_a_verb_there_is_the_help_and_nothing_before_it(inlay_cli):
    assert inlay_cli(code=2).stderr == inlay_cli("--help").stdout
    assert inlay_cli("study", code=2).stderr == inlay_cli("study", "--help").stdout


def test_what_a_group_of_verbs_does_is_not_cut_off(inlay_cli):
    assert "..." not in inlay_cli("study", "--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--learning-rate", "--lr"),
        ("--num-train-epochs", "--epochs"),
        ("--per-device-train-batch-size", "--batch-size"),
        ("--model-name-or-path", "--host"),
    ],
)
def test_a_flag_of_another_library_is_answered_with_ours(inlay_cli, theirs, ours):
    said = inlay_cli("train", theirs, "1", code=2).stderr
    assert ours in said.partition("No such option")[2]


def test_a_setting_of_another_library_is_answered_with_ours(place, inlay_cli):
    (place / "theirs.yaml").write_text("learning_rate: 1e-4\nhost: bert\ntask: rte\nout: new\n")
    assert "'learning_rate'. Did you mean 'lr'?" in inlay_cli("train", "--config", "theirs.yaml", code=2).stderr
