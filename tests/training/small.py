"""A tiny host with a tokenizer on disk, and rows that can be learned from one word."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.hosts import CONFIGS, shaken

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")
OTHER = tuple(f"w{i}" for i in range(30))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_WORDS = ("<pad>", "</s>", "<unk>")


def save_bert(folder: Path, **config: object) -> Path:
    """A BERT with two layers of width 16."""
    words = [*SPECIAL, *GOOD, *BAD, *OTHER]
    tokenizer = _words(words, "[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=64,
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
    }
    host = hf.BertModel(hf.BertConfig(vocab_size=len(words), pad_token_id=0, **sizes | config))
    for name, parameter in host.named_parameters():
        if "word_embeddings" in name:
            parameter.data.normal_()
    host.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_t5(folder: Path, says: tuple[str, ...] = ()) -> Path:
    """A T5 that can say the labels, and what else it should be able to say."""
    known = ("positive", "negative", "own", "sentence:", "sentence1:", "sentence2:")
    words = [*T5_WORDS, *GOOD, *BAD, *OTHER, *known, *says]
    tokenizer = _words(words, "<unk>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=64)
    torch.manual_seed(0)
    host = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=len(words), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )
    host.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_decoder(folder: Path, family: str = "llama", says: tuple[str, ...] = (), seed: int = 0) -> Path:
    """A decoder of any causal family of tests/hosts.py that knows the toy words."""
    words = ["<pad>", "</s>", "<s>", "<unk>", "positive", "negative", *GOOD, *BAD, *OTHER, *says]
    tokenizer = _words(words, "<unk>")
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=64).save_pretrained(folder)
    config = CONFIGS[family]()
    config.vocab_size = len(words)
    shaken(hf.AutoModelForCausalLM.from_config(config), seed).save_pretrained(folder)
    return folder


def _words(words: list[str], unknown: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Texts of 2 to 7 words, one of which decides the label."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        label = ("positive", "negative")[i % 2]
        text = [chance.choice(OTHER) for _ in range(chance.randint(1, 6))]
        text.insert(chance.randint(0, len(text)), chance.choice(GOOD if label == "positive" else BAD))
        made.append({"text": " ".join(text), "label": label})
    return made


def rows_of(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Toy rows of any kind, all about which words are good and which are bad."""
    return [_row_of(kind, random.Random(f"{seed} {i}"), i) for i in range(count)]


def _row_of(kind: str, chance: random.Random, i: int) -> dict[str, Any]:
    words = [chance.choice(OTHER) for _ in range(chance.randint(3, 6))]
    word = chance.choice((GOOD, BAD)[i % 2])
    if kind == "choice":
        choices = [chance.choice(BAD) for _ in range(2 + i % 3)]
        choices[i % len(choices)] = chance.choice(GOOD)
        return {"text": " ".join(words), "choices": choices, "label": i % len(choices)}
    if kind == "multilabel":
        labels = [
            name
            for name, some in (("pos", GOOD), ("neg", BAD))
            if chance.random() < 0.5 and words.append(some[0]) is None
        ]
        return {"text": " ".join(words), "labels": labels}
    at = chance.randrange(len(words))
    words.insert(at, word)
    if kind == "tags":
        words[at + 1 : at + 1] = ["w0"]
        tags = ["O"] * len(words)
        name = ("POS", "NEG")[i % 2]
        tags[at : at + 2] = [f"B-{name}", f"I-{name}"]
        return {"tokens": words, "tags": tags}
    if kind == "spans":
        context, start = " ".join(words), len(" ".join(words[:at])) + bool(at)
        return {"question": "w1 w2", "context": context, "answers": {"text": [word], "answer_start": [start]}}
    label: Any = ("positive", "negative")[i % 2] if kind == "classification" else float(i % 2)
    return {"text": " ".join(words), "label": label}


KINDS = ("classification", "regression", "choice", "multilabel", "tags", "spans")


def write_rows(path: Path, some: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return path
