"""The workbench: a host is opened once, for the task's form of answer, with a head and a codec that fit."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

import inlay
from inlay.data import Task
from inlay.runs.ready import get_ready
from inlay.runs.settings import Settings
from inlay.training.workbench import Workbench, longest_input, open_config
from tests.training.small import save_decoder

YES_NO = Task(name="own", labels=("no", "yes"))


def test_a_task_is_answered_in_the_form_that_fits_it_and_the_host(small):
    bench = Workbench.open(str(small / "bert"), Task(name="own", labels=("a", "b", "c")))
    assert (bench.form, bench.host.config.num_labels) == ("labels", 3)
    assert bench.head().names == ("a", "b", "c")
    assert Workbench.open(str(small / "bert"), Task(name="own", kind="choice")).form == "labels"
    text = Workbench.open(str(small / "t5"), YES_NO)
    assert (text.form, text.head()) == ("text", None)
    with pytest.raises(inlay.InlayError, match="needs a host such as T5, GPT-2 or Llama, not bert"):
        Workbench.open(str(small / "bert"), Task(name="own", kind="text"))


def test_inputs_are_cut_where_the_host_or_the_user_says(small):
    bench = Workbench.open(str(small / "bert"), YES_NO)
    assert bench.codec(1000).max_length == 64
    assert bench.codec(10).max_length == 10


def test_a_config_that_is_handed_over_is_left_as_it_is(small):
    config = open_config(str(small / "bert"))
    Workbench.open(str(small / "bert"), Task(name="own", labels=("a", "b", "c")), config)
    assert config.num_labels == 2


def test_a_job_opens_its_hosts_config_once(small, tmp_path, monkeypatch):
    opened = []
    original = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda name, *a, **k: opened.append(name) or original(name, *a, **k)
    )
    files = {"train_file": small / "train.jsonl", "validation_file": small / "validation.jsonl"}
    get_ready(Settings(host=str(small / "bert"), **files, out=tmp_path / "run", threads=1))
    assert opened == [str(small / "bert")]


def test_what_trains_is_set_up_by_the_mode(small):
    for mode, host_trains in (("inlay", False), ("head", False), ("full", True)):
        bench = Workbench.open(str(small / "bert"), YES_NO)
        assert bench.set_up("own", mode, method=inlay.Pfeiffer(reduction=2)) == "own"
        trained = [name for name, parameter in bench.host.named_parameters() if parameter.requires_grad]
        assert any(name.startswith("inlays.") for name in trained)
        assert any(not name.startswith("inlays.") for name in trained) == host_trains
    text = Workbench.open(str(small / "t5"), YES_NO)
    assert text.set_up("own", "full") is None, "the whole host, without an inlay"


@pytest.mark.parametrize(
    ("host", "mode", "message"),
    [
        ("bert", "inlay", "needs a method"),
        ("bert", "fusion", "at least two members"),
        ("t5", "head", "no head to train alone"),
    ],
)
def test_what_cannot_be_set_up_is_refused(small, host, mode, message):
    with pytest.raises(inlay.ConfigError, match=message):
        Workbench.open(str(small / host), YES_NO).set_up("own", mode)


def test_a_host_that_cannot_be_saved_is_not_trained_whole(tmp_path):
    """A decoder whose config says that it is GGUF is opened as such, and transformers refuses to save it."""
    save_decoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gguf", "gguf_file": "small.gguf", "dequantize": False}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    task = Task(name="own", kind="text")
    with pytest.raises(inlay.ConfigError, match="opened as gguf, which cannot be saved"):
        Workbench.open(str(tmp_path), task).set_up("own", "full")
    assert Workbench.open(str(tmp_path), task).set_up("own", "inlay", method=inlay.LoRA()) == "own"


@pytest.mark.parametrize("kind", ["Roberta", "MPNet", "Bert"])
def test_the_longest_input_is_one_that_the_host_can_read(kind):
    """RoBERTa and those like it count positions from the padding token's on."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=12, pad_token_id=1,
    )  # fmt: skip
    longest = longest_input(config, SimpleNamespace(model_max_length=int(1e30)), 100)
    host = transformers.AutoModel.from_config(config)
    host(torch.full((1, longest), 5), torch.ones(1, longest, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError)):
        host(torch.full((1, longest + 1), 5), torch.ones(1, longest + 1, dtype=torch.long))
