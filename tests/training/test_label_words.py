"""Classification by label words: scores are the host's own log-probabilities, on masked models, decoders and T5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import processors

import inlay
from inlay.data import Data, prepare
from inlay.data.builtin import builtin_tasks
from inlay.data.errors import DataError
from inlay.data.examples import examples
from inlay.data.rows import Table
from inlay.data.task import Task
from inlay.recipes import recipe_settings
from inlay.runs.settings import Settings
from inlay.runs.train import train_run
from inlay.runs.use import open_for_use
from inlay.training.evaluate import ask, scores
from inlay.training.generation import asked
from inlay.training.label_words import likelihoods
from inlay.training.objectives import Portion, consistent_loss, plain_loss
from inlay.training.workbench import Workbench
from tests.hosts import shake, shaken
from tests.training.small import OTHER, rows, save_bert, save_decoder, save_t5, write_rows

LABELS = ("negative", "positive")
ONE = {"labels": LABELS, "answer_with": "words", "label_words": ("bad", "good")}
CLOZE, END = "{text} w1 {target} w2", "{text} w1 {target}"
TASK = Task(name="own", **ONE, cloze=CLOZE, template=END)
SEVERAL = Task(name="own", **ONE | {"label_words": ("bad w3", "good")}, cloze=CLOZE, template=END)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    save_bert(folder / "bert")
    hf.BertForMaskedLM.from_pretrained(folder / "bert").save_pretrained(folder / "bert")
    save_t5(folder / "t5")
    save_decoder(folder / "llama")
    save_decoder(folder / "gpt2", "gpt2")
    save_decoder(folder / "opt", "opt")
    return folder


def some(task: Task = TASK, count: int = 8):
    return examples(task, Table(rows(count), "rows"))


def said_scores(bench: Workbench, task: Task) -> torch.Tensor:
    codec = bench.codec(32)
    split = codec.encode(some(task))
    features = asked(split)
    batch = features.collate(list(range(8)))
    batch.pop("labels", None)
    with torch.no_grad():
        if codec.form == "mask":
            return scores(bench.host, batch, codec)
        return likelihoods(bench.host, batch, codec.words, codec.decoder)


def by_hand(bench: Workbench, text: str, word: str) -> list[float]:
    """The log-probability of each token of a word, from the host alone, one row at a time."""
    tokenizer, own = bench.tokenizer, bench.tokenizer(word, add_special_tokens=False).input_ids
    with torch.no_grad():
        if bench.form == "mask":
            ids = torch.tensor([tokenizer(f"{text} w1 {'[MASK] ' * len(own)}w2").input_ids])
            at = (ids[0] == tokenizer.mask_token_id).nonzero().flatten()
            likely = bench.host(ids).logits[0].log_softmax(-1)
            return [float(likely[place, token]) for place, token in zip(at, own, strict=True)]
        before = tokenizer(f"{text} w1").input_ids
        if bench.host.config.is_encoder_decoder:
            given = {"input_ids": torch.tensor([before]), "decoder_input_ids": torch.tensor([[0, *own[:-1]]])}
            likely = bench.host(**given).logits[0].log_softmax(-1)
            return [float(likely[place, token]) for place, token in enumerate(own)]
        likely = bench.host(torch.tensor([before + own])).logits[0].log_softmax(-1)
        return [float(likely[len(before) - 1 + place, token]) for place, token in enumerate(own)]


@pytest.mark.parametrize("together", ["sum", "mean"])
@pytest.mark.parametrize("host", ["bert", "t5", "llama", "gpt2", "opt"])
def test_scores_are_the_hosts_own_log_probabilities(hosts, host, together):
    task = SEVERAL.model_copy(update={"label_tokens": together})
    bench = Workbench.open(str(hosts / host), task)
    bench.host.eval()
    found = said_scores(bench, task)
    for row, example in enumerate(some(task)):
        for label, word in enumerate(task.label_words):
            each = by_hand(bench, example.texts[0][0], word)
            wanted = sum(each) / (len(each) if together == "mean" else 1)
            assert float(found[row, label]) == pytest.approx(wanted, abs=1e-5), (row, word)
    said = ask(bench.host, bench.codec(32), bench.codec(32).encode(some(task)))
    assert [answer.prediction for answer in said] == found.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor([a.probabilities for a in said]).float(), found.softmax(-1), **CLOSE)


@pytest.mark.parametrize("host", ["t5", "llama"])
def test_words_that_differ_in_their_last_token_only_take_one_forward(hosts, host):
    bench = Workbench.open(str(hosts / host), TASK)
    calls = []
    bench.host.register_forward_hook(lambda *_: calls.append(1))
    said_scores(bench, TASK)
    assert len(bench.tokenizer(TASK.label_words[0], add_special_tokens=False).input_ids) == 1
    assert len(calls) == 1


def test_the_loss_of_a_masked_model_is_that_of_its_labels_words(hosts):
    bench = Workbench.open(str(hosts / "bert"), TASK)
    bench.host.eval()
    codec = bench.codec(32)
    batch = codec.encode(some()).features.collate(list(range(8)))
    ours = plain_loss(bench.host, bench.host, codec, Portion(dict(batch), 1 / 8, 1.0))
    wanted = torch.tensor([int(example.target) for example in some()])
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(said_scores(bench, TASK), wanted), **CLOSE)


def test_a_mixture_compares_the_words_of_two_draws(hosts):
    bench = Workbench.open(str(hosts / "bert"), TASK)
    bench.set_up("x", "inlay", method=inlay.Mixture(method=inlay.Houlsby(size=4), modules=3))
    shake(bench.host, "x")
    codec = bench.codec(32)
    batch = codec.encode(some()).features.collate(list(range(8)))
    bench.host.train()
    losses = []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        portion = Portion(dict(batch), 1 / 8, 1.0)
        losses.append(consistent_loss(bench.host, bench.host, codec, portion, weight=weight).item())
    assert losses[1] > losses[0]


def test_long_texts_lose_their_outer_ends_and_keep_the_masks(hosts):
    bench = Workbench.open(str(hosts / "bert"), TASK)
    long = examples(TASK, Table([{"text": " ".join(OTHER), "label": "positive"}], "rows"))
    batch = bench.codec(12).encode(long).features.collate([0])
    tokens = bench.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert tokens == ["[CLS]", *OTHER[-7:], "w1", "[MASK]", "w2", "[SEP]"]
    assert tokens[int(batch["masks_0"][0, 0])] == "[MASK]"


# rows


def test_rows_are_drawn_of_each_class_by_the_seed(hosts):
    write_rows(hosts / "train.jsonl", rows(60))
    write_rows(hosts / "test.jsonl", rows(20, seed=1))
    files = {"train_file": hosts / "train.jsonl", "validation_file": hosts / "test.jsonl"}
    one, again, other = (prepare(Data(**files, per_class=3, rows_seed=seed, validation=False)) for seed in (0, 0, 1))
    assert one.train == again.train != other.train
    assert [example.target for example in one.train].count(0) == 3 == len(one.train) / 2
    assert (len(one.validation), len(one.test)) == (0, 20)
    assert "the last state is the result" in " ".join(one.notes)
    with pytest.raises(
        inlay.InlayError, match=r"per_class is 40, but .* fewer rows of negative \(30\), positive \(30\)"
    ):
        prepare(Data(**files, per_class=40))


def test_demonstrations_stand_before_every_text_and_do_not_train(hosts):
    write_rows(hosts / "train.jsonl", rows(60))
    write_rows(hosts / "test.jsonl", rows(20, seed=1))
    words = {"answer_with": "words", "label_words": ("bad", "good"), "template": END}
    files = {"train_file": hosts / "train.jsonl", "validation_file": hosts / "test.jsonl"}
    found = prepare(Data(**files, **words, per_class=4, demonstrations=1, validation=False))
    assert len(found.train) == 6
    shown = found.task.shown["template"]
    assert shown.count("\n") == 2
    assert (" w1 bad\n" in shown, " w1 good\n" in shown) == (True, True)
    assert all(example.before.startswith(shown) for example in (*found.train, *found.test))
    assert all(example.cloze[0].startswith(found.task.shown["cloze"]) for example in found.train)


@pytest.mark.parametrize("host", ["bert", "llama", "t5"])
def test_few_rows_are_learned_without_validation_and_used_again(hosts, host, tmp_path):
    write_rows(hosts / "train.jsonl", rows(60))
    write_rows(hosts / "test.jsonl", rows(20, seed=1))
    run = train_run(
        Settings(
            host=str(hosts / host), out=tmp_path / "run", train_file=hosts / "train.jsonl", test_file=hosts / "test.jsonl",
            answer_with="words", label_words=("bad", "good"), template=END, per_class=8, validation=False, max_steps=60,
            batch_size=8, lr=0.01, mode="full", threads=1,
        )
    )  # fmt: skip
    record = run.record()
    assert record["steps"] == record["best_step"] == 60
    assert record["judged"] == "test"
    opened = open_for_use(tmp_path / "run")
    learned = opened.codec.encode(opened.rows("train")[1])
    assert opened.codec.measure(learned, opened.answers(learned))["accuracy"] >= 0.75
    _, judged = opened.rows(None)
    encoded = opened.codec.encode(judged)
    assert opened.codec.measure(encoded, opened.answers(encoded)) == record["scores"]
    (alone,) = opened.predict(Table([{"text": "good w1"}], "here"))
    assert set(alone["probabilities"]) == set(LABELS)


def test_the_recipe_is_the_papers(tmp_path):
    found = recipe_settings("adamix-fewshot", {"task": "rte"})
    assert (found["rows"], found["validation"], found["answer_with"], found["method"]) == (
        30,
        False,
        "words",
        "mixture",
    )
    settings = Settings(
        host="roberta-large", out=tmp_path, task="rte", recipe="adamix-fewshot", data_dir=tmp_path, seed=3, rows_seed=3
    )
    assert (settings.rows, settings.options["modules"]) == (30, 4)


def test_every_built_in_template_has_a_word_for_each_label():
    worded = {name: task for name, task in builtin_tasks().items() if task.label_words}
    assert {"sst2", "mnli", "rte", "qnli", "mrpc", "qqp", "cola", "cb", "boolq"} <= set(worded)
    for name, task in worded.items():
        assert len(task.label_words) == len(task.labels), name
        assert task.template.endswith("{target}"), name
        assert Task(**task.model_dump() | {"answer_with": "words"}).asked == [task.template, task.cloze]


# what is wrong


def test_a_word_of_several_tokens_is_refused_where_one_was_asked_for(hosts):
    with pytest.raises(
        inlay.ConfigError, match=r"'bad w3' is 2 tokens of this host \(bad w3\), but label_tokens asks for one"
    ):
        Workbench.open(str(hosts / "bert"), SEVERAL.model_copy(update={"label_tokens": "one"})).codec(32)
    with pytest.raises(inlay.ConfigError, match="'excellent' is not in the host's vocabulary"):
        Workbench.open(str(hosts / "bert"), TASK.model_copy(update={"label_words": ("bad", "excellent")})).codec(32)


def test_a_host_without_a_mask_token_is_refused(hosts):
    bench = Workbench.open(str(hosts / "bert"), TASK)
    bench.tokenizer.mask_token = None
    with pytest.raises(inlay.ConfigError, match="this host has no mask token to fill in"):
        bench.codec(32)


def test_what_a_task_lacks_is_said_at_once(hosts):
    bare = Task(name="own", labels=LABELS, answer_with="words", label_words=("a", "b"))
    with pytest.raises(inlay.InlayError, match="no template for bert"):
        Workbench.open(str(hosts / "bert"), bare)
    with pytest.raises(inlay.InlayError, match="goes on after {target}, but llama answers at the end"):
        Workbench.open(str(hosts / "llama"), replace_template(bare, "{text} {target} w1"))
    with pytest.raises(inlay.ConfigError, match="1 words for 2 labels"):
        Task(labels=LABELS, answer_with="words", label_words=("a",))
    with pytest.raises(inlay.ConfigError, match="label words are for classification, not for regression"):
        Task(kind="regression", answer_with="words", label_words=("a",))


def replace_template(task: Task, shape: str) -> Task:
    return task.model_copy(update={"template": shape, "cloze": shape})


def test_a_mask_in_the_text_itself_is_refused(hosts):
    bench = Workbench.open(str(hosts / "bert"), TASK)
    with pytest.raises(inlay.ConfigError, match=r"row 1 has the host's mask token \[MASK\] in its own text"):
        bench.codec(32).encode(examples(TASK, Table([{"text": "w1 [MASK]", "label": "positive"}], "rows")))


def test_a_text_hosts_own_words_are_kept_for_other_uses(hosts):
    """Without `answer_with` the same T5 answers as before."""
    plain = Workbench.open(str(hosts / "t5"), Task(name="own", labels=LABELS))
    assert plain.codec(32).words is None
    assert json.loads(json.dumps(plain.codec(32).candidates(some()[0]))) == list(LABELS)
    assert replace(plain.codec(32), words=None) == plain.codec(32)


@pytest.mark.parametrize(
    ("host", "said"),
    [("bert", {"answer_with": "words", "label_words": ("bad", "good")}), ("t5", {"prompt": "w3 {text} w4"})],
)
def test_a_built_in_task_is_asked_as_it_was_trained(host, said, hosts, tmp_path):
    """With its own prompt or cloze, from its own rows, from a folder with other names, and from an inlay alone."""
    for split, count in (("train", 24), ("validation", 12)):
        some = [row | {"label": str(int(row["label"] == "positive"))} for row in rows(count, len(split))]
        write_rows(tmp_path / "rows" / "sst2" / f"{split}.jsonl", some)
        write_rows(
            tmp_path / "other" / "sst2" / f"{split}.jsonl", [{"said": r["text"], "label": r["label"]} for r in some]
        )
    settings = Settings(
        host=str(hosts / host), task="sst2", data_dir=tmp_path / "rows", out=tmp_path / "run",
        method="bitfit", epochs=1, batch_size=8, lr=0.02, threads=1, max_length=32, **said,
    )  # fmt: skip
    train_run(settings)
    opened = open_for_use(tmp_path / "run")
    _, asked_now = opened.rows("validation", None)
    _, of_the_file = opened.rows(None, tmp_path / "rows" / "sst2" / "validation.jsonl")
    assert asked_now == of_the_file
    assert all(example.cloze if host == "bert" else example.prompt for example in asked_now)
    renamed = opened.reading(text="said")
    assert renamed.rows("validation", None, tmp_path / "other")[1] == asked_now
    alone = open_for_use(tmp_path / "run" / "inlay", str(hosts / host))
    assert alone.rows("validation", None, tmp_path / "rows")[1] == asked_now


def save_bart(folder: Path) -> Path:
    """A BART whose targets begin with <s>, and which begins with </s>."""
    save_t5(folder, says=("<s>",))
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<pad>")}
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    )
    tokenizer.save_pretrained(folder)
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = hf.BartConfig(
        vocab_size=len(tokenizer), encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, **sizes,
        bos_token_id=ids["<s>"], eos_token_id=ids["</s>"], pad_token_id=ids["<pad>"], decoder_start_token_id=ids["</s>"],
        forced_eos_token_id=None,
    )  # fmt: skip
    shaken(hf.BartForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def test_words_are_asked_for_where_targets_have_them(tmp_path):
    """BART's targets begin with <s>: the word comes after it, in training and when it is asked."""
    bench = Workbench.open(str(save_bart(tmp_path / "bart")), SEVERAL)
    codec, found = bench.codec(32), some(SEVERAL)
    encoded = codec.encode(found, cache=False)
    batch = encoded.features.collate(list(range(len(found))))
    labels = batch["labels"]
    with torch.no_grad():
        likely = bench.host.eval()(**batch).logits.log_softmax(-1)
        asked_now = likelihoods(
            bench.host, {n: t for n, t in batch.items() if n != "labels"}, codec.words, decoder=False
        )
    for row, example in enumerate(found):
        word = [int(token) for token in labels[row] if int(token) not in (*bench.tokenizer.all_special_ids, -100)]
        of_the_word = sum(float(likely[row, 1 + i, token]) for i, token in enumerate(word))  # the loss's own positions
        assert float(asked_now[row, int(example.target)]) == pytest.approx(of_the_word, abs=1e-4)


