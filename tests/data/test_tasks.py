import json

import pytest
import torch

import inlay
from inlay.data import Data, DataError, Task, builtin_tasks, prepare, task_named
from inlay.data.examples import examples
from inlay.data.labels import find_labels
from inlay.data.rows import Table

FUSION_16 = [
    "mnli",
    "qqp",
    "sst2",
    "winogrande",
    "imdb",
    "hellaswag",
    "socialiqa",
    "cosmosqa",
    "scitail",
    "argument",
    "csqa",
    "boolq",
    "mrpc",
    "sick",
    "rte",
    "cb",
]
REST = ["cola", "stsb", "qnli", "copa", "wic", "multirc", "record"]
TEXT = ["e2e", "webnlg", "dart"]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def some(count, labels=("x", "y")):
    return [{"text": f"row {i}", "label": labels[i % len(labels)]} for i in range(count)]


def test_the_papers_tasks_are_built_in():
    assert list(builtin_tasks()) == FUSION_16 + REST + TEXT
    assert (task_named("cola").main, task_named("stsb").main, task_named("multirc").main) == (
        "matthews",
        "pearson",
        "f1",
    )
    with pytest.raises(inlay.NamingError, match="Did you mean 'winogrande'"):
        task_named("winogrand")


@pytest.mark.parametrize(
    "prompt",
    ["{text.__class__}", "{parts.__class__.__format__.__globals__}", "{parts[0].real}", "{text:>9000000000}", "{text:{parts}}",
     "{text!r}", "{}", "{0.a}", "{text", "{text[]}"],
)  # fmt: skip
def test_a_prompt_only_names_columns(prompt):
    """A task may come from anyone, and what its prompt reaches is read by the host: not the server's environment."""
    with pytest.raises(inlay.ConfigError, match="the prompt"):
        Task(name="x", kind="text", prompt=prompt)


def test_prompts_name_columns_and_what_is_in_them():
    task = Task(name="x", kind="text", text="a", prompt="{{ {a} of {b[0]}, {b}, {c[d][1]} }}")
    rows = Table([{"a": "1", "b": ["2", "3"], "c": {"d": [4, 5]}}], "rows")
    assert examples(task, rows, labelled=False)[0].prompt == "{ 1 of 2, 2, 3, 5 }"


def test_a_built_in_task_that_asks_for_something_else_has_no_labels(tmp_path):
    write(tmp_path / "sst2" / "train.jsonl", [{"text": f"row {i}", "label": i / 2} for i in range(20)])
    task = prepare(Data(task="sst2", data_dir=tmp_path, kind="regression")).task
    assert (task.kind, task.labels, task.positive) == ("regression", (), None)
    kept = Data(task="mrpc", data_dir=tmp_path, kind="classification").described()
    assert (kept.labels, kept.positive) == (task_named("mrpc").labels, task_named("mrpc").positive)


OFFICIAL = {
    "cola": ("matthews",), "sst2": ("accuracy",), "mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "stsb": ("pearson", "spearman"),
    "mnli": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",), "boolq": ("accuracy",), "cb": ("accuracy", "macro_f1"),
    "copa": ("accuracy",), "multirc": ("f1", "group_exact_match"), "wic": ("accuracy",), "record": ("token_f1", "exact_match"),
}  # fmt: skip
"""What GLUE and SuperGLUE report. ReCoRD's own are of texts; here it is a choice among the entities."""


@pytest.mark.parametrize("name", OFFICIAL)
def test_glue_and_superglue_are_measured_as_officially(name):
    assert set(OFFICIAL[name]) <= set(task_named(name).metrics)
    assert task_named(name).main == OFFICIAL[name][0]


def test_the_papers_split_rule_goes_by_size():
    """Karimi Mahabadi et al. 2021: sets of fewer than 10,000 training rows are halved, others hold out 1,000."""
    small = {"cola", "mrpc", "rte", "stsb", "boolq", "cb", "copa", "wic", "csqa", "sick"}
    large = {"qqp", "sst2", "qnli", "winogrande", "imdb", "hellaswag", "socialiqa", "cosmosqa", "scitail", "record"}
    assert {name for name in small if task_named(name).compacter != "halve"} == set()
    assert {name for name in large if task_named(name).compacter != "hold_out"} == set()
    assert task_named("mnli").compacter == "mismatched"


