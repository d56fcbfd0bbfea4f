"""Recipes: every number is the paper's, the counts are the published ones, and a recipe gives way to what is said."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml

import inlay
from inlay.errors import ConfigError
from inlay.host.count import NAMED_HOSTS
from inlay.recipes import read_recipe, recipe_names
from inlay.runs.joint_settings import JointSettings
from inlay.runs.settings import FusionOptions, Settings, unused
from inlay.runs.start import method_of
from inlay.training.optimizer import adamw, rate_at
from inlay.training.recipe import Recipe

ADAPTER = {
    "sites": ["attention", "ffn"], "reads": "output", "reduction": 32, "activation": "gelu_new",
    "init": "normal", "init_std": 0.01, "before_dropout": True,
}  # fmt: skip
COMPACT = {"sites": ["attention", "ffn"], "reduction": 32, "activation": "gelu_new", "before_dropout": True}
ADAMIX = {
    "patience": 0,
    "consistency": 1.0, "consistency_detach": True, "batch_size": 64, "weight_decay": 0.1, "warmup": 0.06, "mode": "inlay",
}  # fmt: skip


def bottleneck_mixture(size: int) -> dict[str, Any]:
    inner = {"kind": "houlsby", "sites": ["ffn"], "activation": "gelu", "size": size}
    return {"modules": 4, "share": "up", "method": inner}


JOINT = {
    "alpha": "annealed", "batch_size": 32, "epochs": 25, "steps_per_epoch": 2400, "patience": 0, "warmup": 0.1,
    "schedule": "linear", "weight_decay": 0.01, "max_length": 128, "splits": "official",
}  # fmt: skip
LORA = {"kind": "lora", "targets": ["q", "v"], "rank": 4, "alpha": 32, "dropout": 0.1}
PUBLISHED: dict[tuple[str, ...], dict[str, Any]] = {
    ("compacter", "houlsby", "rte"): {"lr": 3e-4, "norms": True, "options": ADAPTER},
    ("compacter", "pfeiffer", "rte"): {"lr": 3e-4, "norms": True, "options": ADAPTER | {"sites": ["attention"]}},
    ("compacter", "adapterdrop", "rte"): {"lr": 3e-4, "norms": True, "options": ADAPTER | {"leave_out": [0, 1, 2, 3, 4]}},
    ("compacter", "lowrank", "rte"): {"lr": 3e-3, "norms": True, "options": COMPACT | {"rank": 1}},
    ("compacter", "phm", "rte"): {"lr": 3e-3, "norms": True, "options": COMPACT | {"n": 12}},
    ("compacter", "compacter", "rte"): {"lr": 3e-3, "norms": True, "options": COMPACT | {"n": 4, "rank": 1}},
    ("compacter", "compacter++", "rte"): {"lr": 3e-3, "norms": True, "options": COMPACT | {"n": 4, "rank": 1, "sites": ["ffn"]}},
    ("compacter", "bitfit", "rte"): {"lr": 3e-4, "norms": None, "options": {"head": True}},
    ("compacter", "", "mnli"): {
        "method": "compacter", "batch_size": 100, "warmup": 500, "schedule": "linear", "epochs": 3, "select": "mean",
        "splits": "compacter", "answers": "index", "answering": "generation", "patience": 0,
    },
    ("compacter", "", "record"): {"epochs": 3, "answers": "text"},
    ("compacter", "", "qqp"): {"epochs": 3, "metrics": ("f1", "accuracy")},
    ("compacter", "", "qnli"): {"epochs": 3, "metrics": None},
    ("compacter", "", "sst2"): {"epochs": 3, "metrics": None},
    ("compacter", "", "mrpc"): {"epochs": 20, "metrics": ("f1", "accuracy")},
    ("compacter", "", "cola"): {"epochs": 20, "metrics": ("matthews",)},
    ("compacter", "", "cb"): {"epochs": 20, "metrics": ("macro_f1", "accuracy")},
    ("compacter", "", "multirc"): {"epochs": 20, "metrics": ("f1", "group_exact_match")},
    ("compacter", "mode full", "rte"): {"lr": 3e-4, "epochs": 20},
    ("adapterfusion", "", "rte"): {"method": "pfeiffer", "lr": 1e-4, "epochs": 30, "schedule": "linear", "splits": "official", "options": {"reduction": 16}},
    ("adapterfusion", "mode fusion", "rte"): {"lr": 5e-5, "epochs": 10, "query": "normed", "value": True, "strength": 0.01},
    ("adamix-bert", "", "rte"): {"method": "mixture", "lr": 4e-4, "epochs": 40, "options": bottleneck_mixture(16)} | ADAMIX,
    ("adamix-roberta", "", "rte"): {"method": "mixture", "lr": 3e-4, "epochs": 20, "options": bottleneck_mixture(48)} | ADAMIX,
    ("adamix-fewshot", "", "rte"): {
        "method": "mixture", "lr": 3e-4, "rows": 30, "validation": False, "answer_with": "words", "options": bottleneck_mixture(48),
        "max_steps": 1000, "schedule": "constant", "batch_size": 8, "weight_decay": 0.1, "warmup": 0.06, "consistency": 1.0,
        "consistency_detach": True,
    },
    ("adamix-nlg", "", "e2e"): {
        "method": "mixture", "lr": 2e-4, "epochs": 20, "batch_size": 8, "warmup": 2000, "weight_decay": 0.01, "schedule": "linear",
        "label_smoothing": 0.1, "beams": 10, "length_penalty": 0.8, "no_repeat_ngram": 4, "consistency": 100.0,
        "consistency_detach": True, "patience": 0, "options": {"modules": 8, "share": "up", "method": LORA},
    },
    ("adamix-nlg", "", "webnlg"): {"epochs": 25, "warmup": 2500, "weight_decay": 0.01, "label_smoothing": 0.1},
    ("adamix-nlg", "", "dart"): {
        "epochs": 20, "warmup": 2000, "weight_decay": 0.0, "label_smoothing": 0.0,
        "options": {"modules": 8, "share": "up", "method": LORA | {"dropout": 0.0}},
    },
    ("lora-nlg", "", "e2e"): {
        "method": "lora", "lr": 2e-4, "epochs": 20, "batch_size": 8, "warmup": 2000, "weight_decay": 0.01, "schedule": "linear",
        "label_smoothing": 0.1, "beams": 10, "length_penalty": 0.8, "no_repeat_ngram": 4, "patience": 0,
        "options": {name: value for name, value in LORA.items() if name != "kind"},
    },
    ("lora-nlg", "", "webnlg"): {"epochs": 25, "warmup": 2500},
    ("lora-nlg", "", "dart"): {"weight_decay": 0.0, "label_smoothing": 0.0, "options": {name: value for name, value in LORA.items() if name != "kind"} | {"dropout": 0.0}},
    ("few-labels", "pfeiffer", "rte"): {"lr": 1e-3},
    ("few-labels", "mode full", "rte"): {"lr": 5e-5},
    ("few-labels", "mode fusion", "rte"): {"lr": 5e-4},
    ("few-labels", "", "rte"): {"head_first": True, "pairs": 1.0, "batch_size": 16, "warmup": 0.2, "epochs": 10, "patience": 0},
    ("mt-a", "", "rte"): JOINT | {"method": "pal", "lr": 2e-5, "options": {"size": 204, "heads": 12}},
    ("mt-a", "mode mt-a", "rte"): JOINT | {"mode": "mt-a", "host_lr": 2e-5},
    ("mt-a", "mode full", "rte"): JOINT | {"mode": "full", "lr": 2e-5, "host_lr": None},
    ("mt-a", "pal", "rte"): {"mode": "mt-a", "lr": 2e-5, "options": {"size": 204, "heads": 12}, "host_lr": 2e-5},
    ("mt-a", "pfeiffer", "rte"): {"mode": "mt-a", "lr": 1e-4, "options": {"reduction": 16}, "host_lr": 2e-5},
    ("default", "", "rte"): {
        "batch_size": 32, "warmup": 0.06, "schedule": "linear", "weight_decay": 0.01, "clip": 1.0, "patience": 3, "splits": "official",
    },
}  # fmt: skip
"""(recipe, method or mode, task) to what the papers and their code say, and what we chose where they are silent."""


def settings(recipe: str | None, how: str = "", task: str = "rte", **more: Any) -> Settings:
    chosen = {"mode": how.removeprefix("mode ")} if how.startswith("mode ") else {"method": how} if how else {}
    rows = {"train_file": Path("rows.jsonl")} if task in ("e2e", "webnlg", "dart") else {}
    if recipe == "mt-a":
        return JointSettings(**chosen | {"recipe": recipe, "host": "host", "out": Path("run"), "tasks": [task]} | more)
    return Settings(**chosen | rows | {"recipe": recipe, "host": "host", "out": Path("run"), "task": task} | more)


@pytest.mark.parametrize("key", PUBLISHED, ids=" ".join)
def test_a_recipe_says_what_was_published(key):
    found = settings(*key).model_dump()
    assert {name: found[name] for name in PUBLISHED[key]} == PUBLISHED[key]


def leaves(part: dict[str, Any], *path: str) -> list[tuple[tuple[str, ...], Any]]:
    """Every value of nested tables with its way there."""
    found = []
    for name, value in part.items():
        found += leaves(value, *path, name) if isinstance(value, dict) else [((*path, name), value)]
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_every_value_of_every_recipe_is_in_that_table(name):
    """Also a method's options. A value that is added to a YAML file without its entry above fails here."""
    recipe, entries = read_recipe(name), {key: said for key, said in PUBLISHED.items() if key[0] == name}
    parts = [(lambda how, task: True, recipe["settings"])]
    parts += [
        (lambda how, task, m=m: how == f"mode {m}" or (m == "inlay" and not how), p) for m, p in recipe["modes"].items()
    ]
    usual = recipe["settings"].get("method", recipe["modes"].get("inlay", {}).get("method"))
    parts += [(lambda how, task, m=m: how == m or (not how and m == usual), p) for m, p in recipe["methods"].items()]
    parts += [(lambda how, task, t=t: task == t, p) for t, p in recipe["tasks"].items()]
    for belongs, part in parts:
        told = [dict(leaves(said)) for (_, how, task), said in entries.items() if belongs(how, task)]
        for path, value in leaves(part):
            value = tuple(value) if path[0] == "metrics" else value
            assert any(said.get(path, "nothing") == value for said in told), (name, path, value)


