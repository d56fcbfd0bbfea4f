import torch
import transformers

from inlay.data.examples import Example
from inlay.training.tokens import IGNORED, features


def tokenizer(small):
    return transformers.AutoTokenizer.from_pretrained(small / "bert")


def test_a_batch_is_what_the_tokenizer_would_have_padded(small):
    texts = [("w1 good w2", "bad"), ("w3", "w4 w5 w6"), ("w7 w8", "fine")]
    tokens = tokenizer(small)
    made = features([Example((pair,), 0) for pair in texts], tokens, 64, [0, 1, 0]).collate([2, 0])
    expected = tokens([texts[2][0], texts[0][0]], [texts[2][1], texts[0][1]], padding=True, return_tensors="pt")
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name
    assert made["labels"].tolist() == [0, 0]


def test_tokens_come_from_the_cache_the_second_time_and_a_damaged_cache_is_made_anew(small, tmp_path):
    some = [Example((("w1 good", None),), 0), Example((("w2", None),), 1)]
    first = features(some, tokenizer(small), 64, [0, 1])
    again = features(some, tokenizer(small), 64, [0, 1])
    assert (first.cached, again.cached) == (False, True)
    assert torch.equal(first.collate([0, 1])["input_ids"], again.collate([0, 1])["input_ids"])
    assert not features(some, tokenizer(small), 3, [0, 1]).cached, "another length is another entry"
    for file in (tmp_path / "cache" / "tokens").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert not features(some, tokenizer(small), 64, [0, 1]).cached


def test_without_the_cache_nothing_is_written_there(small, tmp_path):
    features([Example((("w1 good", None),), "w2")], tokenizer(small), 64, ["w2"], cache=False)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_only_the_choices_that_a_row_has_are_run(small):
    two = Example((("w1", "good"), ("w1", "bad")), 1)
    three = Example((("w1 w2 w3", "good"), ("w2", "bad"), ("w2", "fine")), 2)
    batch = features([two, three], tokenizer(small), 64, [1, 2]).collate([0, 1])
    assert len(batch["input_ids"]) == 5
    assert batch["has_choice"].tolist() == [[True, True, False], [True, True, True]]


def test_text_targets_are_not_counted_where_padded(small):
    some = [Example((("w1", None),), None), Example((("w2", None),), None)]
    made = features(some, tokenizer(small), 64, ["good", "good bad fine"])
    batch = made.collate([0, 1])
    assert (batch["labels"] == IGNORED).sum() == 2
    assert made.weights([0, 1]) == int((batch["labels"] != IGNORED).sum())


def test_whatever_changes_the_tokens_is_another_entry(small):
    """Also what a tokenizer's file says of it, and a pair that reads like none."""
    some = [Example((("w1 good w2 w3", "bad"),), 0)]

    def made(texts=some, **said):
        tokens = tokenizer(small)
        for name, value in said.items():
            setattr(tokens, name, value)
        return features(texts, tokens, 6, [0])

    assert not made().cached
    assert made().cached
    assert list(made(model_input_names=["input_ids", "attention_mask"]).inputs.columns) == ["input_ids"]
    left = made(truncation_side="left")
    assert not left.cached
    assert left.inputs.columns["input_ids"].tolist() != made().inputs.columns["input_ids"].tolist()
    assert not made([Example((("w1", "None"),), 0)]).cached
    assert not made([Example((("w1", None),), 0)]).cached