@pytest.mark.parametrize("csv_trains", [True, False])
@pytest.mark.parametrize(("written", "value"), [(("True", "False"), (True, False)), (("1.0", "0.0"), (1.0, 0.0))])
def test_the_same_labels_in_another_kind_of_file_are_the_same(tmp_path, written, value, csv_trains):
    """As pandas writes them to CSV and to JSON lines; a run keeps the labels of its training rows."""
    lines = write(tmp_path / "rows.jsonl", some(40, value))
    cells = tmp_path / "rows.csv"
    cells.write_text("text,label\n" + "".join(f"row {i},{written[i % 2]}\n" for i in range(40)))
    train, other = (cells, lines) if csv_trains else (lines, cells)
    prepared = prepare(Data(train_file=train, validation_file=other))
    assert set(prepared.task.labels) == set(written if csv_trains else ("true", "false") if value[0] is True else "10")
    assert [row.target for row in prepared.validation] == [row.target for row in prepared.train]


def test_labels_that_differ_stay_apart_and_others_are_not_made_alike():
    both = Task(labels=("True", "true"))
    asked = lambda task, label: examples(task, Table([{"text": "a", "label": label}], "rows"))[0].target
    assert (asked(both, "True"), asked(both, True)) == (0, 1)
    for task, label in (
        (both, "TRUE"),
        (Task(labels=("Yes", "No")), "yes"),
        (Task(labels=("01", "02")), 1),
        (Task(labels=("1.50", "1.5")), "1.500"),
    ):
        with pytest.raises(DataError, match="was not seen in training"):
            asked(task, label)
    several = Task(kind="multilabel", labels=("False", "True"))
    given = {"text": "a", "labels": [True, "False", True]}
    assert examples(several, Table([given], "rows"))[0].target == (0, 1)
    tags = Task(kind="tags", labels=("0.0", "1.0"), metrics=("token_accuracy",))
    assert examples(tags, Table([{"tokens": ["a", "b", "c"], "tags": [1, 0, 1]}], "rows"))[0].target == (1, 0, 1)
    choice = Task(kind="choice")
    assert examples(choice, Table([{"text": "a", "choices": ["b", "c"], "label": "1.0"}], "rows"))[0].target == 1


def test_labels_of_own_rows_are_found_and_shown(tmp_path):
    prepared = prepare(
        Data(
            train_file=write(tmp_path / "t.jsonl", some(40, (3, 1, 2))),
            validation_file=write(tmp_path / "v.jsonl", some(9, (1, 2, 3))),
        )
    )
    assert prepared.task.labels == ("1", "2", "3")
    assert "labels found: 1, 2, 3" in prepared.notes


def test_labels_have_one_order_in_every_process():
    """A set of texts has another order in each: 1 and 01 are the same number, and still two classes."""
    written = ["-0", "0", "00", "000", "0000", "00000", "1", "01", "001", "0001", "10", "2"]
    found = find_labels(Task(), Table([{"text": "a", "label": label} for label in written], "rows"))
    assert found == ("-0", "0", "00", "000", "0000", "00000", "0001", "001", "01", "1", "2", "10")


def test_labels_of_thousands_of_digits_are_names():
    written = ["9" * 5000, "1", "2"]
    assert find_labels(Task(), Table([{"text": "a", "label": label} for label in written], "rows")) == (
        "1", "2", "9" * 5000,
    )  # fmt: skip


def test_f1_of_three_labels_is_refused(tmp_path):
    """It would be that of the last one alone, and look like that of all."""
    file = write(tmp_path / "t.jsonl", some(40, ("a", "b", "c")))
    for labels in (None, ("a", "b", "c")):
        with pytest.raises(DataError, match="f1 is about one of two labels, but own has 3: a, b, c. Use macro_f1"):
            prepare(Data(train_file=file, labels=labels, metrics=("f1",)))
    assert prepare(Data(train_file=write(tmp_path / "t.jsonl", some(40)), metrics=("f1",))).task.main == "f1"


def test_groups_that_nobody_named_are_not_measured(tmp_path):
    """All rows would be one group, of which 1 wrong answer makes 0."""
    with pytest.raises(DataError, match="group_exact_match is about groups of rows, and own has none"):
        prepare(Data(train_file=write(tmp_path / "t.jsonl", some(40)), metrics=("accuracy", "group_exact_match")))


def test_columns_may_be_templates(tmp_path):
    rows = [{"q": f"why {i}", "a": "so", "ok": i % 2 == 0} for i in range(20)]
    prepared = prepare(Data(train_file=write(tmp_path / "t.jsonl", rows), text="{q}? {a}", label="ok"))
    assert prepared.task.labels == ("false", "true")
    assert prepared.train[0].texts[0][0].startswith("why")
    assert prepared.train[0].texts[0][0].endswith("? so")


def test_labels_that_look_like_numbers_and_are_none(tmp_path):
    prepared = prepare(Data(train_file=write(tmp_path / "t.jsonl", some(20, ("²", "--1")))))
    assert prepared.task.labels == ("--1", "²")