def test_every_line_with_a_value_says_where_it_is_from():
    for file in (Path(inlay.__file__).parent / "recipes").glob("*.yaml"):
        for line in file.read_text(encoding="utf-8").splitlines():
            said, _, source = line.partition("#")
            if re.search(r": [^ ]*[0-9]|: .*[:\[] ?[0-9]", said) and not said.startswith("about"):
                assert re.search("paper|published code|ours|AdaMix", source), f"{file.name}: {line}"


def test_the_default_recipe_is_what_is_used_without_one():
    said = read_recipe("default")["settings"]
    usual = settings(None).model_dump()
    assert {name: usual[name] for name in said} == said
    assert settings("default").model_dump(exclude={"recipe"}) == settings(None).model_dump(exclude={"recipe"})


def test_the_recipes_are_those_that_are_promised():
    assert recipe_names() == (
        "adamix-bert",
        "adamix-fewshot",
        "adamix-nlg",
        "adamix-roberta",
        "adapterfusion",
        "compacter",
        "default",
        "few-labels",
        "lora-nlg",
        "mt-a",
    )
    assert all(read_recipe(name)["about"] for name in recipe_names())


COUNTS = {
    "houlsby": 1_855_104, "pfeiffer": 951_360, "adapterdrop": 1_101_984, "lowrank": 161_664, "phm": 398_976,
    "compacter": 161_728, "compacter++": 104_704, "bitfit": 250_368 + 32_128,
}  # fmt: skip


