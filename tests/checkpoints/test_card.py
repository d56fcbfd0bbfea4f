"""The model card: metadata that the Hub reads, and no text of a user that acts as Markdown or HTML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import inlay
from inlay.checkpoints.card import as_code
from tests.hosts import classifier

HOSTILE = "<script>alert(1)</script>\n---\n| a | `` ``` [x](http://example.org) ![](y) \x1b[31m **b** \\| c"


def saved_card(folder: Path, name: str = "a", host_name: str = "", **noted: object) -> ModelCard:
    host = classifier()
    host.config.name_or_path = host_name
    inlay.add(host, name, inlay.LoRA(rank=2), head=inlay.Head(labels=("<b>yes</b>", "no|no")))
    inlay.save(host, name, folder, **noted)
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def test_the_metadata(tmp_path: Path) -> None:
    card = saved_card(tmp_path / "a", "my_rte", "google/bert_tiny", task="rte", metrics={"accuracy": 0.71})
    data = card.data
    assert (data.base_model, data.library_name, data.tags) == ("google/bert_tiny", "inlay", ["inlay", "lora"])
    assert (data.model_name, data.metrics) == ("my_rte", ["accuracy"])
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_name) == ("text-classification", "rte")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.71)


@pytest.mark.parametrize("name", ["", "/home/me/secret", "../bert", "a b", "<b>"])
def test_a_host_that_is_not_on_the_hub(name: str, tmp_path: Path) -> None:
    assert saved_card(tmp_path / "a", host_name=name).data.base_model is None


def test_a_folder_here_is_not_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "bert").mkdir(parents=True)
    assert saved_card(tmp_path / "a", host_name="models/bert").data.base_model is None


def test_no_text_of_a_user_acts(tmp_path: Path) -> None:
    card = saved_card(tmp_path / "a", host_name=HOSTILE, task=HOSTILE, metrics={HOSTILE: 0.5})
    assert card.data.eval_results[0].dataset_name == HOSTILE, "the metadata has it as it is"
    body, _, rest = card.text.partition("```python\n")
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows), "two cells in every row"
    visible = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", body)
    assert not re.search(r"[<>\[\]!*\x1b]|http|---[^|]", visible), visible
    assert "<b>" not in visible + rest


@pytest.mark.parametrize("text", ["", "`", "``a", "a`", "a``b`c", "|", "\n\n", "ünï🙂", "\u202e"])
def test_inline_code_ends_where_it_should(text: str) -> None:
    code = as_code(text).replace("\\|", "|")
    fence = re.match("`+", code.replace(" ", "x", 1) if code.startswith(" ") else code)[0]
    inner = code[len(fence) : -len(fence)]
    assert code == fence + inner + fence
    assert fence not in re.findall("`+", inner)
    assert "\n" not in code
