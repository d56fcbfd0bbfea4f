"""Decoders that answer in text: their loss is transformers' own, and their texts are those of `generate` by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf

import inlay
from inlay.data.examples import Example, examples, grouped, one_per_answer
from inlay.data.rows import Table
from inlay.data.task import Task
from inlay.training.evaluate import ask
from inlay.training.generation import ending, longest_answer, room_for, write, write_rows
from inlay.training.joined import JoinedFeatures, check_packing
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import Portion, consistent_loss, plain_loss
from inlay.training.recipe import Generation, Recipe
from inlay.training.tokens import IGNORED
from inlay.training.workbench import Workbench
from tests.hosts import shake, shaken, without_dropout
from tests.training.small import BAD, GOOD, OTHER, save_decoder

CAUSAL = ("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi")
TASK = Task(name="own", kind="text", text="source", label="references", template="{source} {eos} {target}")
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def rows(count: int = 12) -> list[dict]:
    """Say the first word twice, then whether it is good."""
    made = []
    for i in range(count):
        words = [(GOOD + BAD)[i % 6], *OTHER[i % 7 : i % 7 + 1 + i % 4]]
        made.append(
            {
                "source": " ".join(words),
                "references": f"{words[0]} {words[0]} {'positive' if i % 6 < 3 else 'negative'}",
            }
        )
    return made


def some(count: int = 12, task: Task = TASK) -> list[Example]:
    return examples(task, Table(rows(count), "rows"))


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")

    def open_one(family: str = "llama", side: str = "right", task: Task = TASK) -> Workbench:
        if not (folder / family).exists():
            save_decoder(folder / family, family)
        bench = Workbench.open(str(folder / family), task)
        plain = hf.PreTrainedTokenizerFast.from_pretrained(folder / family)  # Qwen's own class would read bytes
        bench = replace(bench, tokenizer=plain)
        bench.tokenizer.padding_side = side
        bench.host.eval()
        return bench

    return open_one


def whole_rows(bench: Workbench, some: list[Example]) -> tuple[list[list[int]], list[int]]:
    """Every row's tokens and its prompt's length, cut by hand."""
    tokenizer, ids, prompts = bench.tokenizer, [], []
    for row in some:
        before = tokenizer.convert_tokens_to_ids([*row.texts[0][0].split(), "</s>"])
        after = tokenizer.convert_tokens_to_ids([*str(row.target).split(), "</s>"])
        ids.append(before + after)
        prompts.append(len(before))
    return ids, prompts


def by_hand(bench: Workbench, some: list[Example]) -> dict[str, torch.Tensor]:
    """What transformers' own loss reads: padded on the right, labels of prompts and padding masked."""
    ids, prompts = whole_rows(bench, some)
    longest = max(map(len, ids))
    labels = [[IGNORED] * p + row[p:] + [IGNORED] * (longest - len(row)) for row, p in zip(ids, prompts, strict=True)]
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        "labels": torch.tensor(labels),
    }


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_and_gradients_are_those_of_transformers_with_masked_labels(decoders, family, side):
    bench = decoders(family, side)
    bench.set_up("x", "inlay", method=inlay.LoRA(rank=2, dropout=0.0))
    shake(bench.host, "x")
    bench.host.eval()
    split = bench.codec(32).encode(some())
    index = list(range(12))

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in bench.host.inlays["x"].parameters()]
        bench.host.zero_grad()
        return found

    theirs = bench.host(**by_hand(bench, some())).loss
    theirs.backward()
    wanted = gradients()
    batch = split.features.collate(index)
    ours = plain_loss(bench.host, bench.host, bench.codec(32), Portion(batch, 1 / split.features.weights(index), 1.0))
    ours.backward()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for one, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_label_smoothing_is_that_of_torch_over_the_answers_tokens(decoders):
    bench = decoders()
    codec, hand = replace(bench.codec(32), label_smoothing=0.1), by_hand(bench, some())
    split = codec.encode(some())
    with torch.no_grad():
        logits = bench.host(hand["input_ids"], attention_mask=hand["attention_mask"]).logits
        batch = split.features.collate(list(range(12)))
        ours = plain_loss(bench.host, bench.host, codec, Portion(batch, 1.0, 1.0))
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), hand["labels"][:, 1:].flatten(), reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(ours, each, **CLOSE)