def test_choices_may_be_several_columns_as_csv_has_them(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("q,a,b,right\n" + "why?,so,or so,1\n" * 20, encoding="utf-8")
    prepared = prepare(Data(train_file=file, kind="choice", text="q", choices="a, b", label="right"))
    assert prepared.train[0].texts == (("why?", "so"), ("why?", "or so"))
    assert prepared.train[0].target == 1
    with pytest.raises(DataError, match="no column 'c'"):
        prepare(Data(train_file=file, kind="choice", text="q", choices="a,c", label="right"))
    file.write_text("q,a,b,right\n" + "why?,so,or so,²\n" * 20, encoding="utf-8")
    with pytest.raises(DataError, match="not the index"):
        prepare(Data(train_file=file, kind="choice", text="q", choices="a,b", label="right"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "txt"}, "no column 'txt'. Did you mean 'text'"),
        ({"label": "lable"}, "no column 'lable'. Did you mean 'label'"),
        ({"labels": ("x", "z")}, "label 'y' was not seen in training"),
    ],
)
def test_wrong_columns_and_labels_name_the_nearest(tmp_path, given, message):
    with pytest.raises(DataError, match=message):
        prepare(Data(train_file=write(tmp_path / "t.jsonl", some(20)), **given))


def test_a_column_that_no_row_has_is_named_once(tmp_path):
    with pytest.raises(DataError) as told:
        prepare(Data(train_file=write(tmp_path / "t.jsonl", some(20)), text="{txt}!", labels=("x", "y")))
    assert str(told.value).count("no column 'txt'") == 1


def test_a_label_only_in_the_validation_rows_is_refused_with_its_line(tmp_path):
    files = {
        "train_file": write(tmp_path / "t.jsonl", some(20)),
        "validation_file": write(tmp_path / "v.jsonl", [*some(4), {"text": "a", "label": "new"}]),
    }
    with pytest.raises(DataError, match=r"v\.jsonl, line 5: label 'new' was not seen in training"):
        prepare(Data(**files))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*some(10), {"text": "one", "label": "rare"}], "single row of the class 'rare'"),
        ([{"text": f"{i}", "label": "x"} for i in range(10)], "only one class"),
        ([*some(10), {"text": None, "label": "x"}], "line 11: column 'text' is missing or null"),
        ([*some(10), {"text": "a", "label": None}], "line 11: column 'label' is missing, null or empty"),
        ([*some(10), {"text": "a", "label": ""}], "line 11: column 'label' is missing, null or empty"),
        ([*some(10), {"text": "a", "label": float("nan")}], "line 11: column 'label' is missing, null or empty"),
        ([{"text": f"{i}", "label": i / 7} for i in range(20)], r"and 15 more\..* use `kind` regression"),
        ([*some(10), {"text": "  ", "label": "x"}], "line 11: the text"),
    ],
)
def test_rows_that_cannot_be_learned_from(tmp_path, rows, message):
    files = {
        "train_file": write(tmp_path / "t.jsonl", rows),
        "validation_file": write(tmp_path / "v.jsonl", some(4, ("x",))),
    }
    with pytest.raises(DataError, match=message):
        prepare(Data(**files))


def test_all_broken_rows_are_counted(tmp_path):
    rows = [*some(50), *({"text": None, "label": "x"} for _ in range(8))]
    with pytest.raises(DataError, match="(?s)line 51: .*line 55: .*and 3 more"):
        prepare(
            Data(train_file=write(tmp_path / "t.jsonl", rows), validation_file=write(tmp_path / "v.jsonl", some(4)))
        )


def test_splits(tmp_path):
    folder = tmp_path / "cb"
    labels = ("entailment", "contradiction", "neutral")
    rows = [{"premise": f"p{i}", "hypothesis": "h", "label": labels[i % 3]} for i in range(60)]
    write(folder / "train.jsonl", rows)
    write(folder / "validation.jsonl", rows[:21])
    official = prepare(Data(task="cb", data_dir=tmp_path))
    assert [len(official.train), len(official.validation), len(official.test), official.judge] == [
        60,
        21,
        0,
        "validation",
    ]
    halved = prepare(Data(task="cb", data_dir=tmp_path, splits="compacter"))
    assert [len(halved.train), len(halved.validation), len(halved.test), halved.judge] == [60, 10, 11, "test"]
    assert sorted(e.texts for e in (*halved.validation, *halved.test)) == sorted(e.texts for e in official.validation)
    assert len(prepare(Data(task="cb", data_dir=tmp_path, rows=30)).train) == 30
    (folder / "validation.jsonl").unlink()
    held = prepare(Data(task="cb", data_dir=tmp_path))
    assert [len(held.train), len(held.validation)] == [54, 6]


