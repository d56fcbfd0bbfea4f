"""Every kind of task on one host: loss, answers and metrics are those of transformers' own class for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import inlay
from inlay.data.examples import Example, examples
from inlay.data.metrics import score
from inlay.data.rows import Table
from inlay.data.task import Task
from inlay.host.heads import CHOICE, Head
from inlay.training.codec import Answer, Codec
from inlay.training.evaluate import ask, scores
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import Portion, consistent_loss, plain_loss
from inlay.training.recipe import Recipe, filled
from inlay.training.tokens import IGNORED, window_features, word_features
from inlay.training.workbench import Workbench
from tests.hosts import classifier
from tests.training.small import KINDS, rows_of, save_decoder, save_t5

TAGS = ("B-NEG", "B-POS", "I-NEG", "I-POS", "O")
TASKS = {
    "classification": Task(name="sst", labels=("negative", "positive")),
    "regression": Task(name="sts", kind="regression"),
    "choice": Task(name="csqa", kind="choice"),
    "multilabel": Task(name="toxic", kind="multilabel", labels=("neg", "pos")),
    "tags": Task(name="ner", kind="tags", labels=TAGS),
    "spans": Task(name="squad", kind="spans"),
}
REFERENCE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "choice": (hf.AutoModelForMultipleChoice, {}, "classifier"),
    "multilabel": (hf.AutoModelForSequenceClassification, {"num_labels": 2, "problem_type": "multi_label_classification"}, "classifier"),
    "tags": (hf.AutoModelForTokenClassification, {"num_labels": len(TAGS)}, "classifier"),
    "spans": (hf.AutoModelForQuestionAnswering, {}, "qa_outputs"),
}  # fmt: skip
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def some(kind: str, count: int = 12, seed: int = 0) -> list[Example]:
    return examples(TASKS[kind], Table(rows_of(kind, count, seed), "rows"))


def both(small: Path, kind: str) -> tuple[Workbench, hf.PreTrainedModel]:
    """Our host with a head, and transformers' own class with the same weights."""
    bench = Workbench.open(str(small / "bert"), TASKS[kind])
    head = Head(labels=CHOICE) if kind == "choice" else bench.head()
    if kind == "multilabel":
        head = Head(labels=TASKS[kind].labels, problem="multi_label_classification")  # a copy of the host's own head
    bench.set_up("x", "head", head=head)
    auto, config, name = REFERENCE[kind]
    other = auto.from_pretrained(small / "bert", **config).eval()
    theirs, ours = other.get_submodule(name), bench.host.inlays["x"].parts["head:classifier"]
    torch.nn.init.normal_(theirs.weight, std=0.5)
    torch.nn.init.normal_(theirs.bias, std=0.5)
    (ours.layers[-1] if hasattr(ours, "layers") else ours).load_state_dict(theirs.state_dict())
    bench.host.eval()
    return bench, other