def alone(bench: Workbench, row: Example, **how) -> str:
    """`generate` called by hand for one row."""
    ids = torch.tensor([bench.tokenizer.convert_tokens_to_ids([*row.texts[0][0].split(), "</s>"])])
    if "no_repeat_ngram_size" in how:  # over the answer alone, which may copy from its prompt
        step = hf.NoRepeatNGramLogitsProcessor(how.pop("no_repeat_ngram_size"))
        how["logits_processor"] = [lambda ids_so_far, scores: step(ids_so_far[:, ids.shape[1] :], scores)]
    made = bench.host.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, pad_token_id=0, eos_token_id=1, **how
    )
    return bench.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


WAYS = {
    "greedy": (Generation(max_new_tokens=9), {"num_beams": 1}),
    "beams": (Generation(beams=4, length_penalty=0.8, max_new_tokens=9), {"num_beams": 4, "length_penalty": 0.8}),
    "no repeats": (Generation(no_repeat_ngram=2, max_new_tokens=9), {"num_beams": 1, "no_repeat_ngram_size": 2}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "gemma3"])
def test_texts_of_a_batch_are_those_of_generate_row_by_row(decoders, family, side, way):
    bench = decoders(family, side)
    settings, theirs = WAYS[way]
    codec = replace(bench.codec(32), generation=settings)
    split = codec.encode(some(), labelled=False)
    texts = write(bench.host, codec, split)
    assert texts == [alone(bench, row, do_sample=False, **theirs) for row in some()]
    assert len(set(texts)) > 2, "rows differ"
    labelled = codec.encode(some())
    assert [answer.prediction for answer in ask(bench.host, codec, labelled)] == texts


def test_a_sampled_text_follows_from_the_seed_and_its_row_alone(decoders):
    bench = decoders()

    def texts(count: int = 12, **how) -> list[str]:
        codec = replace(bench.codec(32), generation=Generation(sampling=1.0, max_new_tokens=6, **how))
        return write(bench.host, codec, codec.encode(some(count), labelled=False))

    assert texts() == texts()
    assert texts(5) == texts()[:5], "the rows beside it do not matter"
    assert texts() != texts(sampling_seed=1)
    codec = replace(bench.codec(32), generation=Generation(max_new_tokens=6))
    assert texts(top_k=1) == write(bench.host, codec, codec.encode(some(), labelled=False)), "the likeliest word only"


def test_a_sampled_word_has_the_hosts_own_probability(decoders):
    bench = decoders()
    row = some(1)[0]
    codec = replace(bench.codec(32), generation=Generation(sampling=0.7, max_new_tokens=1))
    drawn = write(bench.host, codec, codec.encode([row] * 4000, labelled=False))
    ids = torch.tensor([bench.tokenizer.convert_tokens_to_ids([*row.texts[0][0].split(), "</s>"])])
    with torch.no_grad():
        shares = (bench.host(ids).logits[0, -1] / 0.7).softmax(-1)
    word = 4 + int(shares[4:].argmax())  # not one of the special tokens, which are no text
    share = drawn.count(bench.tokenizer.decode([word], skip_special_tokens=True)) / len(drawn)
    assert share == pytest.approx(float(shares[word]), abs=0.03)


def test_a_text_is_handed_out_as_it_is_written(decoders):
    bench = decoders()
    codec = replace(bench.codec(32), generation=Generation(max_new_tokens=9))
    whole = write(bench.host, codec, codec.encode(some(), labelled=False))
    at = max(range(12), key=lambda row: len(whole[row].split()))
    one = codec.encode([some()[at]], labelled=False)
    pieces: list[str] = []
    (text,) = write(bench.host, codec, one, on_text=pieces.append)
    assert "".join(pieces).strip() == text == whole[at]
    assert len(pieces) > 1
    with pytest.raises(inlay.ConfigError, match="one text at a time"):
        write(bench.host, codec, codec.encode(some(2), labelled=False), on_text=pieces.append)


