"""Compacter on T5: a sequence-to-sequence host learns with a fraction of its parameters.

    python examples/compacter_t5.py
    python examples/compacter_t5.py --host t5-small

The task is made up, so that nothing is downloaded: say the largest token of a row.
"""

import argparse

import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

import inlay


def rows(count: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, 20, (count, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.max(1, keepdim=True).values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="name or folder of a T5; without it a small random one")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    if chosen.host:
        host = AutoModelForSeq2SeqLM.from_pretrained(chosen.host)
    else:
        torch.set_num_threads(1)  # the quickest for so small a host
        host = AutoModelForSeq2SeqLM.from_config(config)
    size = sum(p.numel() for p in host.parameters())

    method = inlay.Compacter(n=4, size=16)
    print(inlay.count(host, method))  # before anything is built
    inlay.add(host, "largest", method)
    inlay.train(host, "largest")
    learning = [p for p in host.parameters() if p.requires_grad]
    print(f"\ntrainable: {sum(p.numel() for p in learning):,} of {size:,}")

    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    for step in range(161):
        loss = host(**rows(64, seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")

    host.eval()
    new = rows(200, seed=1000)
    said = host.generate(input_ids=new["input_ids"], max_new_tokens=1, do_sample=False)[:, 1:]
    print(f"largest token said in {(said == new['labels']).float().mean().item():.0%} of 200 new rows")


if __name__ == "__main__":
    main()