@pytest.mark.parametrize("method", COUNTS)
def test_the_counts_of_compacters_table_by_recipe_and_method_alone(method):
    said = settings("compacter", method)
    found = method_of(said)
    assert found is not None
    host = NAMED_HOSTS["t5-base"]
    counted = inlay.count(host, found, norms=said.norms, model=hf.AutoModelForSeq2SeqLM)
    assert counted.trainable == COUNTS[method]


def test_what_is_said_wins_over_the_recipe_and_options_are_joined():
    said = settings("compacter", "houlsby", lr=1.0, options=["reduction=16"])
    assert said.lr == 1.0
    assert said.options == ADAPTER | {"reduction": 16}
    again = Settings(**said.model_dump())
    assert again == said, "a run's own config.yaml gives the same settings again"


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no recipe 'compactor'. Did you mean 'compacter'"):
        settings("compactor")


# settings that nothing uses


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"strength": 0.1, "query": "output"}, ("strength", "query")),
        ({"mode": "head", "method": "lora"}, ("method",)),
        ({"mode": "fusion", "options": {"reduction": 2}}, ("options",)),
        ({"mode": "full", "norms": True, "start": Path("a")}, ("norms", "start")),
        ({"members": (Path("a"),)}, ("members",)),
        ({"consistency": 2.0}, ("consistency",)),
        ({"rows_seed": 1}, ("rows_seed",)),
        ({"pooling": "host", "head_layers": 2}, ("head_layers",)),
        ({"answering": "ranking", "beams": 4}, ("beams",)),
        ({"length_penalty": 2.0}, ("length_penalty",)),
    ],
)
def test_a_setting_that_nothing_uses_is_refused(more, named):
    told = unused(settings(None, **more))
    assert {line.split()[0].strip("`") for line in told} == set(named), told


