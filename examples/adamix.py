"""AdaMix on a small task: train a mixture, then compare the ways to evaluate it.

    python examples/adamix.py
    python examples/adamix.py --host FOLDER --data rows.jsonl

Without arguments nothing is downloaded. The task is real but small: from which section of Python's own manual does a
passage of twelve words come? The host is a BERT of two layers that first reads the rest of the manual for a few seconds
(masked words), then stays frozen. With --host and --data it is any encoder of transformers, and rows such as
{"text": "...", "label": "..."}; "text_b" is a second text.

Each seed trains one mixture of four modules per site with the consistency loss, and evaluates it in four ways:

    merged     the mean of the four modules: what `inlay.merge` keeps and what is served
    random     one random module per site
    first      always the first module
    ensemble   the mean logits of four random passes, at four times the price
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import inlay

SECTIONS = ("compound", "types", "formatstrings", "string-methods", "typesseq", "debugger")
WORDS = 24
PAD, UNKNOWN, MASK = 0, 1, 2
Batch = dict[str, torch.Tensor]


@dataclass
class Task:
    train: list[dict]
    test: list[dict]
    labels: list[str]
    encode: Callable[[list[dict]], Batch]
    """Rows to what the host takes, without labels."""
    host: Callable[[], torch.nn.Module]
    """A fresh host; the same one every time."""

    def batch(self, rows: list[dict]) -> Batch:
        return self.encode(rows) | {"labels": torch.tensor([self.labels.index(row["label"]) for row in rows])}


# ── a task and a host out of nothing ──


def manual_task(rows: int, reading: int) -> Task:
    """Passages of Python's manual, which comes with Python, by section."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    passages = {name: cut(topics[name]) for name in SECTIONS}
    shuffle = random.Random(0).shuffle
    for found in passages.values():
        shuffle(found)
    half = rows // len(SECTIONS)
    train = [{"text": text, "label": name} for name, found in passages.items() for text in found[:half]]
    test = [{"text": text, "label": name} for name, found in passages.items() for text in found[half:][:80]]
    other = [text for name, whole in topics.items() if name not in SECTIONS for text in cut(whole)]
    counts = Counter(word for text in [*other, *(row["text"] for row in train)] for word in text.split())
    vocabulary = {word: 3 + i for i, (word, _) in enumerate(counts.most_common(2000))}

    def encode(some: list[dict]) -> Batch:
        ids = [[vocabulary.get(word, UNKNOWN) for word in row["text"].split()] for row in some]
        longest = max(map(len, ids))
        padded = torch.tensor([row + [PAD] * (longest - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": (padded != PAD).long()}

    config = transformers.BertConfig(
        vocab_size=3 + len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=WORDS, pad_token_id=PAD,
    )  # fmt: skip
    learned = read(config, encode([{"text": text} for text in other])["input_ids"], reading)

    def host() -> torch.nn.Module:
        model = transformers.BertForSequenceClassification(config)
        model.bert.load_state_dict(learned, strict=False)  # the masked-word model has no pooler
        return model

    return Task(train, test, list(SECTIONS), encode, host)


def cut(text: str) -> list[str]:
    words = re.findall(r"[a-z_]+|[^\sa-z_]", text.lower())
    return [" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS, WORDS)]


def read(config: transformers.BertConfig, ids: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """Give the host something to know: guess masked words of the manual."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = ids[torch.randint(len(ids), (64,))]
        hidden = torch.rand(rows.shape) < 0.15
        loss = model(input_ids=rows.masked_fill(hidden, MASK), labels=rows.masked_fill(~hidden, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.bert.state_dict()


# ── your own host and rows ──


def own_task(folder: str, file: Path, rows: int) -> Task:
    with file.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines if line.strip()]
    random.Random(0).shuffle(found)
    labels = sorted({row["label"] for row in found})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(some: list[dict]) -> Batch:
        second = [row["text_b"] for row in some] if "text_b" in some[0] else None
        return dict(tokenizer([row["text"] for row in some], second, padding=True, truncation=True, max_length=128, return_tensors="pt"))

    def host() -> torch.nn.Module:
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(labels))

    return Task(found[:rows], found[rows:][:600], labels, encode, host)


# ── training and evaluation ──


def batches(task: Task, rows: list[dict], size: int = 32) -> Iterator[Batch]:
    for at in range(0, len(rows), size):
        yield task.batch(rows[at : at + size])


def learn(task: Task, seed: int, epochs: int, lr: float, modules: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    host, rows = task.host(), list(task.train)
    method = inlay.Houlsby(size=16, sites=("ffn",), activation="gelu")  # AdaMix's adapter
    inlay.add(host, "task", inlay.Mixture(method, modules=modules), head=inlay.Head(labels=tuple(task.labels), pooling="mean"))
    inlay.train(host, "task")
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=lr)
    steps = epochs * -(-len(rows) // 32)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    order = random.Random(seed)
    for _ in range(epochs):
        order.shuffle(rows)
        for batch in batches(task, rows):
            inlay.mixture_loss(host, batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return host.eval()


@torch.no_grad()
def accuracy(task: Task, logits: Callable[[Batch], torch.Tensor]) -> float:
    right = 0
    for batch in batches(task, task.test, 100):
        labels = batch.pop("labels")
        right += int((logits(batch).argmax(-1) == labels).sum())
    return 100 * right / len(task.test)


def four_ways(task: Task, host: torch.nn.Module) -> dict[str, float]:
    plain = lambda batch: host(**batch).logits
    found = {}
    for way in ("random", "first"):
        with inlay.routing(host, "task", way):
            found[way] = accuracy(task, plain)
    found["ensemble"] = accuracy(task, lambda batch: inlay.ensemble(host, "task", batch, passes=4))
    inlay.merge(host, "task")  # from here on a plain inlay
    return {"merged": accuracy(task, plain)} | found


def say(results: list[dict[str, float]]) -> str:
    """What was seen, and how much it moves from seed to seed."""
    mean = {way: statistics.mean(result[way] for result in results) for way in results[0]}
    spread = max(max(result[way] for result in results) - min(result[way] for result in results) for way in mean)
    parts = []
    for way in ("random", "first", "ensemble"):
        ahead = [result["merged"] - result[way] for result in results]
        wins = sum(a > 0 for a in ahead)
        parts.append(f"{statistics.mean(ahead):+.1f} against {way} (ahead in {wins} of {len(results)} seeds)")
    return f"Seen: merged is {', '.join(parts)}. One way differs by up to {spread:.1f} between seeds: smaller differences mean nothing."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", metavar="FOLDER", help="an encoder of transformers; needs --data")
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines with text, label and, if you like, text_b")
    parser.add_argument("--rows", type=int, default=300, help="training rows (300)")
    parser.add_argument("--epochs", type=int, default=20, help="(20)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (2e-3)")
    parser.add_argument("--modules", type=int, default=4, help="modules of the mixture (4)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--reading", type=int, default=600, help="steps in which the default host reads (600)")
    chosen = parser.parse_args()
    if bool(chosen.host) != bool(chosen.data):
        parser.error("--host and --data belong together")
    begin = time.time()
    task = own_task(chosen.host, chosen.data, chosen.rows) if chosen.host else manual_task(chosen.rows, chosen.reading)
    print(f"{len(task.train)} rows to learn from, {len(task.test)} to test, {len(task.labels)} labels")
    print(f"{'seed':<6}" + "".join(f"{way:>10}" for way in ("merged", "random", "first", "ensemble")))
    results = []
    for seed in range(chosen.seeds):
        results.append(four_ways(task, learn(task, seed, chosen.epochs, chosen.lr, chosen.modules)))
        print(f"{seed:<6}" + "".join(f"{value:>10.1f}" for value in results[-1].values()), flush=True)
    print(say(results))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