def test_members_that_answer_with_words_fuse(hosts, tmp_path):
    """And what the fusion listens to is measured, with one sequence for each length of words."""
    train, validation = write_rows(tmp_path / "t.jsonl", rows(24)), write_rows(tmp_path / "v.jsonl", rows(8, 1))
    common = {
        "host": str(hosts / "bert"), "train_file": train, "validation_file": validation, "answer_with": "words", "epochs": 1,
        "label_words": ("bad w3", "good"), "template": CLOZE, "batch_size": 8, "threads": 1,
    }  # fmt: skip
    for name in ("a", "b"):
        train_run(Settings(out=tmp_path / name, name=name, method="pfeiffer", **common))
    fused = train_run(Settings(out=tmp_path / "f", mode="fusion", members=(tmp_path / "a", tmp_path / "b"), **common))
    record = fused.record()
    assert record["status"] == "finished"
    assert all(sum(shares.values()) == pytest.approx(1, abs=1e-3) for shares in record["attention"].values())


def test_rows_with_a_label_that_a_run_does_not_know_are_refused_with_their_line(hosts, tmp_path):
    for name, label in (("own", "positive"), ("other", "grand")):
        some = [row | {"label": label if row["label"] == "positive" else "negative"} for row in rows(12)]
        for split in ("train", "validation"):
            write_rows(tmp_path / name / "mood" / f"{split}.jsonl", some)
    train_run(
        Settings(
            host=str(hosts / "bert"), task="mood", data_dir=tmp_path / "own", out=tmp_path / "run", method="bitfit",
            epochs=1, batch_size=8, threads=1,
        )
    )  # fmt: skip
    with pytest.raises(DataError, match=r"line 1: .*grand"):
        open_for_use(tmp_path / "run").rows("validation", None, tmp_path / "other")
