"""T5's own inputs; ranking agrees with generation wherever that gives a label, and with passes of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf

from inlay.data import Data, DataError, Task, builtin_tasks, prepare
from inlay.data.examples import Example, examples
from inlay.data.metrics import score
from inlay.data.rows import Table
from inlay.runs.ready import get_ready
from inlay.runs.settings import Settings
from inlay.runs.train import train_run
from inlay.runs.use import open_for_use
from inlay.training import ranking
from inlay.training.codec import Answer, Codec
from inlay.training.evaluate import ask
from tests.training.small import rows, save_t5, write_rows

QUESTIONS = {
    "mnli": ({"premise": "a", "hypothesis": "b", "label": "neutral"}, "mnli premise: a hypothesis b", "1"),
    "qqp": ({"sentence1": "a", "sentence2": "b", "label": "1"}, "qqp question1: a question2: b", "1"),
    "sst2": ({"text": "a", "label": "0"}, "sst2 sentence: a", "0"),
    "cola": ({"text": "a", "label": "0"}, "cola sentence: a", "0"),
    "mrpc": ({"sentence1": "a", "sentence2": "b", "label": "1"}, "mrpc sentence1: a sentence2: b", "1"),
    "stsb": ({"sentence1": "a", "sentence2": "b", "label": 3.75}, "stsb sentence1: a sentence2: b", "3.8"),
    "rte": ({"premise": "a", "hypothesis": "b", "label": "entailment"}, "rte sentence1: a sentence2: b", "0"),
    "qnli": ({"question": "a", "sentence": "b", "label": "entailment"}, "qnli question: a sentence: b", "0"),
    "boolq": ({"question": "a", "passage": "b", "label": True}, "superglue-boolq question: a passage: b", "1"),
    "cb": ({"premise": "a", "hypothesis": "b", "label": "neutral"}, "superglue-cb premise: a hypothesis: b", "2"),
    "copa": (
        {"context": "a", "question": "effect", "choices": ["b", "c"], "label": 1},
        "superglue-copa premise: a choice1: b choice2: c",
        "1",
    ),
    "wic": (
        {"sentence1": "a", "sentence2": "b", "word": "w", "label": False},
        "superglue-wic sentence1: a sentence2: b word: w",
        "0",
    ),
    "multirc": (
        {"passage": "<b>Sent 1: </b>p<br>q", "question": "a", "answer": "b", "label": "1"},
        "superglue-multirc question: a answer: b paragraph: Sent 1: p q",
        "1",
    ),
}


def t5(task: Task) -> Codec:
    return Codec(task, "text", None, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_t5_reads_and_says(name):
    row, question, answer = QUESTIONS[name]
    task = builtin_tasks()[name].model_copy(update={"answers": "index"})
    (example,) = examples(task, Table([row], "rows"))
    codec = t5(task)
    assert codec._question(example) == question
    assert codec._answer(example) == answer
    if task.kind != "regression":
        assert codec.decode(f" {answer} ", example).prediction == example.target
        assert codec.decode("nothing of it", example).prediction == -1


def test_what_is_no_number_counts_minus_one():
    example = Example((("a", None),), 1.0)
    codec = t5(builtin_tasks()["stsb"])
    assert [codec.decode(said, example).prediction for said in ("2.4", "two", "nan")] == [2.4, -1.0, -1.0]


def test_labels_that_the_host_cannot_write_are_noted(tmp_path):
    """They would be wrong in every row, whatever was learned, and nothing would say why."""
    turned = {"positive": "positive", "negative": "<5"}
    rows_of = [row | {"label": turned[row["label"]]} for row in rows(40)]
    files = {"train_file": tmp_path / "t.jsonl", "host": str(save_t5(tmp_path / "t5")), "out": tmp_path / "run"}
    write_rows(files["train_file"], rows_of)
    note = "the host cannot write '<5'"
    assert note in get_ready(Settings(**files)).notes[-1]
    for way in ({"answers": "index", "labels": ("positive", "<5")}, {"answering": "ranking"}):
        assert not any(note in told for told in get_ready(Settings(**files, **way)).notes)


def test_answers_are_words_unless_the_index_is_asked_for():
    row, *_ = QUESTIONS["mnli"]
    (example,) = examples(builtin_tasks()["mnli"], Table([row], "rows"))
    assert t5(builtin_tasks()["mnli"])._answer(example) == "neutral"


RECORD = {
    "passage": "Al met Bo in Rome.", "query": "@placeholder ran.", "entities": ["Al", "Bo", "Al", "Rome"], "answers": ["Bo", "Al", "Bo"],
}  # fmt: skip


def test_record_has_each_entity_once_and_several_right_answers(tmp_path):
    task = builtin_tasks()["record"]
    (example,) = examples(task, Table([RECORD], "rows"))
    assert example.choices == ("Al", "Bo", "Rome")
    assert example.answers == ("Bo", "Al")
    assert len(example.texts) == 3
    codec = t5(task)
    question = "superglue-record passage: Al met Bo in Rome. query: @placeholder ran. entities: Al, Bo, Rome"
    assert codec._question(example) == question
    assert codec._answer(example) == "Bo"
    said = [codec.decode("Al", example), codec.decode("Bo Derek", example), Answer(2), Answer(-1)]
    measured = [codec.measure(type("Split", (), {"examples": [example]})(), [one]) for one in said]  # type: ignore[arg-type]
    assert [m["exact_match"] for m in measured] == [1, 0, 0, 0]
    assert [m["token_f1"] for m in measured] == pytest.approx([1, 2 / 3, 0, 0])
    folder = tmp_path / "record"
    for split in ("train", "validation"):
        write_rows(folder / f"{split}.jsonl", [RECORD])
    prepared = prepare(Data(task="record", data_dir=tmp_path))
    assert [e.target for e in prepared.train] == [1, 0], "one training row per right answer"
    assert len(prepared.validation) == 1


def test_hidden_answers_are_refused():
    with pytest.raises(DataError, match="hidden"):
        examples(builtin_tasks()["record"], Table([RECORD | {"answers": []}], "rows"))


def test_several_right_answers_also_count_for_accuracy():
    task = Task(kind="choice", metrics=("accuracy",))
    assert score(task, [("a", "b"), ("c",)], ["b", "a"]) == {"accuracy": 0.5}


def test_a_prompt_with_an_unknown_column_is_refused():
    with pytest.raises(DataError, match="no column 'txet'. Did you mean 'text'"):
        examples(Task(prompt="x {txet}", labels=("a", "b")), Table([{"text": "t", "label": "a"}], "rows"))


# ranking


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A T5 that has learned to say the labels, not too well."""
    place = tmp_path_factory.mktemp("t5")
    files = {
        "train_file": write_rows(place / "train.jsonl", rows(96)),
        "validation_file": write_rows(place / "v.jsonl", rows(40, seed=1)),
    }
    common = {
        "host": str(save_t5(place / "t5")),
        "mode": "full",
        "lr": 0.01,
        "batch_size": 16,
        "epochs": 3,
        "threads": 1,
    }
    return train_run(Settings(**common, **files, answering="ranking", out=place / "run"))