def theirs_of(kind: str, other: hf.PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Loss and logits of transformers' own class, its inputs as it wants them."""
    batch = dict(batch)
    labels, there = batch.pop("labels"), batch.pop("has_choice", None)
    if kind == "choice":
        assert there is not None
        assert there.all(), "their class has no absent choices"
        batch = {name: tensor.unflatten(0, there.shape) for name, tensor in batch.items()}
    if kind == "spans":
        said = other(**batch, start_positions=labels[:, 0], end_positions=labels[:, 1])
        return said.loss, torch.stack([said.start_logits, said.end_logits], -1)
    said = other(**batch, labels=labels)
    return said.loss, said.logits


@pytest.mark.parametrize("kind", REFERENCE)
def test_loss_logits_answers_and_metrics_are_those_of_transformers(small, kind):
    bench, other = both(small, kind)
    codec, rows = bench.codec(16, stride=4), some(kind)
    if kind == "choice":
        rows = [row for row in rows if len(row.texts) == 3]
    split = codec.encode(rows)
    index = list(range(len(rows)))
    batch = split.features.collate(index)
    with torch.no_grad():
        loss, logits = theirs_of(kind, other, batch)
        ours = plain_loss(bench.host, bench.host, codec, Portion(batch, 1 / split.features.weights(index), 1.0))
        mine = scores(bench.host, {name: tensor for name, tensor in batch.items() if name != "labels"})
    torch.testing.assert_close(mine, logits, **CLOSE)
    torch.testing.assert_close(ours, loss, **CLOSE)
    said = ask(bench.host, codec, split)
    wanted = codec.answers(logits, split, index)
    assert [answer.prediction for answer in said] == [answer.prediction for answer in wanted]
    assert codec.measure(split, said) == codec.measure(split, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_learned(small, kind):
    bench = Workbench.open(str(small / "bert"), TASKS[kind])
    bench.set_up("x", "inlay", method=inlay.Pfeiffer(reduction=2))
    codec = bench.codec(32)
    train, validation = codec.encode(some(kind, 96)), codec.encode(some(kind, 30, seed=1))
    before = codec.measure(validation, ask(bench.host, codec, validation))
    recipe = Recipe(lr=0.03, epochs=8, batch_size=16, patience=0)
    outcome = TrainingLoop(bench.host, codec, train, validation, recipe).run()
    main = TASKS[kind].main
    assert outcome.scores[main] > before[main] + 0.1


def one_host(small: Path) -> Workbench:
    """One host with an inlay of every kind."""
    bench = Workbench.open(str(small / "bert"), TASKS["classification"])
    for kind, task in TASKS.items():
        inlay.add(bench.host, kind, inlay.Pfeiffer(size=4, init_std=0.3), head=bench.for_task(task).head())
    bench.host.eval()
    return bench


@pytest.mark.parametrize("kinds", [("classification", "regression", "choice"), tuple(TASKS)], ids=["texts", "all"])
def test_rows_mix_the_kinds_in_one_forward(small, kinds):
    bench = one_host(small)
    texts, parts = [], []
    for kind in kinds:
        row = some(kind, 3)[2]
        texts += row.texts
        parts += [kind] * len(row.texts)
    order = torch.randperm(len(texts)).tolist()
    texts, parts = [texts[i] for i in order], [parts[i] for i in order]
    made = bench.tokenizer([a for a, _ in texts], [b or "" for _, b in texts], padding=True, return_tensors="pt")
    inlay.activate(bench.host, inlay.Rows(*parts))
    with torch.no_grad():
        mixed = bench.host(**made).logits
    for kind in kinds:
        rows = [i for i, part in enumerate(parts) if part == kind]
        inlay.activate(bench.host, kind)
        with torch.no_grad():
            alone = bench.host(**{name: tensor[rows] for name, tensor in made.items()}).logits
        width = alone.shape[-1]
        here = mixed[rows]
        if alone.dim() < here.dim():  # beside rows with logits per token, a text's logits stand at each of them
            assert torch.equal(here[:, 0], here[:, -1])
            here = here[:, 0]
        torch.testing.assert_close(here[..., :width], alone, **CLOSE)
        assert (here[..., width:] == torch.finfo(here.dtype).min).all()


def test_choice_heads_of_earlier_versions_load(small, tmp_path):
    """They were made on AutoModelForMultipleChoice, and left the number of outputs to it."""
    before = hf.AutoModelForMultipleChoice.from_pretrained(small / "bert").eval()
    inlay.add(before, "old", inlay.Pfeiffer(size=4), head=Head(pooling="mean"))
    inlay.save(before, "old", tmp_path / "old")
    inlay.activate(before, "old")
    for task in (TASKS["choice"], TASKS["tags"]):
        bench = Workbench.open(str(small / "bert"), task)
        inlay.load(bench.host, tmp_path / "old")
        inlay.activate(bench.host.eval(), "old")
        codec = bench.for_task(TASKS["choice"]).codec(32)
        batch = codec.encode(some("choice", 3)[1:2]).features.collate([0])
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "has_choice")}
        with torch.no_grad():
            wanted = before(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()}).logits
            torch.testing.assert_close(
                scores(bench.host, inputs | {"has_choice": batch["has_choice"]}), wanted, **CLOSE
            )


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "distilbert", "bart"])
def test_hosts_that_pick_a_token_give_the_logits_of_all(family):
    host = classifier(family)
    if family == "bart":
        ids = torch.tensor([[5, 6, 7, 1], [8, 9, 10, 1]])
    else:
        ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    inlay.add(host, "ner", inlay.Pfeiffer(size=2), head=Head(labels=3, pooling="tokens"))
    inlay.add(host, "sst", inlay.Pfeiffer(size=2), head=Head(labels=2, pooling=None if family == "bart" else "mean"))
    inlay.activate(host, "ner")
    with torch.no_grad():
        said = host(**batch, labels=torch.tensor([[0, 1, 2, 0], [1, 1, IGNORED, IGNORED]]))
        hidden = host.base_model(**batch)[0]
        head = next(part for key, part in host.inlays["ner"].parts.items() if key.startswith("head"))
        torch.testing.assert_close(said.logits, head.layers(hidden), **CLOSE)
        wanted = torch.nn.functional.cross_entropy(
            said.logits.flatten(0, 1), torch.tensor([0, 1, 2, 0, 1, 1, -100, -100])
        )
        torch.testing.assert_close(said.loss, wanted, **CLOSE)
        torch.testing.assert_close(host(**batch, return_dict=False)[0], said.logits, **CLOSE)
        if family == "bart":
            return
        inlay.activate(host, "sst")
        alone = host(**batch).logits
        inlay.activate(host, inlay.Rows("sst", "ner"))
        mixed = host(**batch).logits
    torch.testing.assert_close(mixed[1], said.logits[1], **CLOSE)
    torch.testing.assert_close(mixed[0, 0, :2], alone[0], **CLOSE)


