"""What must never happen: a result that changed in silence, a folder lost, a traceback, a run without an end."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

import inlay
from inlay.cli import main
from inlay.runs.folder import Run
from inlay.runs.settings import Settings
from inlay.storage.plain_json import digest_of
from tests.cli.words import JOB as TRAIN
from tests.training.small import rows, save_bert, write_rows

DATA = ("--train-file", "train.jsonl")


@pytest.fixture
def run(trained, there):
    """A finished run of one's own to spoil."""
    shutil.copytree(trained / "a", there / "mine")
    return there / "mine"


def resign(run, **changes):
    record = json.loads((run / "run.json").read_text()) | changes
    record["sha256"] = digest_of(record)
    (run / "run.json").write_text(json.dumps(record))


# 1. divergence


def test_a_run_that_diverges_is_no_success(there, mistake):
    told = mistake(*TRAIN, *DATA, "--lr", "1e30", "--batch-size", "16", "--epochs", "2", "--eval-every", "1")
    assert "training has diverged" in told
    assert json.loads((there / "run" / "run.json").read_text())["status"] == "diverged"
    assert "is not finished" in mistake("eval", "run")
    write_rows(there / "numbers.jsonl", [{"text": f"w{i}", "label": 1e300} for i in range(20)])
    told = mistake(*TRAIN[:-5], "--quiet", "--train-file", "numbers.jsonl", "--kind", "regression", "--batch-size", "8",
                   "--validation-file", "numbers.jsonl", "--out", "other")  # fmt: skip
    assert "diverged" in told or "finite" in told


@pytest.mark.parametrize(
    "line", ["lr: .inf", "lr: .nan", "lr: 1e308", "weight_decay: .inf", "seed: 99999999999999999999999"]
)
def test_settings_that_are_no_numbers(there, mistake, line):
    (there / "job.yaml").write_text(f"host: bert\ntrain_file: train.jsonl\n{line}\n")
    told = mistake("validate", "--config", "job.yaml")
    assert line in told or f"--{line.partition(':')[0].replace('_', '-')}: " in told


# 2. remote code