def test_it_is_known_how_a_text_ended():
    """By an end of its own, for lack of room, or by an end that BART and its like are made to write there."""
    plain = hf.GenerationConfig(max_new_tokens=3, eos_token_id=[1, 9])
    forced = hf.GenerationConfig(max_new_tokens=3, eos_token_id=[1], forced_eos_token_id=1)
    assert ending([5, 9, 0], plain) == (2, True)
    assert ending([5, 6, 1], plain) == (3, True)
    assert ending([5, 0, 6], plain) == (3, False)
    assert ending([5, 6, 7], hf.GenerationConfig(max_new_tokens=3)) == (3, False)
    assert ending([5, 1, 0], forced) == (2, True)
    assert ending([5, 6, 1], forced) == (3, False)


def test_sampling_and_beams_exclude_each_other():
    with pytest.raises(inlay.ConfigError, match="sampling follows one beginning, but beams is 3"):
        Generation(sampling=1.0, beams=3)


# packing


@pytest.mark.parametrize("family", CAUSAL)
def test_packed_rows_have_the_same_loss_and_gradients(decoders, family):
    bench = decoders(family)
    bench.set_up("x", "inlay", method=inlay.LoRA(rank=2, dropout=0.0))
    shake(bench.host, "x")
    bench.host.eval()
    found = []
    for packing in (False, True):
        codec = replace(bench.codec(32), packing=packing)
        features = codec.encode(some()).features
        assert isinstance(features, JoinedFeatures)
        if packing:
            check_packing(bench.host, features)
        batch = features.collate(list(range(12)))
        assert len(batch["input_ids"]) == 12 or packing
        assert len(batch["input_ids"]) < 12 or not packing
        loss = plain_loss(bench.host, bench.host, codec, Portion(batch, 0.05, 1.0))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in bench.host.inlays["x"].parameters())])
        bench.host.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


def test_packing_is_refused_where_a_row_would_see_another(decoders, monkeypatch):
    bench = decoders()
    features = replace(bench.codec(32), packing=True).encode(some()).features
    forward = type(bench.host).forward

    def careless(self, attention_mask=None, **inputs):
        return forward(self, **inputs)

    monkeypatch.setattr(type(bench.host), "forward", careless)
    with pytest.raises(inlay.ConfigError, match="llama cannot pack rows: a row's logits change"):
        check_packing(bench.host, features)


def test_packing_is_refused_where_layers_see_only_so_far(decoders):
    bench = decoders("mistral")
    features = replace(bench.codec(32), packing=True).encode(some()).features
    bench.host.config.sliding_window = 4
    with pytest.raises(inlay.ConfigError, match="its layers see only the last 4 tokens"):
        check_packing(bench.host, features)


# several right answers, rows and learning


def test_rows_of_one_source_are_scored_once_and_trained_on_each(decoders):
    pairs = [
        {"source": "good", "references": "a"},
        {"source": "bad", "references": "b"},
        {"source": "good", "references": "c"},
    ]
    apart = examples(TASK, Table(pairs, "rows"))
    together = examples(TASK, Table([{"source": "good", "references": ["a", "c"]}, pairs[1]], "rows"))
    assert grouped(apart) == together
    assert [row.answers for row in together] == [("a", "c"), ()]
    assert [row.target for row in one_per_answer(together[0])] == ["a", "c"]


def test_a_decoder_learns_to_answer(decoders):
    bench = decoders()
    bench.set_up("x", "inlay", method=inlay.Houlsby(reduction=1))
    codec = bench.codec(32)
    train, validation = codec.encode(some(60)), codec.encode(some(60)[:20])
    before = codec.measure(validation, ask(bench.host, codec, validation))
    recipe = Recipe(lr=0.02, epochs=20, batch_size=12, patience=0, eval_every=100)
    outcome = TrainingLoop(bench.host, codec, train, validation, recipe).run()
    assert before["token_f1"] < 0.3
    assert outcome.scores["token_f1"] > before["token_f1"] + 0.3