def pieces() -> hf.PreTrainedTokenizerFast:
    """A tokenizer that cuts words in pieces, and punctuation off."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##ed", "the", "##m", "she", ".", "a", "b", "c", "d"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_first_piece_of_a_word_carries_its_label(side):
    rows = [("She", "playing", "them."), ("played", "a.b", "unknown", "the"), ("them",)]
    task = Task(kind="tags", labels=("O", "B-X", "I-X"))
    given = [
        Example(((" ".join(words), None),), tuple(i % 3 for i in range(len(words))), words=words) for words in rows
    ]
    tokenizer = pieces()
    tokenizer.padding_side = side
    batch = word_features(given, tokenizer, 32, labelled=True).collate([0, 1, 2])
    expected = tokenizer([list(words) for words in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    for i, example in enumerate(given):
        seen, wanted = set(), []
        for word in expected.word_ids(i):
            wanted.append(IGNORED if word is None or word in seen else example.target[word])
            seen.add(word)
        assert batch["labels"][i].tolist() == wanted
    split = Codec(task, "labels", tokenizer, 5).encode(given)  # the second and the third row are cut
    logits = torch.nn.functional.one_hot(split.features.collate([0, 1, 2])["labels"].clamp(min=0), 3).double()
    said = Codec(task, "labels", tokenizer, 5).answers(logits, split, [0, 1, 2])
    assert [len(answer.prediction) for answer in said] == [3, 4, 1], "one label for every word, cut off or not"
    assert said[2].prediction == given[2].target
    outer = Task(kind="tags", labels=("B-X", "I-X", "O"))
    cut = Codec(outer, "labels", tokenizer, 5).answers(logits, split, [0, 1, 2])[1]
    assert cut.prediction[-1] == 2, "what was cut off is O"
    assert cut.probabilities is not None
    assert all(0 <= share <= 1 for share in cut.probabilities)
    assert cut.probabilities[-1] == 0, "and nobody is sure of it"


def test_a_long_context_is_read_in_windows_and_the_best_span_wins():
    context = "a b c d she playing a b c d them . a b c"
    row = Example((("she", context),), (("playing a", context.index("playing a")),))
    made = window_features([row], pieces(), 14, 3, labelled=True)
    assert made.kind == "windows"
    windows = made.sequences([0]).tolist()
    assert len(windows) == 2
    labels = made.collate([0])["labels"]
    inside = [w for w in windows if labels[w].tolist() != [0, 0]]
    assert inside, "some window holds the answer"
    for w in inside:
        places = made.stands_for(w)
        first, last = labels[w].tolist()
        assert context[places["begin"][first] : places["end"][last]] == "playing a"
    covered = {int(i) for w in windows for i in made.stands_for(w)["begin"] if i >= 0}
    assert {context.index(word) for word in ("a b c d she", "playing", "them", ".")} <= covered
    codec = Codec(TASKS["spans"], "labels", pieces(), 14, 3)
    split = codec.encode([row])
    length = int(made.lengths.max())
    logits = torch.randn(len(windows), length, 2)
    assert codec.answers(logits, split, [0])[0].prediction == slow_best(logits, split, windows, context)
    answerable = Codec(TASKS["spans"].model_copy(update={"unanswerable": True}), "labels", pieces(), 14, 3)
    logits[:, 0] = 9.0
    assert answerable.answers(logits, split, [0])[0].prediction == ""
    assert codec.answers(logits, split, [0])[0].prediction != ""
    logits[inside[0], labels[inside[0], 0], 0] = logits[inside[0], labels[inside[0], 1], 1] = 20.0
    assert answerable.answers(logits, split, [0])[0].prediction == "playing a"
    assert codec.measure(split, codec.answers(logits, split, [0])) == {"token_f1": 1.0, "exact_match": 1.0}


def slow_best(logits, split, windows, context) -> str:
    """All spans of all windows, one by one."""
    found = []
    for w in windows:
        places = split.features.stands_for(w)
        real = [i for i, begin in enumerate(places["begin"].tolist()) if begin >= 0]
        for a in real:
            for b in real:
                if a <= b < a + 30:
                    text = context[int(places["begin"][a]) : int(places["end"][b])]
                    found.append((float(logits[w, a, 0] + logits[w, b, 1]), text))
    return max(found)[1]


def test_consistency_leaves_out_choices_that_a_row_does_not_have(small):
    bench = Workbench.open(str(small / "bert"), TASKS["choice"])
    bench.set_up("x", "inlay", method=inlay.Mixture(inlay.Pfeiffer(size=4, init_std=0.5), modules=2))
    for dropout in [m for m in bench.host.modules() if isinstance(m, torch.nn.Dropout)]:
        dropout.p = 0.0
    codec = bench.codec(32)
    split = codec.encode(some("choice", 6))  # rows of 2, 3 and 4 choices

    def loss(rows: list[int]) -> torch.Tensor:
        torch.manual_seed(3)  # the same draws
        return consistent_loss(bench.host, bench.host, codec, Portion(split.features.collate(rows), 1 / 6, 1.0))

    together = loss([0, 1, 2])
    assert torch.isfinite(together)
    torch.testing.assert_close(together, loss([0]) + loss([1]) + loss([2]), **CLOSE)
    together.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_consistency(small, kind):
    bench = Workbench.open(str(small / "bert"), TASKS[kind])
    bench.set_up("x", "inlay", method=inlay.Mixture(inlay.Pfeiffer(size=4, init_std=0.5), modules=2))
    codec = bench.codec(32)
    split = codec.encode(some(kind, 4))
    rows = [0, 1, 2, 3]
    portion = Portion(split.features.collate(rows), 1 / split.features.weights(rows), 1.0)
    loss = consistent_loss(bench.host, bench.host, codec, portion)
    loss.backward()
    assert torch.isfinite(loss)


def test_a_mixtures_rate_is_that_of_what_it_mixes():
    for method in (inlay.Pfeiffer(), inlay.LoRA(), inlay.Compacter()):
        for text in (False, True):
            mixed = filled(Recipe(), inlay.Mixture(method), text=text)
            assert mixed.lr == filled(Recipe(), method, text=text).lr == method.usual_rate(text)


def test_metrics_against_numbers_worked_out_by_hand():
    ner = TASKS["tags"]
    at = {label: i for i, label in enumerate(ner.labels)}
    wanted = [["B-POS", "I-POS", "O", "B-NEG"], ["O", "B-POS", "B-POS", "O"]]
    got = [["B-POS", "I-POS", "O", "B-POS"], ["I-POS", "I-POS", "B-POS", "I-NEG"]]
    # right: POS 0-1 and POS 2-2 of the second row; said 5, there are 4 -> 2 * 2 / 9
    told = score(ner, [[at[t] for t in row] for row in wanted], [[at[t] for t in row] for row in got])
    assert told == {"entity_f1": pytest.approx(4 / 9), "token_accuracy": pytest.approx(4 / 8)}
    many = Task(kind="multilabel", labels=("a", "b", "c"))
    # a: 1 of 1 found, 1 wrong; b: 1 of 2; c: none there, none said
    told = score(many, [(0, 1), (1,), ()], [(0,), (0, 1), ()])
    assert told == {
        "micro_f1": pytest.approx(2 * 2 / (2 * 2 + 1 + 1)),
        "macro_f1": pytest.approx((2 / 3 + 2 / 3 + 0) / 3),
        "subset_accuracy": pytest.approx(1 / 3),
    }
    squad = TASKS["spans"]
    golds = [(("the Eiffel Tower", 0), ("Eiffel", 4)), (), (("Paris", 3),)]
    told = score(squad, golds, ["eiffel!", "", "in Paris"])
    assert told == {"token_f1": pytest.approx((1 + 1 + 2 / 3) / 3), "exact_match": pytest.approx(2 / 3)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_labels_of_spans_are_their_tokens_on_either_side_of_the_padding(tmp_path, side):
    bench = Workbench.open(str(save_decoder(tmp_path / "llama")), TASKS["spans"])
    bench.tokenizer.padding_side = side
    some = [
        Example((("w1", "w2 good w3"),), (("good", 3),)),
        Example((("w1", "w2 w3 w4 w5 w6 bad"),), (("bad", 15),)),
    ]
    batch = bench.codec(32).encode(some, cache=False).features.collate([0, 1])
    said = [
        bench.tokenizer.decode(ids[first : last + 1])
        for ids, (first, last) in zip(*map(batch.get, ("input_ids", "labels")), strict=True)
    ]
    assert said == ["good", "bad"]


@pytest.mark.parametrize(("text", "start"), [("good", 3), ("good ", 3), (" good", 2), (" good ", 2)])
def test_spaces_around_an_answer_are_not_of_it(small, text, start):
    bench = Workbench.open(str(small / "bert"), TASKS["spans"])
    row = {"question": "w1", "context": "w2 good w3", "answers": {"text": [text], "answer_start": [start]}}
    encoded = bench.codec(32).encode(examples(TASKS["spans"], Table([row], "rows")), cache=False)
    first, last = encoded.features.targets[0].tolist()
    assert bench.tokenizer.decode(encoded.features.collate([0])["input_ids"][0, first : last + 1]) == "good"


def test_rows_with_one_right_choice_and_with_several_are_measured_together(small):
    task = TASKS["choice"]
    rows = [
        {"text": "w1", "choices": ["good", "bad"], "label": 0},
        {"text": "w2", "choices": ["good", "bad", "poor"], "label": ["bad", "poor"]},
    ]
    for given in (rows, rows[::-1]):
        found = examples(task, Table(given, "rows"))
        right = [found[i].choices.index(found[i].answers[-1]) for i in range(2)]
        codec = Workbench.open(str(small / "bert"), task).codec(32)
        encoded = codec.encode(found, cache=False)
        assert codec.measure(encoded, [Answer(i) for i in right])["accuracy"] == 1
        assert codec.measure(encoded, [Answer(0), Answer(0)])["accuracy"] == 0.5, "good is right in one of them"


def test_a_choice_that_is_none_is_a_mistake_like_others(tmp_path):
    """Choices by their own text, labelled by their index: what T5 writes at first is none of them."""
    task = TASKS["choice"].model_copy(update={"answers": "text"})
    codec = Workbench.open(str(save_t5(tmp_path / "t5")), task).codec(32)
    found = examples(task, Table(rows_of("choice", 4), "rows"))
    said = [codec.decode(example.choices[int(example.target)], example) for example in found[:3]]
    said.append(codec.decode("something else", found[3]))
    assert codec.measure(codec.encode(found, cache=False), said)["accuracy"] == 0.75