@pytest.fixture
def coded(there, monkeypatch):
    """A host with Python code of its own, and a user whose piped text says yes to every question."""
    shutil.copytree(there / "bert", there / "coded")
    config = json.loads((there / "coded" / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}
    (there / "coded" / "config.json").write_text(json.dumps(config))
    (there / "coded" / "evil.py").write_text("open('exploded', 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))


def test_a_hosts_own_code_never_runs_unasked(there, coded, mistake):
    told = mistake(*TRAIN, *DATA, "--host", "coded")
    assert "--trust-remote-code" in told
    assert not (there / "exploded").exists()


def test_a_hosts_own_code_runs_where_it_is_trusted(there, mistake, monkeypatch, capsys, tmp_path):
    (there / "own").mkdir()
    config = json.loads((there / "bert" / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.Own"}}
    (there / "own" / "config.json").write_text(json.dumps(config))
    (there / "own" / "own.py").write_text(
        "from transformers import BertConfig, BertModel\n"
        "class OwnConfig(BertConfig):\n    pass\n"
        "class Own(BertModel):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    main(["params", "bert", "--method", "lora", "--json"])
    plain = json.loads(capsys.readouterr().out)
    main(["params", "own", "--method", "lora", "--json", "--trust-remote-code"])
    assert json.loads(capsys.readouterr().out) == plain
    main(["params", "own", "--trust-remote-code"])
    assert "lora" in capsys.readouterr().out
    shutil.copytree(there / "own", there / "other")  # whose model nobody has trusted yet
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(inlay.ConfigError, match="does not run unasked"):
        inlay.count(transformers.AutoConfig.from_pretrained("other", trust_remote_code=True), inlay.LoRA())


def test_no_baseline_of_a_study_asks_whether_a_hosts_own_code_may_run(there, coded):
    """The same for what opens hosts without the workbench: a question would take piped text for an answer."""
    from inlay.studies.baseline import _Embedder

    with pytest.raises(ValueError, match="trust_remote_code"):
        _Embedder("coded", 16)
    assert not (there / "exploded").exists()


# 3. – 5. what is not ours is not replaced


def test_predictions_go_through_what_is_no_file(run, there):
    (there / "real.jsonl").write_text("old")
    (there / "link.jsonl").symlink_to(there / "real.jsonl")
    main(["predict", "mine", "good w1", "--out", "link.jsonl", "--threads", "1", "--quiet"])
    assert (there / "link.jsonl").is_symlink()
    assert json.loads((there / "real.jsonl").read_text())["label"] in ("positive", "negative")
    main(["predict", "mine", "good w1", "--out", "/dev/null", "--threads", "1", "--quiet"])
    assert Path("/dev/null").is_char_device()


def test_no_verb_replaces_an_inlay_unasked(run, mistake):
    before = (run / "inlay" / "weights.safetensors").read_bytes()
    for verb in (("merge",), ("export", "--format", "peft"), ("collapse",)):
        assert "--overwrite" in mistake(verb[0], "mine", "--out", "mine/inlay", *verb[1:])
    assert (run / "inlay" / "weights.safetensors").read_bytes() == before


def test_a_record_and_its_inlay_agree(run, trained, mistake):
    shutil.rmtree(run / "inlay")
    shutil.copytree(trained / "b" / "inlay", run / "inlay")
    for verb in (("eval", "mine"), ("predict", "mine", "good")):
        assert "is not the inlay that" in mistake(*verb)


# 6. – 7. damage, other hosts, other rows


def cut(there):
    """A run that was stopped after two steps."""
    from inlay.training.loop import TrainingLoop

    step = TrainingLoop._train_step

    def stop(self, batch):
        step(self, batch)
        if self.position.step == 2:
            os.kill(os.getpid(), signal.SIGHUP)

    TrainingLoop._train_step = stop
    try:
        with pytest.raises(SystemExit) as left:
            main([*TRAIN, *DATA, "--batch-size", "16", "--epochs", "2", "--lr", "0.01"])
    finally:
        TrainingLoop._train_step = step
    assert left.value.code == 128 + signal.SIGHUP, "SIGHUP is handled like SIGTERM"
    return there / "run"


def test_an_interrupted_run_with_damage_other_rows_or_another_host(there, mistake, capsys):
    run = cut(there)
    whole = run.joinpath("checkpoint.safetensors").read_bytes()
    for at in range(len(whole) // 2, len(whole), len(whole) // 12):
        data = bytearray(whole)
        data[at] ^= 4
        (run / "checkpoint.safetensors").write_bytes(data)
        told = mistake("train", "--resume", "run", "--quiet")
        assert "checkpoint.safetensors is cut or altered" in told
        assert "Delete it and resume" in told
    (run / "checkpoint.safetensors").write_bytes(whole)
    other = rows(96)
    other[5], other[6] = other[6] | {"text": "w1 w2"}, other[5]
    write_rows(there / "other.jsonl", other)
    assert "as many, but others" in mistake("train", "--resume", "run", "--train-file", "other.jsonl", "--quiet")
    save_bert(there / "wide", initializer_range=0.5)
    assert "other weights" in mistake("train", "--resume", "run", "--host", "wide", "--quiet")
    assert "leave out --lr" in mistake("train", "--resume", "run", "--lr", "1")
    shutil.copytree(run, there / "early")
    main(["finish", "early", "--quiet"])
    assert Run(there / "early").record()["steps"] == 2
    shutil.copyfile(there / "train.jsonl", there / "moved.jsonl")
    main(["train", "--resume", "run", "--train-file", "moved.jsonl", "--epochs", "3", "--patience", "0", "--quiet"])
    assert Run(run).record()["steps"] == 18


def test_a_damaged_token_cache_is_made_anew(run, there, capsys):
    words = ["predict", "mine", "--file", "validation.jsonl", "--threads", "1", "--quiet"]
    main(words)
    wanted = capsys.readouterr().out
    (file,) = (there / "cache" / "tokens").iterdir()
    data = safetensors.torch.load_file(file)
    safetensors.torch.save_file(
        {name: torch.zeros_like(t) if name == "input_ids" else t for name, t in data.items()}, file
    )
    main(words)
    assert capsys.readouterr().out == wanted


def test_a_host_of_the_same_shape_and_other_weights(run, there, mistake, capsys):
    save_bert(there / "other", initializer_range=0.5)
    assert "--any-host" in mistake("eval", "mine", "--host", "other", "--threads", "1")
    main(["eval", "mine", "--host", "other", "--any-host", "--threads", "1"])


# 8. – 9. text of users, records of others


def test_no_text_of_a_user_acts_on_a_terminal(tmp_path):
    from rich.console import Console

    from inlay.training.progress import Bar

    told = io.StringIO()
    bar = Bar(Console(file=told, force_terminal=True, width=200))
    bar.say("labels found: [/b], [red]x, \x1b[31mred, :smile:")
    bar.start("[/b]", 0, 2)
    bar.step(1, 0.5, "[red]x")
    bar.stop()
    assert r"labels found: [/b], [red]x, \x1b[31mred, :smile:" in told.getvalue()


def test_a_record_of_another_program_is_listed_as_unreadable(run, there, capsys):
    for name, text in {"x": "[1, 2]", "y": '{"status": 3}', "z": "{", "d": "[" * 100_000}.items():
        (there / "runs" / name).mkdir(parents=True)
        (there / "runs" / name / "run.json").write_text(text)
    shutil.copytree(run, there / "runs" / "good")
    main(["ls", "runs", "--json"])
    told = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)["runs"]}
    assert {name: row["status"] for name, row in told.items()} == dict.fromkeys("dxyz", "unreadable") | {
        "good": "finished"
    }
    assert told["good"]["score"] > 0.5


@pytest.mark.parametrize("changes", [
    {"task": None}, {"task": {"labels": 3}}, {"host": None}, {"max_length": -5}, {"name": 3}, {"rows": []}, {"scores": {"a": "b"}},
    {"mode": "evil"}, {"status": ["finished"]}, {"evil": 1}, {"settings": {"lr": "x"}}, {"versions": 3}, {"task": {"text": "{"}},
])  # fmt: skip
def test_hostile_records(run, mistake, changes):
    resign(run, **changes)
    assert mistake("eval", "mine", "--threads", "1")


def test_an_altered_record_is_refused(run, mistake):
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"negative"', '"negativ"'))
    assert "run.json is cut or altered" in mistake("eval", "mine")


# 11. an inlay alone


def test_an_inlay_alone_knows_its_task(there, capsys):
    longer = [{"review": row["text"] + " w1" * 5, "stars": row["label"]} for row in rows(40)]
    write_rows(there / "mine.jsonl", longer)
    flags = ("--text", "say: {review}", "--label", "stars", "--max-length", "6", "--batch-size", "8", "--epochs", "2")
    main(["train", "--host", "bert", "--train-file", "mine.jsonl", "--validation-file", "mine.jsonl", *flags, "--lr", "0.02",
          "--threads", "1", "--quiet", "--out", "run", "--json"])  # fmt: skip
    wanted = json.loads(capsys.readouterr().out)["scores"]
    main(["eval", "run/inlay", "--file", "mine.jsonl", "--threads", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["scores"] == wanted
    write_rows(
        there / "named.jsonl", [{"id": i, "t": row["review"], "l": row["stars"]} for i, row in enumerate(longer)]
    )
    main(["eval", "run", "--file", "named.jsonl", "--text", "say: {t}", "--label", "l", "--threads", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["scores"] == wanted
    main(["predict", "run", "--file", "named.jsonl", "--text", "say: {t}", "--threads", "1", "--quiet"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in told] == list(range(40)), "columns that it does not read are kept"


# 15. – 16. words and files


@pytest.mark.parametrize(("words", "message"), [
    (("--seed", "99999999999999999999999"), "seed"), (("--lr", "1e308"), "lr"), (("--options", "x={"), "option 'x'"), (("--text", "{"), "template"),
    (("--text", ""), "template"), (("--threads", "100000"), "threads"), (("--labels", "a\ud800,b"), "Unicode"),
    (("--text", "{text:>999999999}"), "template"), (("--trackers", "mlflow"), "not installed"), (("--accumulate", "1000000000000"), "accumulate"),
])  # fmt: skip
def test_words_that_gave_tracebacks(there, mistake, words, message):
    assert message in mistake(*TRAIN, *DATA, *words)


@pytest.mark.parametrize("text", [
    "a: &a [x, x]\nb: &b [*a, *a]\n", "lr: 1\nlr: 2\n", "[" * 5000, "seed: " + "9" * 9999, "labels: [no, yes]\n", "out: \"a\\0b\"\n",
    "task: \"\\ud800\"\n", "d: 2020-99-99\n", "? {a: b}\n: c\n",
])  # fmt: skip
def test_yaml_that_gave_tracebacks_or_no_end(there, mistake, text):
    (there / "job.yaml").write_text(text)
    told = mistake("train", "--config", "job.yaml")
    if "labels" in text:
        assert "put it in quotes" in told


def test_a_closed_stdin_and_a_half_character(run, there, mistake, monkeypatch):
    assert "surrogate" in mistake("predict", "mine", "good \udcff")
    (there / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    assert "half.jsonl, line 1" in mistake("predict", "mine", "--file", "half.jsonl")
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is closed" in mistake("predict", "mine")


def test_flags_of_writing_that_nothing_would_use_are_spelt_as_flags(run, mistake):
    assert "--max-new-tokens: nothing would use it" in mistake("predict", "mine", "w1", "--max-new-tokens", "4")


def test_what_is_inspected_twice_is_shown_once(run, capsys):
    main(["inspect", "mine", "--json"])
    once = capsys.readouterr().out
    main(["inspect", "mine", "mine", "--json"])
    assert capsys.readouterr().out == once


def test_damaged_weights_are_named_by_inspect(run, mistake):
    (run / "inlay" / "weights.safetensors").write_bytes(b"\xff" * 100)
    assert "weights.safetensors is cut or altered" in mistake("inspect", "mine/inlay")


def test_a_terminal_without_unicode_gets_json_that_can_be_read(run, monkeypatch):
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    main(["predict", "mine", "good 日本 🙂", "--threads", "1", "--quiet"])
    assert json.loads(latin.buffer.getvalue())["text"] == "good 日本 🙂"


def test_a_full_disk_while_the_host_is_saved(there, mistake, monkeypatch):
    from transformers import PreTrainedModel

    def full(self, folder, **more):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    told = mistake(*TRAIN, *DATA, "--mode", "full", "--epochs", "1", "--batch-size", "48")
    assert "the disk is full" in told
    assert not (there / "run" / "host").exists()


def test_a_flipped_byte_in_the_host_of_a_full_run(there, mistake):
    main([*TRAIN, *DATA, "--mode", "full", "--epochs", "1", "--batch-size", "48"])
    file = there / "run" / "host" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 64
    file.write_bytes(data)
    assert "model.safetensors" in mistake("eval", "run", "--threads", "1")


def test_settings_take_the_same_bounds_in_python(tmp_path):
    import inlay

    with pytest.raises(inlay.ConfigError, match="lr"):
        Settings(host="bert", out=tmp_path, task="rte", lr=float("inf"))
