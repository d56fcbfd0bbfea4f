"""Fusion: learn two tasks apart, then a third one from few rows by listening to what the two know.

    python examples/fuse.py
    python examples/fuse.py --host bert-base-uncased

The tasks are made up, so that nothing is downloaded. Of the tokens in a row: are most from the lower half of the
vocabulary? Are most even? The third asks the first question again, but has 64 rows only.
"""

import argparse

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

import inlay

ASKS = {"low": lambda ids: ids < 27, "even": lambda ids: ids % 2 == 0}


def make_host(name: str | None) -> torch.nn.Module:
    if name:
        return AutoModelForSequenceClassification.from_pretrained(name)
    torch.set_num_threads(1)  # the quickest for so small a host
    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return AutoModelForSequenceClassification.from_config(config)


def rows(task: str, count: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 50, (count, 11), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": (ASKS[task](ids).sum(1) > 5).long()}


def learn(host: torch.nn.Module, name: str, batches: list[dict], lr: float) -> None:
    inlay.train(host, name)
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=lr)
    for batch in batches:
        loss = host(**batch).loss + inlay.penalty(host)  # a fusion's regulariser; 0 for plain inlays
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    host.eval()


@torch.no_grad()
def accuracy(host: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    return (host(**batch).logits.argmax(-1) == batch["labels"]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="name or folder of an encoder; without it a small random one")
    host = make_host(parser.parse_args().host)
    head = inlay.Head(labels=["no", "yes"], pooling="mean")
    for task in ASKS:
        inlay.add(host, task, inlay.Pfeiffer(reduction=4), head=head)
        learn(host, task, [rows(task, 32, seed=step) for step in range(150)], lr=5e-3)
        print(f"{task:<6} alone, 4,800 rows: accuracy {accuracy(host, rows(task, 500, seed=1000)):.2f}")

    few, new = [rows("low", 32, seed=step) for step in (2001, 2002)], rows("low", 500, seed=1001)
    inlay.add(host, "single", inlay.Pfeiffer(reduction=4), head=head)
    learn(host, "single", few * 20, lr=5e-3)
    print(f"single inlay, 64 rows:    accuracy {accuracy(host, new):.2f}")
    inlay.activate(host, "low")
    alone = host(**new).logits
    inlay.add_fusion(host, "fused", members=list(ASKS), head=head)
    learn(host, "fused", few * 20, lr=5e-3)
    print(f"fusion, the same 64 rows: accuracy {accuracy(host, new):.2f}")

    seen = inlay.fusion_activations(host, "fused", [new])
    mean = torch.stack([torch.as_tensor(weights) for weights in seen.mean.values()]).mean(0)
    print("the fusion listens to: " + ", ".join(f"{m} {w:.2f}" for m, w in zip(seen.members, mean, strict=True)))
    inlay.activate(host, "low")
    print(f"low alone, as before the fusion: {torch.equal(host(**new).logits, alone)}")


if __name__ == "__main__":
    main()