def test_compacters_splits_of_a_large_set_need_more_rows_than_they_hold_out(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(1010)]
    write(tmp_path / "sst2" / "train.jsonl", rows)
    write(tmp_path / "sst2" / "validation.jsonl", rows[:2])
    said = Data(task="sst2", data_dir=tmp_path, splits="compacter")
    assert [len(prepare(said).train), len(prepare(said).validation)] == [10, 1000]
    write(tmp_path / "sst2" / "train.jsonl", rows[:1000])
    with pytest.raises(DataError, match=r"holds out 1,000 training rows of sst2, and .* has 1,000. Use splits held"):
        prepare(said)


def test_imdb_is_validated_on_held_out_rows_and_judged_on_its_test_rows(tmp_path):
    rows = [{"text": f"t{i}", "label": ("neg", "pos")[i % 2]} for i in range(40)]
    write(tmp_path / "imdb" / "train.jsonl", rows)
    write(tmp_path / "imdb" / "test.jsonl", [row | {"text": f"test {row['text']}"} for row in rows[:6]])
    found = prepare(Data(task="imdb", data_dir=tmp_path))
    assert [len(found.train), len(found.validation), len(found.test), found.judge] == [36, 4, 6, "test"]
    assert sorted(e.texts[0][0] for e in (*found.train, *found.validation)) == sorted(row["text"] for row in rows)
    assert found.notes == ("no validation rows: 4 training rows are held out for validation",)
    again = prepare(Data(task="imdb", data_dir=tmp_path, rows=8, rows_seed=7))
    assert again.validation == found.validation, "which rows are held out depends on nothing"


def test_without_validation_the_validation_rows_judge_only_where_no_test_rows_do(tmp_path):
    rows = [{"text": f"t{i}", "label": ("neg", "pos")[i % 2]} for i in range(20)]
    for split in ("train", "validation", "test"):
        write(tmp_path / "imdb" / f"{split}.jsonl", [row | {"text": f"{split} {row['text']}"} for row in rows])
    said = Data(task="imdb", data_dir=tmp_path, validation=False)
    for judged in ("test", "validation"):
        found = prepare(said)
        assert [len(found.train), len(found.validation), len(found.test)] == [20, 0, 20]
        assert all(example.texts[0][0].startswith(judged) for example in found.test)
        (tmp_path / "imdb" / f"{judged}.jsonl").unlink()  # then the other one judges


@pytest.mark.parametrize("name", ["hellaswag", "cosmosqa"])
@pytest.mark.parametrize(("there", "held_out"), [(30, 6), (6000, 1000), (3, 1)])
def test_a_set_without_training_rows_is_split_by_the_stated_rule(tmp_path, name, there, held_out):
    rows = [{"context": f"c{i}", "question": "q", "choices": ["a", "b"], "label": i % 2} for i in range(there)]
    write(tmp_path / name / "validation.jsonl", rows)
    found = prepare(Data(task=name, data_dir=tmp_path))
    assert [len(found.train), len(found.validation), found.judge] == [there - held_out, held_out, "validation"]
    assert not {e.texts for e in found.train} & {e.texts for e in found.validation}
    assert "cannot be compared with published ones" in found.notes[0]
    order = torch.randperm(there, generator=torch.Generator().manual_seed(42)).tolist()
    wanted = [rows[i]["context"] for i in order[:held_out]]
    assert [e.texts[0][0].split()[0] for e in found.validation] == wanted, "seed 42, as stated"


def test_mismatched_rows_validate_mnli(tmp_path):
    rows = [{"premise": f"p{i}", "hypothesis": "h", "label": ("entailment", "neutral")[i % 2]} for i in range(8)]
    for split, count in (("train", 8), ("validation", 4), ("mismatched", 2)):
        write(tmp_path / "mnli" / f"{split}.jsonl", rows[:count])
    prepared = prepare(Data(task="mnli", data_dir=tmp_path, splits="compacter"))
    assert [len(prepared.validation), len(prepared.test)] == [2, 4]


def test_settings_that_cannot_be_used_are_named():
    with pytest.raises(inlay.ConfigError, match="not a built-in task.*Did you mean 'rte'"):
        Data(task="rtee")
    with pytest.raises(inlay.ConfigError, match="`data_dir` and `hub` are given"):
        Data(task="rte", data_dir=".", hub="x")
    with pytest.raises(inlay.ConfigError, match="does not measure regression"):
        Task(kind="regression", metrics=("accuracy",))