@pytest.mark.parametrize("key", PUBLISHED, ids=" ".join)
def test_no_recipe_says_something_that_is_refused(key):
    said = settings(*key)
    assert not (said.of_no_use() if isinstance(said, JointSettings) else unused(said))


def test_the_settings_of_a_fusion_are_those_of_add_fusion():
    import inspect

    known = inspect.signature(inlay.add_fusion).parameters
    assert set(FusionOptions.model_fields) <= set(known)
    assert settings(None, "mode fusion", value=False, sites=["ffn"]).fusion_options() == {
        "value": False,
        "sites": ("ffn",),
    }


# the schedule and the optimizer


def test_warm_up_is_a_share_or_a_number_of_steps():
    assert Recipe(warmup=0.1).warmup_steps(200) == 20
    assert Recipe(warmup=500).warmup_steps(200) == 500
    with pytest.raises(ConfigError, match="a number of steps is whole"):
        Recipe(warmup=1.5)


def test_the_schedules():
    rates = {
        schedule: [rate_at(step, 110, Recipe(lr=1.0, warmup=10, schedule=schedule)) for step in range(110)]
        for schedule in ("linear", "cosine", "constant")
    }
    for found in rates.values():
        assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates["linear"][60] == pytest.approx(0.5)
    assert rates["cosine"][60] == pytest.approx(0.5)
    assert rates["cosine"][35] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert set(rates["constant"][10:]) == {1.0}


def test_v_of_a_fusion_does_not_decay_and_a_hosts_own_value_does():
    names = (
        "inlays.all.f.parts.encoder:0:ffn.value.weight",
        "bert.encoder.layer.0.attention.self.value.weight",
        "x.bias",
    )
    learned = {name: torch.nn.Parameter(torch.ones(2, 2) if "weight" in name else torch.ones(2)) for name in names}
    optimizer = adamw(learned, Recipe(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(learned[name])] for name in names] == [0.0, 0.1, 0.0]
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.9), 1e-6)


def test_what_chooses_the_best_state():
    scores = {"f1": 0.5, "accuracy": 0.7}
    assert Recipe().selected(scores) == ("f1", 0.5)
    assert Recipe(select="accuracy").selected(scores) == ("accuracy", 0.7)
    assert Recipe(select="mean").selected(scores)[1] == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="this task has the metrics f1, accuracy"):
        Recipe(select="pearson").selected(scores)


def test_the_files_are_plain_yaml():
    folder = Path(inlay.__file__).parent / "recipes"
    for file in folder.glob("*.yaml"):
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["about"]
