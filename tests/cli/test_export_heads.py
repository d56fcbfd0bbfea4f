"""Heads that the command line trained go to the other libraries, or the export says which flag would have done it."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from inlay.cli import main
from tests.cli.words import DATA

METHODS = {"peft": ("lora", "rank=2"), "adapterhub": ("pfeiffer", "reduction=2")}
POOLING = {"peft": "host", "adapterhub": "first"}
"""How each library's own heads pool."""


@pytest.mark.parametrize("library", METHODS)
def test_a_head_as_the_hosts_own_is_exported_and_answers_the_same(library, there, capsys):
    method, options = METHODS[library]
    words = ("--method", method, "--options", options, "--threads", "1", "--quiet")
    main(["train", *DATA, *words, "--pooling", POOLING[library], "--out", "run"])
    main(["export", "run", "--format", library, "--out", "there"])
    head = load_file(there / "there" / ("adapter_model.safetensors" if library == "peft" else "model_head.safetensors"))
    assert any(tensor.shape == (2, 16) for tensor in head.values()), "the matrix of two labels"
    if library == "adapterhub":
        return  # that it reads back bit for bit: tests/checkpoints/foreign/test_export.py
    main(["import", "there", "--host", "bert", "--name", "back", "--out", "back"])
    capsys.readouterr()
    answers = []
    for path in ("run", "back"):
        main(["predict", path, "good w1 w2", "--threads", "1", "--quiet"])
        answers.append(json.loads(capsys.readouterr().out)["probabilities"])
    assert list(answers[0].values()) == list(answers[1].values())


@pytest.mark.parametrize("library", METHODS)
def test_a_head_that_pools_names_the_flag_that_would_have_done_it(library, there, mistake):
    method, options = METHODS[library]
    main(["train", *DATA, "--method", method, "--options", options, "--threads", "1", "--quiet", "--out", "run"])
    told = mistake("export", "run", "--format", library, "--out", "there")
    assert f"--pooling {POOLING[library]}" in told
    assert "--without-head" in told
    assert not (there / "there").exists()
