"""The README's ten lines as a program: two inlays and a fusion on one host, which stays as it is.

python examples/ten_lines.py
python examples/ten_lines.py --host bert-base-uncased
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

import inlay

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--host", help="name or folder of a text classifier; without it a small random one")
chosen = parser.parse_args()

torch.manual_seed(0)
if chosen.host:
    host = AutoModelForSequenceClassification.from_pretrained(chosen.host)
else:
    torch.set_num_threads(1)  # the quickest for so small a host
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    host = AutoModelForSequenceClassification.from_config(config)
before = {name: tensor.clone() for name, tensor in host.state_dict().items()}

inlay.add(host, "mnli", inlay.Pfeiffer(reduction=16), head=inlay.Head(labels=["yes", "maybe", "no"]))
inlay.add(host, "rte", inlay.Pfeiffer(reduction=16), head=inlay.Head(labels=["yes", "no"]))

inlay.train(host, "rte")  # only "rte" and its head require gradients
ids, labels = torch.randint(5, 50, (16, 12)), torch.randint(0, 2, (16,))
optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=1e-3)
for _step in range(5):  # stands for any training loop: Trainer, accelerate, your own
    host(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with tempfile.TemporaryDirectory() as folder:
    inlay.save(host, "rte", f"{folder}/rte")
    inlay.load(host, f"{folder}/rte", name="rte-again")

inlay.add_fusion(host, "rte-fused", members=["mnli", "rte"])
inlay.train(host, "rte-fused")  # the mixing and its head learn; host and members stay as they are
print(inlay.summary(host))

inlay.strip(host)
after = host.state_dict()
same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
print(f"the host is what it was, bit for bit: {same}")
