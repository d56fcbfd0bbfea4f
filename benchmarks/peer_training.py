"""The peer's side of training.py: adapters 1.3.0 with the settings of its own example (run_glue.py).

seq_bn and a classification head, AdapterTrainer, every row padded to 128 tokens. Started by training.py with the python
that --peer-python names; reads one JSON object on stdin and prints examples per second of CPU time. Imports nothing of
this project.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import torch
import transformers
from adapters import AdapterTrainer, AutoAdapterModel


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = AutoAdapterModel.from_pretrained(job["host"])
    host.add_classification_head("x", num_labels=job["labels"])
    host.add_adapter("x", config="seq_bn")
    host.train_adapter("x")
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["host"])
    made = tokenizer(*job["texts"], truncation=True, max_length=job["length"], padding="max_length")
    rows = len(job["targets"])
    data = [{name: column[i] for name, column in made.items()} | {"labels": job["targets"][i]} for i in range(rows)]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=job["batch"], learning_rate=1e-4, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = AdapterTrainer(host, settings, train_dataset=data)
        began = time.process_time()
        trainer.train()
        print(rows / (time.process_time() - began), file=answers, flush=True)


if __name__ == "__main__":
    main()
