"""Learned routing: a Switch-like gate over a mixture's modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import inlay
from inlay.host.plan import Slot
from inlay.methods.mixture import Alternatives, Gate
from tests.hosts import batch, classifier, logits, shake
from tests.methods import ways
from tests.methods.ways import writer

METHODS = {
    "pfeiffer": inlay.Pfeiffer(size=4),
    "lora": inlay.LoRA(rank=2),
    "compacter": inlay.Compacter(size=4),
    "lowrank": inlay.LowRank(size=4),
    "ia3": inlay.IA3(),
}
IN_FRONT = {"prefix": inlay.Prefix(length=3), "prompt": inlay.Prompt(length=3)}


def learned(method: inlay.Method, by: str = "token", **fields: object) -> inlay.Mixture:
    return inlay.Mixture(method, modules=3, share=None, routing="learned", by=by, **fields)


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "modernbert"])
@pytest.mark.parametrize("name", METHODS)
def test_by_token(family: str, name: str, tmp_path: Path) -> None:
    method = learned(METHODS[name])
    ways.acts_and_comes_off(family, method)
    ways.trains_without_touching_the_host(family, method)
    ways.saves_and_loads(family, method, tmp_path)
    ways.deepcopy_is_independent(family, method)
    ways.padded_row_is_the_row_alone(family, method)
    if name != "compacter":
        ways.rows_are_each_row_alone(family, method, inlay.LoRA(rank=2))


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("name", [*METHODS, *IN_FRONT])
def test_by_text(family: str, name: str, tmp_path: Path) -> None:
    method = learned((METHODS | IN_FRONT)[name], by="text")
    ways.acts_and_comes_off(family, method)
    ways.trains_without_touching_the_host(family, method)
    ways.saves_and_loads(family, method, tmp_path)
    ways.padded_row_is_the_row_alone(family, method)


@pytest.mark.parametrize("by", ["token", "text"])
def test_the_formula_by_hand(by: str) -> None:
    torch.manual_seed(0)
    maps = [torch.nn.Linear(4, 6) for _ in range(3)]
    choice = Alternatives(maps, Gate(4, 3, by)).train()
    choice.gate.linear.weight.data.normal_()
    x = torch.randn(5, 7, 4)
    out = choice(x)
    chosen, probabilities = [], []
    for b in range(5):
        for t in range(7):
            read = x[b, t] if by == "token" else x[b].mean(0)
            p = (choice.gate.linear.weight @ read).softmax(0)
            c = int(p.argmax())
            torch.testing.assert_close(out[b, t], p[c] * maps[c](x[b, t]))
            chosen.append(c)
            probabilities.append(p)
    share = torch.bincount(torch.tensor(chosen), minlength=3) / 35
    balance = 3 * (share * torch.stack(probabilities).mean(0)).sum()
    torch.testing.assert_close(choice.gate.balance.value, balance)
    assert len(set(chosen)) > 1


def test_the_penalty_reaches_the_gates() -> None:
    host = classifier()
    inlay.add(host, "m", learned(inlay.Pfeiffer(size=4), balance=0.5))
    shake(host, "m")
    inlay.train(host, "m")
    assert host.inlays["m"].method.compared_passes() == 1
    host(**batch(), labels=torch.tensor([0, 1, 1]))
    penalty = inlay.penalty(host)
    gates = [choice.gate for choice in host.inlays["m"].modules() if isinstance(choice, Alternatives)]
    assert len(gates) == 4  # two layers, down and up
    torch.testing.assert_close(penalty, 0.5 * sum(gate.balance.value for gate in gates))
    penalty.backward()
    assert all(gate.linear.weight.grad.abs().sum() > 0 for gate in gates)
    host.eval()
    logits(host)
    assert inlay.penalty(host) == 0


def test_a_layer_that_a_step_leaves_out_has_no_penalty() -> None:
    host = classifier()
    inlay.add(host, "m", learned(inlay.Pfeiffer(size=4, drop_first=1)))
    inlay.train(host, "m")
    found = set()
    for seed in range(6):  # a penalty of an earlier step has no graph any more
        torch.manual_seed(seed)
        (host(**batch()).logits.sum() + inlay.penalty(host)).backward()
        gates = [gate for gate in host.inlays["m"].modules() if isinstance(gate, Gate)]
        found.add(sum(gate.balance.value is not None for gate in gates))
    assert found == {2, 4}


def test_it_learns_to_use_several_modules() -> None:
    torch.manual_seed(0)
    choice = Alternatives([torch.nn.Linear(4, 4) for _ in range(4)], Gate(4, 4, "token")).train()
    choice.gate.linear.weight.data[0] = 3.0  # begins with one module for half of all tokens and hardly balances
    x = torch.randn(64, 8, 4).abs()
    optimizer = torch.optim.Adam(choice.gate.parameters(), lr=0.05)
    used = []
    for _ in range(60):
        choice(x)
        used.append(choice.gate.balance.value.item())
        choice.gate.balance.value.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert used[0] > 3.5
    assert used[-1] < 1.5


def test_generation_and_merging() -> None:
    host = writer("gpt2")
    inlay.add(host, "m", learned(inlay.LoRA(rank=2)))
    shake(host, "m")
    inlay.activate(host, "m")
    ids = batch()["input_ids"].flip(1)
    mask = batch()["attention_mask"].flip(1)
    texts = [
        host.generate(input_ids=ids, attention_mask=mask, use_cache=c, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        for c in (True, False)
    ]  # fmt: skip
    assert torch.equal(*texts)
    with inlay.routing(host, "m", "merged"):
        mean = logits(host)
    inlay.merge(host, "m")
    torch.testing.assert_close(logits(host), mean)
    assert host.inlays["m"].method == inlay.LoRA(rank=2)
    inlay.add(host, "r", inlay.Mixture(inlay.LoRA(rank=2)))
    with pytest.raises(inlay.ConfigError, match="no gate"), inlay.routing(host, "r", "learned"):
        pass


def test_bad_settings() -> None:
    with pytest.raises(inlay.ConfigError, match="routing"):
        inlay.Mixture(inlay.LoRA(), routing="clever")
    with pytest.raises(inlay.ConfigError, match="by='text'"):
        inlay.add(classifier(), "a", learned(inlay.Prefix(length=2)))
    with pytest.raises(inlay.ConfigError, match="by='token'"):
        inlay.add(classifier("gpt2"), "a", learned(inlay.LoRA(), by="text"))
    host = classifier()
    inlay.add(host, "a", learned(inlay.LoRA(rank=2), by="text"))
    inlay.activate(host, inlay.Rows("a", None, "a"))
    with pytest.raises(inlay.SetupError, match="cannot act in Rows"):
        logits(host)


def test_a_long_text_in_float16_is_not_infinite() -> None:
    torch.manual_seed(0)
    gate = Gate(4, 3, "text")
    gate.linear.weight.data.normal_(std=1e-2)
    x = 100 + 100 * torch.rand(2, 1000, 4)  # the sum over tokens is above 65,504
    mask = torch.ones(2, 1000, dtype=torch.long)
    gate.real = Slot()
    gate.real.put(mask)
    maps = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    exact = gate.route(x, maps)
    half = gate.half().route(x.half(), maps)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), exact, atol=0.5, rtol=1e-2)
