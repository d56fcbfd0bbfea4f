"""A training loop of your own, saving, and loading into a fresh host.

    python examples/own_loop.py
    python examples/own_loop.py --host bert-base-uncased

The task is made up, so that nothing is downloaded: are most tokens of a row from the lower half of the vocabulary?
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

import inlay


def rows(count: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 50, (count, 11), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ((ids < 27).sum(1) > 5).long()}


def make_host(name: str | None) -> torch.nn.Module:
    if name:
        return AutoModelForSequenceClassification.from_pretrained(name)
    torch.set_num_threads(1)  # the quickest for so small a host
    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return AutoModelForSequenceClassification.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="name or folder of an encoder; without it a small random one")
    chosen = parser.parse_args()

    host = make_host(chosen.host)
    before = {name: tensor.clone() for name, tensor in host.state_dict().items()}
    inlay.add(host, "low", inlay.Pfeiffer(reduction=4), head=inlay.Head(labels=["no", "yes"], pooling="mean"))
    inlay.train(host, "low")
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=5e-3)
    for step in range(101):
        found = host(**rows(32, seed=step))
        found.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3}  loss {found.loss.item():.3f}")

    host.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        inlay.save(host, "low", f"{folder}/low")
        other = make_host(chosen.host).eval()
        inlay.load(other, f"{folder}/low")
        inlay.activate(other, "low")
        new = rows(300, seed=1000)
        logits = host(**new).logits
        print(f"accuracy on 300 new rows: {(logits.argmax(-1) == new['labels']).float().mean().item():.2f}")
        print(f"a fresh host with the saved inlay gives the same logits: {torch.equal(other(**new).logits, logits)}")

    inlay.strip(host)
    same = all(torch.equal(tensor, host.state_dict()[name]) for name, tensor in before.items())
    print(f"the host is what it was, bit for bit: {same}")


if __name__ == "__main__":
    main()
