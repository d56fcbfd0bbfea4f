"""A decoder that writes: generation in batches of like length, and training, each against the usual way in one run.

    python -m benchmarks.text --host FOLDER --data-dir FOLDER [--rows 24] [--steps 6] [--repeats 2]

generation   rows of E2E per second of CPU time: `alone`, transformers' generate for one row after the other, against
             `inlay`, all rows by `write`. The texts are compared, and how many are the same is printed.
training     rows per second of CPU time: the same LoRA under transformers.Trainer, batches padded to their longest row,
             against this library's loop. Both train on the same rows with the same batch size; tokens are made before.

One thread, taking turns, the best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import inlay
from inlay.data import Data, Prepared, prepare
from inlay.training.codec import Codec
from inlay.training.generation import settings_for, write
from inlay.training.joined import JoinedFeatures
from inlay.training.loop import TrainingLoop
from inlay.training.recipe import Generation, Recipe
from inlay.training.workbench import Workbench

NEW_TOKENS = 40


def fresh(host: str, prepared: Prepared) -> tuple[Workbench, Codec]:
    torch.manual_seed(0)
    bench = Workbench.open(host, prepared.task)
    bench.set_up("x", "inlay", method=inlay.LoRA(rank=4, alpha=32, targets=("q", "v")))
    return bench, replace(bench.codec(256), generation=Generation(max_new_tokens=NEW_TOKENS))


def generation(host: str, prepared: Prepared, rows: int, repeats: int) -> dict[str, Any]:
    bench, codec = fresh(host, prepared)
    split = codec.encode(prepared.test[:rows], labelled=False)
    bench.host.eval()
    best, texts = {"alone": 0.0, "inlay": 0.0}, {}
    for _ in range(repeats):
        for name, way in (("alone", one_by_one), ("inlay", write)):
            began = time.process_time()
            texts[name] = way(bench.host, codec, split)
            best[name] = max(best[name], rows / (time.process_time() - began))
    same = sum(a == b for a, b in zip(texts["alone"], texts["inlay"], strict=True))
    return {"rows": rows, "same texts": same, "inlay/alone": round(best["inlay"] / best["alone"], 2)} | rounded(best)


@torch.no_grad()
def one_by_one(host: Any, codec: Codec, split: Any) -> list[str]:
    """transformers' own generate, row by row."""
    features: JoinedFeatures = split.features
    how, found = settings_for(host, codec, NEW_TOKENS), []
    for row in range(len(features)):
        span = slice(*features.inputs.starts[row : row + 2].tolist())
        ids = features.inputs.columns["input_ids"][span].long().unsqueeze(0)
        made = host.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
        found.append(codec.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return found


def training(host: str, prepared: Prepared, steps: int, batch: int, repeats: int) -> dict[str, Any]:
    rows = prepared.train[: steps * batch]
    best = {"trainer": 0.0, "inlay": 0.0, "inlay packed": 0.0}
    for _ in range(repeats):
        best["trainer"] = max(best["trainer"], with_trainer(host, prepared, rows, batch))
        best["inlay"] = max(best["inlay"], with_inlay(host, prepared, rows, batch, packing=False))
        best["inlay packed"] = max(best["inlay packed"], with_inlay(host, prepared, rows, batch, packing=True))
    ratio = {"inlay/trainer": round(best["inlay"] / best["trainer"], 2)}
    return {"rows": len(rows), "batch": batch} | ratio | rounded(best)


def with_inlay(host: str, prepared: Prepared, rows: Any, batch: int, packing: bool) -> float:
    bench, codec = fresh(host, prepared)
    train = replace(codec, packing=packing).encode(rows)
    recipe = Recipe(lr=1e-4, epochs=1, batch_size=batch, save_every=1 << 30)
    began = time.process_time()
    TrainingLoop(bench.host, codec, train, None, recipe).run()
    return len(rows) / (time.process_time() - began)


def with_trainer(host: str, prepared: Prepared, rows: Any, batch: int) -> float:
    bench, codec = fresh(host, prepared)
    features = codec.encode(rows).features
    assert isinstance(features, JoinedFeatures)
    data = []
    for row, length in enumerate(features.prompts.tolist()):
        ids = features.inputs.columns["input_ids"][slice(*features.inputs.starts[row : row + 2].tolist())].tolist()
        data.append({"input_ids": ids, "labels": [-100] * length + ids[length:]})
    collator = transformers.DataCollatorForSeq2Seq(codec.tokenizer, label_pad_token_id=-100)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=batch, learning_rate=1e-4, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(bench.host, settings, train_dataset=data, data_collator=collator)
        began = time.process_time()
        trainer.train()
        return len(rows) / (time.process_time() - began)


def rounded(best: dict[str, float]) -> dict[str, float]:
    return {f"{name} rows/s": round(value, 3) for name, value in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    prepared = prepare(Data(task="e2e", data_dir=given.data_dir, metrics=("exact_match",)))
    print(json.dumps({"generation": generation(given.host, prepared, given.rows, given.repeats)}), flush=True)
    print(json.dumps({"training": training(given.host, prepared, given.steps, given.batch, given.repeats)}), flush=True)


if __name__ == "__main__":
    main()
