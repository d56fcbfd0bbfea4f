"""AdaMix on a small task: train a mixture, then compare the ways to evaluate it.

    python examples/adamix.py
    python examples/adamix.py --host FOLDER --data rows.jsonl

Without arguments nothing is downloaded. The task is real but small: is the character called "greek small letter alpha"
a letter, a mark, a number, a punctuation or a symbol? Python knows the names and the answers (`unicodedata`). The host
is a BERT of two layers with random weights that stay frozen. With --host and --data it is any encoder of transformers,
and rows such as {"text": "...", "label": "..."}; "text_b" is a second text.

Each seed trains one mixture of four modules per site with the consistency loss, and evaluates it in four ways:

    merged     the mean of the four modules: what `inlay.merge` keeps and what is served
    random     one random module per site
    first      always the first module
    ensemble   the mean logits of four random passes, at four times the price
"""

from __future__ import annotations

import argparse
import json
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import inlay

CATEGORIES = {"L": "letter", "M": "mark", "N": "number", "P": "punctuation", "S": "symbol"}
LONGEST = 12
PAD, UNKNOWN = 0, 1
Batch = dict[str, torch.Tensor]


@dataclass
class Task:
    train: list[dict]
    test: list[dict]
    labels: list[str]
    encode: Callable[[list[dict]], Batch]
    """Rows to what the host takes, without labels."""
    host: Callable[[], torch.nn.Module]
    """A fresh host, the same one every time."""

    def batch(self, rows: list[dict]) -> Batch:
        return self.encode(rows) | {"labels": torch.tensor([self.labels.index(row["label"]) for row in rows])}


def shuffled(rows: list, seed: int) -> list:
    return [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


# ── a task and a host out of nothing ──


def names_task(rows: int) -> Task:
    """Names of Unicode characters by their general category."""
    names: dict[str, list[str]] = {label: [] for label in CATEGORIES.values()}
    for code in range(0x110000):
        name, category = unicodedata.name(chr(code), ""), unicodedata.category(chr(code))[0]
        if name and category in CATEGORIES and not any(letter.isdigit() for letter in name):
            names[CATEGORIES[category]].append(name.lower().replace("-", " "))
    names = {label: shuffled(found, seed=0) for label, found in names.items()}
    each = rows // len(names)
    train = [{"text": name, "label": label} for label, found in names.items() for name in found[:each]]
    test = [{"text": name, "label": label} for label, found in names.items() for name in found[each:][:120]]
    words = Counter(word for found in names.values() for name in found[each + 120 :][:3000] for word in name.split())
    vocabulary = {word: 2 + i for i, (word, _) in enumerate(words.most_common(2000))}

    def encode(some: list[dict]) -> Batch:
        ids = [[vocabulary.get(word, UNKNOWN) for word in row["text"].split()][:LONGEST] for row in some]
        longest = max(map(len, ids))
        padded = torch.tensor([row + [PAD] * (longest - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": (padded != PAD).long()}

    config = transformers.BertConfig(
        vocab_size=2 + len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LONGEST, pad_token_id=PAD,
    )  # fmt: skip

    def host() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return transformers.BertForSequenceClassification(config)

    return Task(train, test, list(names), encode, host)


# ── your own host and rows ──


def own_task(folder: str, file: Path, rows: int) -> Task:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with file.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines if line.strip()]
    found = [row | {"label": str(row["label"])} for row in shuffled(found, seed=0)]
    labels = sorted({row["label"] for row in found})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(some: list[dict]) -> Batch:
        second = [row["text_b"] for row in some] if "text_b" in some[0] else None
        first = [row["text"] for row in some]
        return dict(tokenizer(first, second, padding=True, truncation=True, max_length=128, return_tensors="pt"))

    def host() -> torch.nn.Module:
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(labels))

    return Task(found[:rows], found[rows:][:600], labels, encode, host)


# ── training and evaluation ──


def batches(task: Task, rows: list[dict], size: int = 32) -> Iterator[Batch]:
    for at in range(0, len(rows), size):
        yield task.batch(rows[at : at + size])


def learn(task: Task, seed: int, epochs: int, lr: float, modules: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    host = task.host()
    method = inlay.Houlsby(size=16, sites=("ffn",), activation="gelu")  # AdaMix's adapter
    head = inlay.Head(labels=tuple(task.labels), pooling="mean")
    inlay.add(host, "task", inlay.Mixture(method, modules=modules), head=head)
    inlay.train(host, "task")
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=lr)
    steps = epochs * -(-len(task.train) // 32)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for epoch in range(epochs):
        for batch in batches(task, shuffled(task.train, seed=1000 * seed + epoch)):
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


def say(results: list[dict[str, float]], rows: int) -> str:
    """What was seen: how far merged is ahead of each other way, with the same weights."""
    lines = [f"Seen (one test row is {100 / rows:.1f}):"]
    for way in ("random", "first", "ensemble"):
        ahead = [result["merged"] - result[way] for result in results]
        signs = {(a > 0) - (a < 0) for a in ahead}
        verdict = {(1,): "ahead in every seed", (-1,): "behind in every seed"}.get(tuple(signs), "no clear difference")
        numbers = f"{statistics.mean(ahead):+5.1f} on average, {min(ahead):+.1f} to {max(ahead):+.1f}"
        lines.append(f"  merged - {way:<9} {numbers}: {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", metavar="FOLDER", help="an encoder of transformers; needs --data")
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines with text, label and perhaps text_b")
    parser.add_argument("--rows", type=int, default=500, help="training rows (500)")
    parser.add_argument("--epochs", type=int, default=30, help="(30)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (1e-2)")
    parser.add_argument("--modules", type=int, default=4, help="modules of the mixture (4)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    chosen = parser.parse_args()
    if bool(chosen.host) != bool(chosen.data):
        parser.error("--host and --data belong together")
    task = own_task(chosen.host, chosen.data, chosen.rows) if chosen.host else names_task(chosen.rows)
    print(f"{len(task.train)} rows to learn from, {len(task.test)} to test, {len(task.labels)} labels")
    print(f"{'seed':<6}" + "".join(f"{way:>10}" for way in ("merged", "random", "first", "ensemble")))
    results = []
    for seed in range(chosen.seeds):
        results.append(four_ways(task, learn(task, seed, chosen.epochs, chosen.lr, chosen.modules)))
        print(f"{seed:<6}" + "".join(f"{value:>10.1f}" for value in results[-1].values()), flush=True)
    print(say(results, len(task.test)))


if __name__ == "__main__":
    main()