def test_a_mixture_on_a_decoder_merges_to_the_mean_and_is_consistent_over_real_tokens(decoders):
    bench = decoders()
    bench.set_up("x", "inlay", method=inlay.Mixture(method=inlay.LoRA(rank=2, dropout=0.0), modules=3))
    shake(bench.host, "x")
    without_dropout(bench.host)
    codec = bench.codec(32)
    split = codec.encode(some())
    few, many = split.features.collate([0, 4]), split.features.collate([0, 4, 7])
    bench.host.train()
    width = few["labels"].shape[1]
    longer = {
        name: torch.nn.functional.pad(t, (0, 3), value=IGNORED if name == "labels" else 0) for name, t in few.items()
    }
    losses = []
    for batch in (few, longer):
        torch.manual_seed(3)
        losses.append(consistent_loss(bench.host, bench.host, codec, Portion(batch, 0.1, 1.0), weight=5.0))
    torch.testing.assert_close(*losses, **CLOSE)
    torch.manual_seed(3)
    plain = consistent_loss(bench.host, bench.host, codec, Portion(few, 0.1, 1.0), weight=0.0)
    assert losses[0] > plain
    assert many["labels"].shape[1] >= width
    bench.host.eval()
    before = write(bench.host, codec, codec.encode(some(), labelled=False))
    with torch.no_grad():
        mean = bench.host(many["input_ids"], attention_mask=many["attention_mask"]).logits
        inlay.merge(bench.host, "x")
        merged = bench.host(many["input_ids"], attention_mask=many["attention_mask"]).logits
    torch.testing.assert_close(merged, mean, **CLOSE)
    assert write(bench.host, codec, codec.encode(some(), labelled=False)) == before


# what is wrong


def test_a_row_without_room_for_its_answer_is_named(decoders):
    bench = decoders()
    with pytest.raises(inlay.ConfigError, match=r"max_length is 4.*nothing of the answer.*row 4 \('awful|row 4 \('bad"):
        bench.codec(4).encode(some())
    assert longest_answer(bench.codec(32).encode(some())) == 4


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"source": " ", "references": "a"}, "the text (source) is empty"),
        ({"source": "a", "references": ""}, "none of them empty, got ''"),
        ({"source": "a", "references": ["b", " "]}, "none of them empty"),
        ({"source": "a", "references": []}, "none of them empty"),
    ],
)
def test_an_empty_source_or_reference_is_refused(row, told):
    with pytest.raises(inlay.InlayError) as error:
        examples(TASK, Table([row], "rows"))
    assert "rows, row 1" in str(error.value)
    assert told in str(error.value)


def test_templates_are_checked(decoders):
    for wrong, told in (
        ("{source}", "has no {target}"),
        ("{target} {target}", "more than once"),
        ("{source {target}", "cannot be read|must name"),
    ):
        with pytest.raises(inlay.ConfigError, match=told):
            Task(kind="text", template=wrong)
    with pytest.raises(inlay.InlayError, match="a decoder answers at the end"):
        decoders(task=Task(kind="text", text="source", template="{target} {source}"))


def test_an_encoder_cannot_answer_in_text_and_says_what_can(small):
    with pytest.raises(inlay.InlayError, match="such as T5, GPT-2 or Llama, not bert"):
        Workbench.open(str(small / "bert"), TASK)
    assert isinstance(hf.AutoConfig.from_pretrained(small / "bert"), hf.BertConfig)


def test_an_answer_stops_where_the_hosts_positions_end(tmp_path):
    """GPT-2 has a table of them: a prompt that just fits leaves less room than an answer may have."""
    config = hf.AutoConfig.from_pretrained(save_decoder(tmp_path / "gpt2", "gpt2"))
    config.n_positions = 32
    shaken(hf.GPT2LMHeadModel(config)).save_pretrained(tmp_path / "gpt2")
    bench = Workbench.open(str(tmp_path / "gpt2"), TASK)
    codec, row = bench.codec(64), {"source": " ".join(["w1"] * 28), "references": "good"}
    encoded = codec.encode(examples(TASK, Table([row], "rows")), cache=False)
    [text] = write_rows(bench.host, codec, encoded, [0])
    assert 1 <= text.tokens <= 32 - text.read < room_for(codec, encoded)