def test_ranking_agrees_with_generation_wherever_that_gave_a_label(run):
    opened = open_for_use(run.folder)
    assert opened.codec.answering == "ranking", "a run is asked as it was trained"
    split = opened.codec.encode(opened.rows("validation", None)[1])
    by_rank = ask(opened.host, opened.codec, split)
    written = ask(opened.host, replace(opened.codec, answering="generation"), split)
    labels = [(a.prediction, b.prediction) for a, b in zip(by_rank, written, strict=True) if b.prediction != -1]
    assert len(labels) > 10, "it has learned to say labels"
    assert all(a == b for a, b in labels)
    assert all(a.probabilities is not None and sum(a.probabilities) == pytest.approx(1) for a in by_rank)


def random_t5(kind: str = "T5") -> hf.PreTrainedModel:
    torch.manual_seed(1)
    config = getattr(hf, f"{kind}Config")(
        vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return getattr(hf, f"{kind}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("kind", ["T5", "MT5"])
def test_all_candidates_in_one_pass_are_scored_as_each_alone(kind):
    host = random_t5(kind)
    batch = {"input_ids": torch.randint(3, 30, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    tokens = [[[4, 5, 1], [6, 1]], [[7, 1], [8, 9, 10, 1], [8, 9, 1], [8, 5, 1]], [[4, 5, 1], [6, 1]]]
    with torch.no_grad():
        together, said = ranking._together(host, batch, tokens)
        alone, said_alone = ranking._one_by_one(host, batch, tokens)
        labels = torch.tensor([8, 9, 10, 1]).unsqueeze(0)
        one = {name: tensor[1:2] for name, tensor in batch.items()}
        loss = host(**one, labels=labels).loss
    assert said == said_alone
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert together[1][1] == pytest.approx(-4 * float(loss), abs=1e-4)
