"""Rows of the hub, read by `datasets` itself from a folder that looks like the hub's: columns, types and hidden labels."""

from __future__ import annotations

import datasets
import pytest

from inlay.cli import main
from inlay.data import Data, DataError, prepare
from tests.data.shelf import put

HIDDEN = -1
ENTAILS = datasets.ClassLabel(names=["entailment", "not_entailment"])
MNLI = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])


@pytest.fixture(autouse=True)
def shelf(tmp_path, monkeypatch):
    """The folder in which `datasets` finds org/name, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield tmp_path
    if not bars:
        datasets.enable_progress_bars()


def sizes(prepared):
    return [len(prepared.train), len(prepared.validation), len(prepared.test)]


def pairs(count, labels, a="sentence1", b="sentence2"):
    return [{a: f"a{i}", b: f"b{i}", "label": labels[i % len(labels)], "idx": i} for i in range(count)]


def test_rte_has_other_columns_there_and_hides_its_test_labels(shelf):
    splits = {"train": pairs(8, (0, 1)), "validation": pairs(4, (1, 0)), "test": pairs(3, (HIDDEN,))}
    put(shelf, "nyu-mll/glue", splits, "rte", label=ENTAILS)
    prepared = prepare(Data(task="rte"))
    assert sizes(prepared) == [8, 4, 0]
    assert prepared.judge == "validation"
    assert [example.texts for example in prepared.train[:2]] == [(("a0", "b0"),), (("a1", "b1"),)]
    assert [prepared.task.labels[e.target] for e in prepared.validation] == ["not_entailment", "entailment"] * 2


def test_mnli_validates_on_matched_and_keeps_mismatched_for_the_compacter_splits(shelf):
    def some(count, word):
        rows = pairs(count, (0, 1, 2), "premise", "hypothesis")
        return [row | {"premise": f"{word} {i}"} for i, row in enumerate(rows)]

    hidden = [row | {"label": HIDDEN} for row in some(2, "test")]
    splits = {
        "train": some(9, "train"), "validation_matched": some(6, "matched"), "validation_mismatched": some(3, "mismatched"),
        "test_matched": hidden, "test_mismatched": hidden,
    }  # fmt: skip
    put(shelf, "nyu-mll/glue", splits, "mnli", label=MNLI)
    official = prepare(Data(task="mnli"))
    assert sizes(official) == [9, 6, 0]
    assert {e.texts[0][0].split()[0] for e in official.validation} == {"matched"}
    assert [official.task.labels[e.target] for e in official.train[:3]] == ["entailment", "neutral", "contradiction"]
    compacter = prepare(Data(task="mnli", splits="compacter"))
    assert sizes(compacter) == [9, 3, 6]
    assert {e.texts[0][0].split()[0] for e in compacter.validation} == {"mismatched"}
    assert {e.texts[0][0].split()[0] for e in compacter.test} == {"matched"}


def test_stsb_is_of_numbers_and_a_hidden_one_is_minus_one(shelf):
    splits = {"train": pairs(6, (5.0, 3.8, 0.0)), "validation": pairs(3, (2.5,)), "test": pairs(2, (-1.0,))}
    put(shelf, "nyu-mll/glue", splits, "stsb", label=datasets.Value("float32"))
    prepared = prepare(Data(task="stsb"))
    assert sizes(prepared) == [6, 3, 0]
    assert [e.target for e in prepared.train[:3]] == pytest.approx([5.0, 3.8, 0.0])


def test_winogrande_counts_its_options_from_one_and_leaves_answers_empty(shelf):
    row = {"sentence": "Al called Bo, for _ was late.", "option1": "Al", "option2": "Bo"}
    splits = {
        "train": [row | {"answer": answer} for answer in "1221"],
        "validation": [row | {"answer": "2"}],
        "test": [row | {"answer": ""}],
    }
    put(shelf, "allenai/winogrande", splits, "winogrande_xl")
    prepared = prepare(Data(task="winogrande"))
    assert sizes(prepared) == [4, 1, 0]
    assert prepared.train[0].texts == (
        ("Al called Bo, for Al was late.", None),
        ("Al called Bo, for Bo was late.", None),
    )
    assert [e.target for e in prepared.train] == [0, 1, 1, 0]


def test_socialiqa_has_a_column_for_each_answer(shelf):
    row = {"context": "Al fell.", "question": "What next?", "answerA": "cry", "answerB": "sing", "answerC": "run"}
    splits = {"train": [row | {"label": label} for label in "123"], "validation": [row | {"label": "2"}]}
    put(shelf, "allenai/social_i_qa", splits)
    prepared = prepare(Data(task="socialiqa"))
    assert sizes(prepared) == [3, 1, 0]
    assert prepared.train[0].texts == tuple(("Al fell. What next?", answer) for answer in ("cry", "sing", "run"))
    assert [e.target for e in prepared.train] == [0, 1, 2]


def test_csqa_keeps_its_choices_inside_a_column_and_answers_with_a_letter(shelf):
    row = {"id": "x", "question": "Where?", "question_concept": "c",
           "choices": {"label": list("ABCDE"), "text": ["bank", "sea", "sky", "bed", "hat"]}}  # fmt: skip
    splits = {
        "train": [row | {"answerKey": letter} for letter in "AEC"],
        "validation": [row | {"answerKey": "B"}],
        "test": [row | {"answerKey": ""}],
    }
    put(shelf, "tau/commonsense_qa", splits)
    prepared = prepare(Data(task="csqa"))
    assert sizes(prepared) == [3, 1, 0]
    assert prepared.train[0].texts == tuple(("Where?", c) for c in ("bank", "sea", "sky", "bed", "hat"))
    assert [e.target for e in prepared.train] == [0, 4, 2]


def test_multirc_groups_the_answers_of_a_question(shelf):
    rows = [
        {"paragraph": "It rained.", "question": q, "answer": a, "idx": {"paragraph": 0, "question": n, "answer": m}, "label": m}
        for n, q in enumerate(("What fell?", "Who ran?"))
        for m, a in enumerate(("snow", "rain"))
    ]  # fmt: skip
    splits = {"train": rows, "validation": rows[:2], "test": [row | {"label": HIDDEN} for row in rows]}
    put(shelf, "aps/super_glue", splits, "multirc", label=datasets.ClassLabel(names=["False", "True"]))
    prepared = prepare(Data(task="multirc"))
    assert sizes(prepared) == [4, 2, 0]
    assert [e.texts[0] for e in prepared.train[:2]] == [
        ("It rained.", "What fell? snow"),
        ("It rained.", "What fell? rain"),
    ]
    assert [e.target for e in prepared.train] == [0, 1, 0, 1]
    first, second, third, fourth = (e.group for e in prepared.train)
    assert first == second != third == fourth


def test_copa_asks_for_the_cause_or_the_effect(shelf):
    row = {"premise": "It rained.", "choice1": "The street is wet.", "choice2": "The sun came out.", "idx": 0}
    splits = {
        "train": [row | {"question": "effect", "label": 0}, row | {"question": "cause", "label": 1}],
        "validation": [row | {"question": "effect", "label": 1}] * 2,
        "test": [row | {"question": "effect", "label": HIDDEN}],
    }
    put(shelf, "aps/super_glue", splits, "copa", label=datasets.ClassLabel(names=["choice1", "choice2"]))
    prepared = prepare(Data(task="copa"))
    assert sizes(prepared) == [2, 2, 0]
    assert prepared.train[0].texts == (
        ("It rained. What is the effect?", "The street is wet."),
        ("It rained. What is the effect?", "The sun came out."),
    )
    assert prepared.train[1].texts[0][0] == "It rained. What is the cause?"
    assert [e.target for e in prepared.train] == [0, 1]


def test_words_that_the_hub_numbers_are_words_again(shelf):
    """BoolQ and WiC: False and True there, false and true here; a test set with labels judges."""
    rows = [{"question": f"q{i}", "passage": "p", "idx": i, "label": i % 2} for i in range(4)]
    splits = {"train": rows, "validation": rows[:2], "test": rows[:3]}
    put(shelf, "aps/super_glue", splits, "boolq", label=datasets.ClassLabel(names=["False", "True"]))
    prepared = prepare(Data(task="boolq"))
    assert sizes(prepared) == [4, 2, 3]
    assert prepared.judge == "test"
    assert [prepared.task.labels[e.target] for e in prepared.test] == ["false", "true", "false"]


@pytest.mark.parametrize(
    ("name", "hub", "row", "label", "texts", "target"),
    [
        ("rte", "nyu-mll/glue:rte", {"sentence1": "p", "sentence2": "h"}, {"label": (1, 0)}, [("p", "h")], "not_entailment"),
        ("qnli", "nyu-mll/glue:qnli", {"question": "q", "sentence": "s"}, {"label": (0, 1)}, [("q", "s")], "entailment"),
        ("sst2", "nyu-mll/glue:sst2", {"sentence": "s"}, {"label": (1, 0)}, [("s", None)], "1"),
        ("cola", "nyu-mll/glue:cola", {"sentence": "s"}, {"label": (0, 1)}, [("s", None)], "0"),
        ("qqp", "nyu-mll/glue:qqp", {"question1": "a", "question2": "b"}, {"label": (1, 0)}, [("a", "b")], "1"),
        ("mrpc", "nyu-mll/glue:mrpc", {"sentence1": "a", "sentence2": "b"}, {"label": (1, 0)}, [("a", "b")], "1"),
        ("stsb", "nyu-mll/glue:stsb", {"sentence1": "a", "sentence2": "b"}, {"label": (3.5, 0.0)}, [("a", "b")], 3.5),
        ("cb", "aps/super_glue:cb", {"premise": "p", "hypothesis": "h"}, {"label": (1, 2)}, [("p", "h")], "contradiction"),
        ("boolq", "aps/super_glue:boolq", {"question": "q", "passage": "p"}, {"label": (1, 0)}, [("q", "p")], "true"),
        ("wic", "aps/super_glue:wic", {"word": "w", "sentence1": "a", "sentence2": "b"}, {"label": (0, 1)}, [("w: a", "b")], "false"),
        ("record", "aps/super_glue:record", {"passage": "p", "query": "@placeholder ran", "entities": ["Al", "Bo"]}, {"answers": (["Bo"], ["Al"])}, [("p Al ran", None), ("p Bo ran", None)], 1),
        ("hellaswag", "Rowan/hellaswag", {"ctx": "c", "endings": ["x", "y"]}, {"label": ("0", "1")}, [("c", "x"), ("c", "y")], 0),
        ("cosmosqa", "allenai/cosmos_qa", {"context": "c", "question": "q", "answer0": "w", "answer1": "x", "answer2": "y", "answer3": "z"}, {"label": (3, 0)}, [("c q", x) for x in "wxyz"], 3),
        ("sick", "RobZamp/sick", {"sentence_A": "a", "sentence_B": "b"}, {"label": (2, 0)}, [("a", "b")], "CONTRADICTION"),
        ("scitail", "allenai/scitail:tsv_format", {"premise": "p", "hypothesis": "h"}, {"label": ("neutral", "entails")}, [("p", "h")], "neutral"),
        ("imdb", "stanfordnlp/imdb", {"text": "t"}, {"label": (1, 0)}, [("t", None)], "pos"),
    ],
)  # fmt: skip
def test_rows_of_the_hub_become_the_tasks_own(shelf, name, hub, row, label, texts, target):
    (column, (own, other)), (path, _, config) = *label.items(), hub.partition(":")
    put(
        shelf,
        path,
        {"train": [row | {column: own}, row | {column: other}] * 2, "validation": [row | {column: own}]},
        config or "default",
    )
    prepared = prepare(Data(task=name))
    (example,) = prepared.validation
    assert list(example.texts) == texts
    assert (prepared.task.labels[example.target] if isinstance(target, str) else example.target) == target
    assert len({str(e.target) for e in prepared.train}) == 2


def test_a_data_set_of_ones_own_by_name_and_configuration(shelf):
    rows = [{"review": f"r{i}", "stars": i % 3} for i in range(12)]
    put(shelf, "me/reviews", {"train": rows}, "short")
    prepared = prepare(Data(task="mine", hub="me/reviews:short", text="review", label="stars"))
    assert prepared.task.labels == ("0", "1", "2")
    assert sizes(prepared) == [11, 1, 0]
    assert "no validation rows: 1 training rows are held out for validation" in prepared.notes


BROKEN = [*({"text": f"r{i}", "label": i % 2} for i in range(6)), {"text": None, "label": 1}]


def test_what_is_wrong_with_a_row_of_the_hub_is_said_by_row(shelf):
    put(shelf, "me/reviews", {"train": BROKEN, "validation": BROKEN[:4]})
    with pytest.raises(DataError, match="me/reviews train, row 7: column 'text' is missing or null"):
        prepare(Data(task="mine", hub="me/reviews"))
    with pytest.raises(DataError, match="no column 'txt'. Did you mean 'text'"):
        prepare(Data(task="mine", hub="me/reviews", text="txt"))


@pytest.mark.parametrize(
    "splits",
    [
        {"train": BROKEN},
        {"train": [{"text": "r", "label": HIDDEN}, *BROKEN[1:]], "validation": BROKEN[:4]},
    ],
    ids=["held out", "a hidden label before it"],
)
def test_a_row_of_the_hub_keeps_its_number(shelf, splits):
    put(shelf, "me/reviews", splits)
    with pytest.raises(DataError) as caught:
        prepare(Data(task="mine", hub="me/reviews"))
    assert "row 7: column 'text' is missing or null" in str(caught.value)


def test_a_data_set_without_training_rows(shelf):
    put(shelf, "nyu-mll/glue", {"validation": pairs(4, (0, 1))}, "rte", label=ENTAILS)
    with pytest.raises(DataError, match="rte has no training rows"):
        prepare(Data(task="rte"))


def test_a_column_that_the_hub_has_renamed_is_named(shelf):
    put(shelf, "nyu-mll/glue", {"train": pairs(4, (0, 1), "first", "second")}, "rte", label=ENTAILS)
    with pytest.raises(DataError, match="has no column 'sentence1', 'sentence2'; it has first, second, label, idx"):
        prepare(Data(task="rte"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda shelf: None, "the data set nyu-mll/glue rte could not be read"),
        (lambda shelf: put(shelf, "nyu-mll/glue", {"train": pairs(4, (0, 1))}, "cola"), "'rte' not found"),
        (lambda shelf: (shelf / "nyu-mll" / "glue").mkdir(parents=True), "`data_dir` or `train_file`"),
    ],
    ids=["no network", "no such configuration", "no files"],
)
def test_what_the_hub_says_no_to_is_one_clear_error(shelf, make, message, capsys):
    make(shelf)
    with pytest.raises(DataError) as caught:
        prepare(Data(task="rte"))
    assert message in str(caught.value)
    assert "Without a network, give `data_dir` or `train_file`" in str(caught.value)
    with pytest.raises(SystemExit) as left:
        main(["train", "--host", "no-host", "--task", "rte", "--out", "run"])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "could not be read" in told
    assert "no host 'no-host'" in told, "both at once"
    assert not (shelf / "run").exists()


# data to text


def test_e2e_has_one_text_per_row_there_and_is_scored_once_per_source(shelf):
    facts = ["name[Aromi], eatType[pub], familyFriendly[yes]", "name[Zizzi], priceRange[cheap]"]
    rows = [
        {"meaning_representation": fact, "human_reference": f"text {i} {n}"}
        for i, fact in enumerate(facts)
        for n in range(2)
    ]
    put(shelf, "tuetschek/e2e_nlg", {"train": rows, "validation": rows, "test": rows})
    prepared = prepare(Data(task="e2e", metrics=("exact_match",)))
    assert sizes(prepared) == [4, 2, 2]
    assert prepared.train[0].texts == (("name : Aromi | Type : pub | family friendly : yes", None),)
    assert prepared.test[1].texts[0][0] == "name : Zizzi | price : cheap"
    assert prepared.test[1].answers == ("text 1 0", "text 1 1")


def webnlg(category, *texts):
    sets = [{"mtriple_set": ["Aarhus | leader | Jacob", "Aarhus | in | Denmark"]}]
    lex = [{"comment": "good", "lid": "1", "text": text} for text in texts]
    return {"category": category, "modified_triple_sets": sets, "lex": lex}


def test_webnlg_and_dart_are_linearised_as_triples(shelf):
    test = [webnlg("City", "d"), webnlg("Artist", "e")]
    splits = {"train": [webnlg("Airport", "a", "b")], "dev": [webnlg("City", "c")], "test": test}
    put(shelf, "webnlg-challenge/web_nlg", splits, "webnlg_challenge_2017")
    prepared = prepare(Data(task="webnlg", metrics=("exact_match",)))
    assert sizes(prepared) == [2, 1, 2]
    assert prepared.train[0].texts[0][0] == "Aarhus : leader : Jacob | Aarhus : in : Denmark"
    assert [example.group for example in prepared.test] == ["seen", "unseen"]
    texts = [{"source": "x", "text": "It joined."}, {"source": "x", "text": ""}]
    rows = [{"tripleset": [["Mars Hill", "JOINED IN", "1973"]], "annotations": texts}] * 2
    put(shelf, "Yale-LILY/dart", {"train": rows, "validation": rows, "test": rows})
    dart = prepare(Data(task="dart", metrics=("exact_match",)))
    assert dart.test[0].texts[0][0] == "Mars Hill : joined in : 1973"
    assert dart.test[0].target == "It joined.", "an empty text beside another is left out, as the published scripts do"


@pytest.mark.parametrize(
    ("kind", "column", "labels"),
    [("classification", "label", (-1, 0, 1)), ("regression", "label", (-1.0, 0.5)), ("multilabel", "labels", (["a"], ["b"], []))],
)  # fmt: skip
def test_minus_one_and_no_labels_are_labels_of_ones_own_rows(shelf, kind, column, labels):
    put(shelf, "me/own", {"train": [{"text": f"t{i}", column: labels[i % len(labels)]} for i in range(60)]})
    prepared = prepare(Data(task="own", hub="me/own", kind=kind))
    assert sum(sizes(prepared)) == 60
    assert not any("no label" in note for note in prepared.notes)


def test_rows_without_a_label_are_left_out_and_counted(shelf):
    """−1 is how `datasets` says that a row has none of its classes."""
    put(shelf, "me/own", {"train": pairs(12, (0, 1, HIDDEN))}, label=ENTAILS)
    prepared = prepare(Data(task="own", hub="me/own", text="sentence1"))
    assert sum(sizes(prepared)) == 8
    assert "4 rows of me/own train have no label and are left out" in prepared.notes
