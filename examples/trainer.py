"""transformers.Trainer on a host with an inlay: nothing about it is special.

    python examples/trainer.py
    python examples/trainer.py --host bert-base-uncased

The task is made up, so that nothing is downloaded: are most tokens of a row from the lower half of the vocabulary?
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

import inlay


def rows(count: int, seed: int) -> list[dict]:
    ids = torch.randint(5, 50, (count, 11), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int((row < 27).sum() > 5)} for row in ids]


def accuracy(predicted) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="name or folder of an encoder; without it a small random one")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    if chosen.host:
        host = AutoModelForSequenceClassification.from_pretrained(chosen.host)
    else:
        torch.set_num_threads(1)  # the quickest for so small a host
        config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
        host = AutoModelForSequenceClassification.from_config(config)

    inlay.add(host, "low", inlay.Pfeiffer(reduction=4), head=inlay.Head(labels=["no", "yes"], pooling="mean"))
    inlay.train(host, "low")
    trainable = sum(p.numel() for p in host.parameters() if p.requires_grad)
    print(f"trainable parameters: {trainable:,} of {sum(p.numel() for p in host.parameters()):,}")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=6,
            learning_rate=5e-3,
            per_device_train_batch_size=32,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            host, arguments, train_dataset=rows(1000, 1), eval_dataset=rows(300, 2), compute_metrics=accuracy
        )
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on 300 new rows: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
