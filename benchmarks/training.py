"""Training examples per second: `inlay train`'s loop against the same inlay under transformers.Trainer, in one run.

    python -m benchmarks.training --host FOLDER --data-dir FOLDER [--steps 12] [--repeats 3] [--peer-python PATH]

adapters  the library adapters with the settings of its own example: AdapterTrainer, every row padded to 128 tokens;
          only with --peer-python, the python of an environment with adapters 1.3.0 and accelerate
fixed     the same settings with our inlay under transformers.Trainer
dynamic   transformers.Trainer, every batch padded to its longest row (DataCollatorWithPadding)
inlay     this library's loop: batches by length

All train the same Pfeiffer inlay (seq_bn) and a head on the same rows with the same batch size, one thread, taking
turns; the best of the repeats counts. Timed is the CPU time of training alone: no evaluation, no saving, tokens made
beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import inlay
from inlay.data import Data, prepare
from inlay.training.codec import Codec
from inlay.training.loop import TrainingLoop
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench

FIXED = 128


def fresh(host_name: str, prepared: Any) -> tuple[Any, Codec]:
    torch.manual_seed(0)
    bench = Workbench.open(host_name, prepared.task)
    bench.set_up("x", "inlay", method=inlay.Pfeiffer())
    return bench.host, bench.codec(FIXED)


def with_inlay(host_name: str, prepared: Any, rows: int, batch: int) -> float:
    host, codec = fresh(host_name, prepared)
    train, one = codec.encode(prepared.train[:rows]), codec.encode(prepared.train[:1])
    recipe = Recipe(lr=1e-4, epochs=1, batch_size=batch, max_length=FIXED, save_every=1 << 30)
    began = time.process_time()
    TrainingLoop(host, codec, train, one, recipe).run()
    return rows / (time.process_time() - began)


def texts_of(prepared: Any, rows: int) -> list[list[str]]:
    """The first texts, and the second ones where rows are pairs."""
    columns = zip(*(example.texts[0] for example in prepared.train[:rows]), strict=True)
    return [list(column) for column in columns if column[0] is not None]


def with_adapters(python: str, host_name: str, prepared: Any, rows: int, batch: int) -> float:
    """In its own environment, which has another version of transformers."""
    targets = [example.target for example in prepared.train[:rows]]
    job = {
        "host": host_name, "texts": texts_of(prepared, rows), "targets": targets, "labels": len(prepared.task.labels),
        "batch": batch, "length": FIXED,
    }  # fmt: skip
    worker = Path(__file__).with_name("peer_training.py")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, str(worker)], input=json.dumps(job), stdout=subprocess.PIPE, text=True, env=env)
    done.check_returncode()
    return float(done.stdout)


def with_trainer(host_name: str, prepared: Any, rows: int, batch: int, padding: bool | str) -> float:
    host, codec = fresh(host_name, prepared)
    tokenizer = codec.tokenizer
    made = tokenizer(*texts_of(prepared, rows), truncation=True, max_length=FIXED, padding=padding)
    data = [
        {name: column[i] for name, column in made.items()} | {"labels": prepared.train[i].target} for i in range(rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=batch, learning_rate=1e-4, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        collator = transformers.DataCollatorWithPadding(tokenizer)
        trainer = transformers.Trainer(host, settings, train_dataset=data, data_collator=collator)
        began = time.process_time()
        trainer.train()
        return rows / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer-python", metavar="PATH", help="python of an environment with adapters 1.3.0 and accelerate"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for task in ("sst2", "rte"):
        prepared = prepare(Data(task=task, data_dir=given.data_dir, rows=2000))
        rows = given.steps * given.batch
        few = max(1, given.steps // 6) * given.batch  # padded to 128, every row costs the same
        ways: dict[str, Callable[[], float]] = {
            "fixed": lambda: with_trainer(given.host, prepared, few, given.batch, "max_length"),  # noqa: B023
            "dynamic": lambda: with_trainer(given.host, prepared, rows, given.batch, False),  # noqa: B023
            "inlay": lambda: with_inlay(given.host, prepared, rows, given.batch),  # noqa: B023
        }
        if given.peer_python:
            ways["adapters"] = lambda: with_adapters(given.peer_python, given.host, prepared, few, given.batch)  # noqa: B023
        best = dict.fromkeys(ways, 0.0)
        for _ in range(given.repeats):
            for name, way in ways.items():
                best[name] = max(best[name], way())
        ratios = {f"inlay/{name}": round(best["inlay"] / best[name], 2) for name in ways if name != "inlay"}
        print(
            json.dumps({"task": task, "rows": rows, **{k: round(v, 1) for k, v in best.items()}, **ratios}), flush=True
        )


if __name__ == "__main__":
    main()
