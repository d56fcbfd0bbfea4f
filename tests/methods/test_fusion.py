"""AdapterFusion: the fast evaluation against a slow one written straight from the paper, and against `adapters`."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import inlay
from inlay.methods.base import BottleneckForm
from inlay.methods.bottleneck import Adapter
from inlay.methods.fusion import Choose, FusionLayer, cheapest_orders, pack
from tests.checkpoints.foreign.golden import GOLDEN, host_of, logits_of, pour
from tests.hosts import (
    FAMILIES,
    batch,
    checkpointing_on,
    classifier,
    fused_steps,
    logits,
    row,
    shake,
    spy_on,
    step_at,
    without_dropout,
)
from tests.methods.slow import slow_fusion
from tests.methods.ways import writer

WIDTH = 12


def some_layer(value: bool, dtype: torch.dtype, width: int = WIDTH) -> FusionLayer:
    layer = FusionLayer(width, width, value).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def some_members(count: int, dtype: torch.dtype, mixed: bool) -> list[Adapter]:
    members = []
    for n in range(count):
        size, activation, scale = (
            (1 + n % 3, ("relu", "gelu", "tanh")[n % 3], 1.0 + n % 2) if mixed else (3, "relu", 1.0)
        )
        adapter = Adapter(nn.Linear(WIDTH, size), nn.Linear(size, WIDTH), activation, scale).to(dtype)
        for parameter in adapter.parameters():
            nn.init.normal_(parameter, std=0.5)
        members.append(adapter)
    return members


@pytest.mark.parametrize("count", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(
    "ways", [("direct", "direct"), ("product", "direct"), ("folded", "folded"), ("direct", "folded")]
)
def test_fast_equals_the_paper_forward_and_gradients(count, mixed, value, dtype, tolerance, ways) -> None:
    layer, members = some_layer(value, dtype), some_members(count, dtype, mixed)
    x = torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True)
    packed = pack([m.form("normed") for m in members], WIDTH, layer.key.weight)
    folded = layer.premultiply(packed.rows, *ways)
    fast, weights = layer(x, lambda reads, standardised: x, packed, folded, Choose(temperature=1.5))
    wanted, attention = slow_fusion(layer, x, [m(x) for m in members], temperature=1.5)
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(fast, wanted, atol=tolerance * scale, rtol=0)
    torch.testing.assert_close(weights[..., torch.tensor(packed.order).argsort()], attention, atol=tolerance, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, dtype=dtype))
    leaves = [x, *layer.parameters(), *(p for m in members for p in m.parameters())]
    seed = torch.randn_like(wanted)
    ours = torch.autograd.grad((fast * seed).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((wanted * seed).sum(), leaves, allow_unused=True, retain_graph=True)
    for mine, reference in zip(ours, theirs, strict=True):
        reference = torch.zeros_like(mine) if reference is None else reference
        torch.testing.assert_close(
            mine, reference, atol=tolerance * max(1.0, reference.abs().max().item()) * 10, rtol=0
        )


def test_a_member_without_a_module_adds_nothing() -> None:
    layer, (member,) = some_layer(True, torch.float64), some_members(1, torch.float64, False)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    packed = pack([None, member.form("normed"), None], WIDTH, layer.key.weight)
    for ways in (("direct", "direct"), ("product", "direct"), ("folded", "folded")):
        folded = layer.premultiply(packed.rows, *ways)
        fast, weights = layer(x, lambda reads, standardised: x, packed, folded, Choose())
        wanted, attention = slow_fusion(layer, x, [torch.zeros_like(x), member(x), torch.zeros_like(x)])
        torch.testing.assert_close(fast, wanted)
        torch.testing.assert_close(weights[..., torch.tensor(packed.order).argsort()], attention)


def test_bfloat16_within_its_precision() -> None:
    layer, members = some_layer(True, torch.float32), some_members(8, torch.float32, True)
    x = torch.randn(2, 5, WIDTH)
    exact, _ = slow_fusion(layer, x, [m(x) for m in members])
    low = layer.bfloat16()
    packed = pack([m.bfloat16().form("normed") for m in members], WIDTH, low.key.weight)
    found, _ = low(
        x.bfloat16(),
        lambda reads, standardised: x.bfloat16(),
        packed,
        low.premultiply(packed.rows, "direct", "direct"),
        Choose(),
    )
    assert (found.float() - exact).abs().max() < 0.08 * exact.abs().max()


@pytest.mark.parametrize(("tokens", "rows", "ways"), [
    (512, 98, ("folded", "folded")), (512, 784, ("direct", "direct")), (4096, 784, ("folded", "folded")), (4096, 4000, ("product", "direct")),
])  # fmt: skip
def test_the_cheapest_order(tokens: int, rows: int, ways: tuple[str, str]) -> None:
    assert cheapest_orders(tokens, rows, 768) == ways


def test_scores_to_weights() -> None:
    scores = torch.randn(2, 5, 4)
    torch.manual_seed(2)
    found = Choose(temperature=2.0, dropout=0.5)(scores)
    torch.manual_seed(2)
    torch.testing.assert_close(found, F.dropout(scores / 2, 0.5).softmax(-1))
    found = Choose(pinned={1: 0.25, 3: 0.0})(scores)
    free = scores[..., [0, 2]].exp()
    shares = 0.75 * free / free.sum(-1, keepdim=True)
    fixed = torch.full((2, 5), 0.25)
    torch.testing.assert_close(found, torch.stack([shares[..., 0], fixed, shares[..., 1], 0 * fixed], -1))
    found = Choose(pinned={0: 0.5, 1: 0.5, 2: 0.0, 3: 0.0})(scores)
    assert torch.equal(found, torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(2, 5, 4))


def fused_host(family: str = "bert", methods: list[inlay.Method] | None = None, **settings) -> nn.Module:
    host = classifier(family)
    methods = methods or [inlay.Pfeiffer(size=4), inlay.Pfeiffer(size=3), inlay.Pfeiffer(size=4, activation="gelu")]
    names = []
    for seed, method in enumerate(methods):
        names.append(f"m{seed}")
        inlay.add(host, names[-1], method, norms=False)
        shake(host, names[-1], seed)
    inlay.add_fusion(host, "f", names, **settings)
    shake_fusion(host, "f")
    return host


def shake_fusion(host: nn.Module, name: str, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in host.inlays[name].parts.values():
        if isinstance(part, FusionLayer):
            for parameter in part.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


MIXED = [inlay.Houlsby(size=4), inlay.Pfeiffer(size=3), inlay.Parallel(size=2), inlay.Bapna(size=4), inlay.Compacter(size=4), inlay.LowRank(size=4),
         inlay.PHM(size=8)]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("query", ["normed", "output"])
def test_every_kind_of_member_on_every_family(family: str, query: str) -> None:
    """At one place, with h, r and the norm caught by hand, the whole step equals the paper's equations."""
    host = fused_host(family, MIXED, query=query).double()
    inlay.activate(host, "f")
    place = next(p for p in host.inlays.anatomy.of_kind("ffn") if p.layer == 1)
    caught = spy_on(host, place.id)
    logits(host)
    h, seen = caught["h"], caught["seen"]
    norm = None if place.norm is None else host.get_submodule(place.norm)
    stream = h + seen.residual
    normed = stream if norm is None else norm.forward(stream)
    inputs = {"output": h, "residual": seen.residual, "stream": stream, "normed": normed}
    with torch.no_grad():
        zs = []
        for n, method in enumerate(MIXED):
            part, _ = host.inlays.member_part(f"m{n}", place)
            zs.append(part(inputs[method.reads]))
        wanted, _ = slow_fusion(host.inlays["f"].part(place), normed if query == "normed" else h, zs)
    torch.testing.assert_close(caught["out"], h + wanted, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("family", ["bert", "roberta", "t5", "gpt2"])
@pytest.mark.parametrize(
    "case", ["fusion2_dynamic", "fusion2_static", "fusion5_dynamic", "fusion5_static", "fusion3_dynamic"]
)
def test_parity_with_adapters(family: str, case: str) -> None:
    folder, host = GOLDEN / family / case, host_of(family)
    members = sorted(p.name for p in folder.iterdir() if p.name.startswith("m") and p.is_dir())
    for member in members:
        factor = json.loads((folder / member / "adapter_config.json").read_text())["config"]["reduction_factor"]
        inlay.add(host, member, inlay.Pfeiffer(reduction=factor))
        with torch.no_grad():
            pour(host, member, folder / member)
    inlay.add_fusion(host, "f", members, value="dynamic" in case)
    ours = host.inlays["f"].tensors()
    stored = load_file(folder / "fusion" / "model_adapter_fusion.safetensors")
    for key, tensor in stored.items():
        found = re.search(
            r"(?:(encoder|decoder)\.)?(?:layer|block|h)\.(\d+)\..*\.(query|key|value)\.(weight|bias)", key
        )
        ours[f"{found[1] or 'decoder'}.{found[2]}.ffn.{found[3]}.{found[4]}"].copy_(tensor)
    assert len(stored) == len(ours)
    expected = load_file(folder / "expected.safetensors")
    inlay.activate(host, "f")
    torch.testing.assert_close(logits_of(host, family), expected["logits"], atol=1e-5, rtol=0)
    inputs = {k: v for k, v in load_file(GOLDEN / family / "inputs.safetensors").items() if k != "bare"}
    seen = inlay.fusion_activations(host, "f", [inputs], per_token=True).by_token[0]
    for layer, site in enumerate(host.inlays["f"].method.sites):
        torch.testing.assert_close(seen[site].float(), expected[f"attention.{layer}.output_adapter"], atol=1e-5, rtol=0)


def test_a_fusion_of_one_is_its_member() -> None:
    host = fused_host(methods=[inlay.Houlsby(size=4)])
    for part in host.inlays["f"].parts.values():
        part.value.weight.data.copy_(torch.eye(16))
    inlay.activate(host, "m0")
    wanted = logits(host)
    inlay.activate(host, "f")
    torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)


def test_permuting_members_permutes_the_attention() -> None:
    host = fused_host()
    inlay.add_fusion(host, "g", ["m2", "m0", "m1"])
    for key, part in host.inlays["g"].parts.items():
        part.load_state_dict(host.inlays["f"].parts[key].state_dict())
    results = {}
    for name in "fg":
        inlay.activate(host, name)
        results[name] = logits(host)
    torch.testing.assert_close(results["f"], results["g"])
    f, g = (inlay.fusion_activations(host, name, [batch()]) for name in "fg")
    for site in f.mean:
        torch.testing.assert_close(g.mean[site], f.mean[site][[2, 0, 1]])


def test_the_start_is_the_papers() -> None:
    layer = FusionLayer(64, 64, value=True)
    value = layer.value.weight.detach()
    assert torch.equal(value.diagonal(), torch.ones(64))
    off = value - torch.eye(64)
    assert 0 < off.abs().max() < 1e-5
    assert 0.018 < layer.query.weight.std() < 0.022
    assert sum(p.numel() for p in FusionLayer(768, 768, True).parameters()) * 12 == 21_252_096


def test_stage_two_trains_psi_and_the_head_only() -> None:
    host = classifier()
    for seed, name in enumerate(("mnli", "rte")):
        inlay.add(host, name, inlay.Pfeiffer(size=4), head=inlay.Head(labels=2 + seed))
        shake(host, name, seed)
    inlay.add_fusion(host, "rte-fused", ["mnli", "rte"])
    assert host.inlays["rte-fused"].head.labels == 3
    for key in ("head:pooler", "head:classifier"):  # the target's head is where it starts
        torch.testing.assert_close(
            host.inlays["rte-fused"].parts[key].state_dict(), host.inlays["rte"].parts[key].state_dict()
        )
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.train(host, "rte-fused")
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        loss = host(**batch(seed=step), labels=torch.tensor([0, 1, 2])).loss + inlay.penalty(host)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = host.state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed
    assert all(k.startswith("inlays.all.rte-fused.") for k in changed)
    assert any("value" in k for k in changed)
    assert any("head" in k for k in changed)


def test_penalty_is_the_papers_and_acts_in_the_same_step() -> None:
    host = fused_host(strength=0.5)
    assert inlay.penalty(host) == 0
    inlay.train(host, "f")
    wanted = sum(((torch.eye(16) - p.value.weight) ** 2).sum() for p in host.inlays["f"].parts.values())
    torch.testing.assert_close(inlay.penalty(host), 0.5 * wanted)
    inlay.penalty(host).backward()
    for part in host.inlays["f"].parts.values():
        torch.testing.assert_close(part.value.weight.grad, part.value.weight.detach() - torch.eye(16))
    for settings in ({"strength": 0.0}, {"value": False}):
        inlay.add_fusion(host, "none", ["m0"], **settings)
        inlay.activate(host, "none")
        assert inlay.penalty(host) == 0
        inlay.activate(host, None)
        inlay.remove(host, "none")


def test_evaluation_follows_every_change_of_a_parameter() -> None:
    host = fused_host()
    inlay.train(host, "f")
    host.eval()
    optimizer = torch.optim.SGD([p for p in host.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        host.zero_grad()
        result = host(**batch(), labels=torch.tensor([0, 1, 1]))
        torch.testing.assert_close(
            logits(host), result.logits.detach(), atol=1e-5, rtol=1e-4
        )  # kept matrices = fresh ones
        assert torch.equal(logits(host), logits(host))
        result.loss.backward()
        optimizer.step()
    with torch.no_grad():
        host.inlays["m1"].parts["encoder:1:ffn"].up.weight.mul_(3)
    cached = logits(host)
    torch.testing.assert_close(cached, host(**batch()).logits.detach(), atol=1e-5, rtol=1e-4)
    state = copy.deepcopy(host.inlays["f"].state_dict())
    shake_fusion(host, "f", seed=8)
    host.inlays["f"].load_state_dict(state)
    torch.testing.assert_close(logits(host), cached)


@pytest.mark.parametrize("how", ["fused optimizer", "assign", "inference mode", "autocast"])
def test_kept_matrices_never_go_stale(how: str) -> None:
    host = fused_host()
    inlay.train(host, "f")
    host.eval()
    optimizer = torch.optim.AdamW(
        [p for p in host.parameters() if p.requires_grad], lr=0.1, fused=how == "fused optimizer"
    )
    for _ in range(2):
        if how == "inference mode":
            with torch.inference_mode():
                host(**batch())
        elif how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                logits(host)
        else:
            logits(host)
        if how == "assign":
            changed = {k: v * 1.5 for k, v in host.inlays["f"].state_dict().items()}
            host.inlays["f"].load_state_dict(changed, assign=True)
            host.inlays["f"].requires_grad_(True)
        else:
            host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(logits(host), host(**batch()).logits.detach(), atol=1e-5, rtol=1e-4)


def test_own_norms_with_every_reading() -> None:
    """A fusion of one with V = I is its member, whatever the member reads through its own norm."""
    for reads in ("output", "residual", "stream", "normed"):
        host = fused_host(methods=[inlay.Bapna(size=4, reads=reads)])
        for part in host.inlays["f"].parts.values():
            part.value.weight.data.copy_(torch.eye(16))
        inlay.activate(host, "m0")
        wanted = logits(host)
        inlay.activate(host, "f")
        torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)


def test_bfloat16_and_autocast_in_both_orders() -> None:
    host = fused_host()
    inlay.train(host, "f")
    host.eval()
    exact = logits(host)
    for low in (lambda: host(**batch()).logits, lambda: logits(host)):  # in training's order, and folded
        with torch.autocast("cpu", torch.bfloat16):
            found = low().detach().float()
        torch.testing.assert_close(found, exact, atol=0.1, rtol=0.1)
    host.to(torch.bfloat16)
    torch.testing.assert_close(logits(host).float(), exact, atol=0.2, rtol=0.2)


def test_pruning_a_pruned_fusion_and_collapsing_unequal_branches() -> None:
    host = fused_host(methods=[inlay.Houlsby(size=4), inlay.Houlsby(size=3, sites=("ffn",))])
    report = inlay.collapse(host, "f", [batch()], name="plain")
    assert report.accuracy_fused is None
    inlay.activate(host, "plain")
    logits(host)
    inlay.activate(host, None)
    seen = inlay.fusion_activations(host, "f", [batch()])
    inlay.prune(host, "f", seen, name="g", keep=1, per_layer=True)
    again = inlay.fusion_activations(host, "g", [batch()])
    inlay.prune(host, "g", again, name="h", keep=1)
    inlay.activate(host, "h")
    logits(host)


def test_pruning_takes_away_the_places_where_nobody_is_left() -> None:
    host = fused_host(methods=[inlay.Houlsby(size=4), *[inlay.Houlsby(size=3, sites=("ffn",))] * 2])
    seen = inlay.fusion_activations(host, "f", [batch()])
    seen.mean = {site: torch.tensor([0.1, 0.5, 0.4]) for site in seen.mean}
    for per_layer in (False, True):  # of m1 and m2 none has a module after attention
        name = f"small-{per_layer}"
        inlay.prune(host, "f", seen, name=name, keep=2, per_layer=per_layer)
        assert host.inlays[name].method.sites == ("encoder.0.ffn", "encoder.1.ffn")
        inlay.activate(host, name)
        found = logits(host)
        inlay.activate(host, inlay.Fuse("f", off="m0"))
        torch.testing.assert_close(found, logits(host))
    inlay.collapse(host, "small-False", [batch()], name="plain")
    for name in ("m1", "m2"):
        inlay.leave_out(host, name, [0])
    inlay.collapse(host, "small-False", [batch()], name="one-layer-less")
    inlay.add_fusion(host, "g", ["m0", "m1"], leave_out=(1,))
    only = inlay.fusion_activations(host, "g", [batch()])
    only.mean = {site: torch.tensor([0.2, 0.8]) for site in only.mean}
    with pytest.raises(inlay.SetupError, match="nothing of 'g' would be left"):
        inlay.prune(host, "g", only, name="bad", keep=1)
    for options, message in [
        ({}, "one of keep"),
        ({"keep": 1, "threshold": 0.1}, "one of keep"),
        ({"keep": 0}, "at least 1"),
        ({"threshold": float("nan")}, "from 0 to 1"),
    ]:
        with pytest.raises(inlay.ConfigError, match=message):
            inlay.prune(host, "f", seen, name="bad", **options)
    assert "bad" not in host.inlays


def test_dropout_and_drops_of_members_do_not_act_inside_a_fusion() -> None:
    host = fused_host(methods=[inlay.Pfeiffer(size=4, dropout=0.5, drop_first=2), inlay.Pfeiffer(size=3, dropout=0.5)])
    inlay.activate(host, "f")
    wanted = logits(host)
    for name in ("f", "m0", "m1"):
        host.inlays[name].train()
    assert torch.equal(logits(host), wanted)


def test_train_eval_train_leaves_no_trace() -> None:
    losses = []
    for evaluate in (False, True):
        torch.manual_seed(0)
        host = fused_host(dropout=0.2)
        inlay.train(host, "f")
        optimizer = torch.optim.SGD([p for p in host.parameters() if p.requires_grad], lr=0.1)
        for _ in range(4):
            loss = host(**batch(), labels=torch.tensor([0, 1, 1])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                host.eval()
                logits(host)
                host.train()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_nothing_of_size_n_times_d_is_stored() -> None:
    """What autograd keeps grows by a few bottlenecks per member, not by a few hidden sizes."""
    kept = {}
    for count in (2, 12):
        host = fused_host(methods=[inlay.Pfeiffer(size=1)] * count)
        inlay.train(host, "f")
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            host(**batch()).logits.sum()
        kept[count] = sum(sizes)
    tokens, layers = 21, 2
    per_token_and_member = (kept[12] - kept[2]) / (tokens * layers * 10)
    assert per_token_and_member < 16  # less than one hidden size, where published code keeps several


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "opt"])
def test_gradient_checkpointing(family: str) -> None:
    host = fused_host(family, MIXED)
    inlay.train(host, "f")
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpointing_on(host)
        for module in host.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        host.config.attention_probs_dropout_prob = 0.0
        host.zero_grad()
        host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
        found.append([p.grad.clone() for p in host.inlays["f"].parameters() if p.grad is not None])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


@pytest.mark.long
def test_compile() -> None:
    torch._dynamo.reset()
    host = fused_host()
    compiled = torch.compile(host, backend="eager", fullgraph=True)
    for setup in ("f", "m0", inlay.Stack("m0", "f"), None, inlay.Fuse("f", off="m1"), inlay.Fuse("f", pin={"m1": 1})):
        inlay.activate(compiled, setup)
        torch.testing.assert_close(logits(compiled), logits(host), atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_in_other_setups_and_copies() -> None:
    host = fused_host()
    inlay.activate(host, inlay.Rows("f", "m0", inlay.Stack("m1", "f")))
    mixed = logits(host)
    for at, part in enumerate(("f", "m0", inlay.Stack("m1", "f"))):
        inlay.activate(host, part)
        torch.testing.assert_close(logits(host, row(batch(), at)), mixed[at : at + 1], atol=1e-5, rtol=1e-4)
    inlay.activate(host, "f")
    wanted = logits(host)
    twin = copy.deepcopy(host)
    shake(twin, "m0", 9)
    with inlay.activated(twin, "f"):
        assert not torch.allclose(logits(twin), wanted, atol=1e-4)
    assert torch.equal(logits(host), wanted)


def test_save_and_load_in_a_fresh_process(tmp_path: Path) -> None:
    host = fused_host(temperature=2.0)
    inlay.activate(host, "f")
    for name in ("m0", "m1", "m2", "f"):
        inlay.save(host, name, tmp_path / name)
    script = (
        "import torch, inlay; from tests.hosts import classifier, logits; torch.set_num_threads(1); host = classifier()\n"
        f"for name in ('m0', 'm1', 'm2', 'f'): inlay.load(host, {str(tmp_path)!r} + '/' + name)\n"
        "inlay.activate(host, 'f'); print(logits(host).tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert json.loads(run.stdout) == logits(host).tolist()


def test_other_members_are_refused_unless_told(tmp_path: Path) -> None:
    host = fused_host()
    for name in ("m0", "m1", "m2", "f"):
        inlay.save(host, name, tmp_path / name)
    other = classifier()
    inlay.load(other, tmp_path / "m0")
    with pytest.raises(inlay.CheckpointError, match=r"'m1' is not on this host(.|\n)*'m2' is not on this host"):
        inlay.load(other, tmp_path / "f")
    inlay.load(other, tmp_path / "m1")
    inlay.load(other, tmp_path / "m2")
    other.inlays["m1"].parts["encoder:0:ffn"].up.bias.data[0] += 1e-6
    with pytest.raises(inlay.CheckpointError, match="'m1' is not the one it was trained with"):
        inlay.load(other, tmp_path / "f")
    assert "f" not in other.inlays
    inlay.load(other, tmp_path / "f", any_members=True)


def test_members_under_other_names(tmp_path: Path) -> None:
    host = fused_host()
    seen = inlay.fusion_activations(host, "f", [batch()])
    inlay.prune(host, "f", seen, name="g", keep=2, per_layer=True)
    names = ("m0", "m1", "m2")
    for name in (*names, "f", "g"):
        inlay.save(host, name, tmp_path / name)
    wanted = {}
    for name in "fg":
        inlay.activate(host, name)
        wanted[name] = logits(host)
    for new in ({"m0": "a", "m1": "b", "m2": "c"}, {"m0": "m1", "m1": "m2", "m2": "m0"}):
        other = classifier()
        for old, name in new.items():
            inlay.load(other, tmp_path / old, name=name)
        for name in "fg":
            inlay.load(other, tmp_path / name)
            assert set(other.inlays[name].method.members) == {new[m] for m in host.inlays[name].method.members}
            inlay.activate(other, name)
            assert torch.equal(logits(other), wanted[name])
        for name in (*new.values(), "f"):  # and on, under the new names
            inlay.save(other, name, tmp_path / "again" / name)
        again = classifier()
        for name in (*new.values(), "f"):
            inlay.load(again, tmp_path / "again" / name)
        inlay.activate(again, "f")
        assert torch.equal(logits(again), wanted["f"])
    lacking = classifier()
    inlay.load(lacking, tmp_path / "m0", name="m1")  # it is m0 all the same, so m1 is missing
    inlay.load(lacking, tmp_path / "m2")
    with pytest.raises(inlay.CheckpointError, match=r"'m0' is not on this host(.|\n)*'m1' is not the one"):
        inlay.load(lacking, tmp_path / "f")


def test_subset_in_training_all_at_evaluation() -> None:
    host = fused_host(methods=[inlay.Pfeiffer(size=2)] * 5, subset=2)
    inlay.train(host, "f")
    drawn = set()
    for _ in range(60):
        logits(host)
        out = host.inlays["f"].draw.leaves_out({})
        assert len(out) == 3
        drawn.add(out)
    assert len(drawn) == 10  # every pair of five
    step = step_at(host, "encoder.0.ffn")
    assert step._pack(step._chosen()).rows.shape[0] == 2 * 2 + 2  # only theirs are computed
    host.eval()
    assert len(step._chosen()) == 5
    with torch.no_grad():
        wanted = host(**batch()).logits
    inlay.add_fusion(host, "whole", [f"m{n}" for n in range(5)])
    for key, part in host.inlays["whole"].parts.items():
        part.load_state_dict(host.inlays["f"].parts[key].state_dict())
    inlay.activate(host, "whole")
    assert torch.equal(logits(host), wanted)


@pytest.mark.parametrize("pinned", [{"m0": 0.0}, {"m0": 0.4}, {"m0": 0.0, "m1": 0.2}], ids=str)
def test_a_subset_is_of_the_members_that_are_not_pinned(pinned: dict[str, float]) -> None:
    """In each step the weights sum to 1: one free member, and those whose weight is fixed."""
    host = fused_host(methods=[inlay.Pfeiffer(size=2)] * 4, subset=1)
    inlay.train(host, inlay.Fuse("f", pin=pinned))
    step, drawn = step_at(host, "encoder.0.ffn"), set()
    for _ in range(40):
        logits(host)
        chosen = {step.names[n] for n in step._chosen()}
        assert set(pinned) < chosen
        assert len(chosen) == len(pinned) + 1
        drawn |= chosen
    assert drawn == {"m0", "m1", "m2", "m3"}
    host.eval()
    assert len(step._chosen()) == 4


def test_a_subset_beside_members_that_are_off_always_acts() -> None:
    host = fused_host(methods=[inlay.Pfeiffer(size=2)] * 2, subset=1)
    without_dropout(host)
    inlay.activate(host, None)
    bare = logits(host)
    inlay.train(host, inlay.Fuse("f", off=["m0"]))
    assert not any(torch.equal(logits(host), bare) for _ in range(20))


def test_leaving_out_layers() -> None:
    host = fused_host(leave_out=("encoder.1",))
    assert host.inlays["f"].method.sites == ("encoder.0.ffn",)
    inlay.activate(host, "f")
    assert step_at(host, "encoder.1.ffn") is None
    with pytest.raises(inlay.SetupError, match="every layer"):
        inlay.add_fusion(host, "g", ["m0"], leave_out=(0, 1))
    with pytest.raises(inlay.AnatomyError, match="no such layer"):
        inlay.add_fusion(host, "g", ["m0"], leave_out=(5,))


def fused_writer(*targets: str) -> nn.Module:
    """A T5 with a fusion of two LoRAs."""
    host = writer("t5")
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.LoRA(rank=2, targets=targets))
        shake(host, name, seed)
    inlay.add_fusion(host, "f", ["a", "b"])
    shake(host, "f", 5)
    return host


def test_keys_of_cross_attention_are_the_encoders_tokens() -> None:
    host = fused_writer("cross_q", "cross_k")
    for tokens in (4, 7):  # other than the encoder's, and as many
        labels = torch.randint(3, 50, (3, tokens))
        labels[0, 2:] = -100
        whole = batch() | {"labels": labels}
        found = inlay.fusion_activations(host, "f", [whole])
        assert found.tokens_seen["decoder.0.cross_k"] == int(whole["attention_mask"].sum())
        assert found.tokens_seen["decoder.0.cross_q"] == int((labels != -100).sum())


def test_the_output_layer_of_an_encoder_decoder_sees_what_is_written() -> None:
    host = fused_writer("q", "linear")
    labels = torch.randint(3, 50, (3, 7))  # as many as the encoder's
    labels[0, 2:] = -100
    found = inlay.fusion_activations(host, "f", [batch() | {"labels": labels}])
    assert found.tokens_seen["linear.lm_head"] == int((labels != -100).sum()) == 16
    assert found.tokens_seen["encoder.0.q"] == int(batch()["attention_mask"].sum()) == 18


def test_padding_of_what_is_written_may_be_told_by_its_mask() -> None:
    """Labels may be filled up with another number than the loss leaves out."""
    host = fused_writer("q")
    labels = torch.randint(3, 50, (3, 7))
    labels[0, 2:] = 0
    found = inlay.fusion_activations(host, "f", [batch() | {"labels": labels, "decoder_attention_mask": labels.sign()}])
    assert found.tokens_seen["decoder.0.q"] == 16
    assert found.tokens_seen["encoder.0.q"] == 18


@pytest.mark.parametrize("labels", [torch.ones(3, 2), torch.tensor([0, 2, 7]), torch.tensor([0, -100, 1])])
def test_activations_do_not_depend_on_labels(labels: torch.Tensor) -> None:
    """Several labels per text are no text that is written, and those of another task have no loss here."""
    host = fused_host("bart")
    bare = inlay.fusion_activations(host, "f", [batch()])
    found = inlay.fusion_activations(host, "f", [batch() | {"labels": labels}])
    assert found.tokens_seen == bare.tokens_seen
    assert all(torch.equal(found.mean[site], bare.mean[site]) for site in bare.mean)
    assert -100 not in found.by_label


def test_activations_count_real_tokens_only() -> None:
    host = fused_host()
    whole = inlay.fusion_activations(host, "f", [batch()], per_token=True)
    sums = {site: torch.zeros(3, dtype=torch.float64) for site in whole.mean}
    count = 0
    for at in range(3):
        length = int(batch()["attention_mask"][at].sum())
        alone = {k: v[:, :length] for k, v in row(batch(), at).items()}
        one = inlay.fusion_activations(host, "f", [alone], per_token=True)
        count += length
        for site in sums:
            sums[site] += one.mean[site] * length
            torch.testing.assert_close(
                one.by_token[0][site][0], whole.by_token[0][site][at, :length], atol=1e-5, rtol=1e-4
            )
    for site, total in sums.items():
        torch.testing.assert_close(whole.mean[site], total / count, atol=1e-6, rtol=1e-5)
        assert whole.tokens_seen[site] == count
        assert whole.mean[site].sum() == pytest.approx(1)


def test_activations_where_the_host_flattens_rows_and_tokens() -> None:
    host = fused_host("opt")
    found = inlay.fusion_activations(host, "f", [{"output_attentions": False, **batch()}], per_token=True)
    assert {tuple(weights.shape) for weights in found.by_token[0].values()} == {(3, 7, 3)}
    assert set(found.tokens_seen.values()) == {18}


def test_activations_per_label_and_over_batches() -> None:
    host = fused_host()
    batches = [batch(4, seed=s) | {"labels": torch.tensor([0, 1, 0, 1])} for s in range(3)]
    found = inlay.fusion_activations(host, "f", batches)
    assert set(found.by_label) == {0, 1}
    zeros = [{k: v[::2] for k, v in b.items()} for b in batches]
    only = inlay.fusion_activations(host, "f", zeros)
    for site in found.mean:
        torch.testing.assert_close(found.by_label[0][site], only.mean[site], atol=1e-6, rtol=1e-5)
    assert inlay.active(host) is None
    with pytest.raises(inlay.SetupError, match="not a fusion"):
        inlay.fusion_activations(host, "m0", batches)
    with pytest.raises(inlay.SetupError, match="at least one batch"):
        inlay.fusion_activations(host, "f", [])
    with pytest.raises(inlay.ConfigError, match="batches is a list"):
        inlay.fusion_activations(host, "f", batch())


@pytest.mark.parametrize("per_layer", [False, True])
def test_prune(per_layer: bool, tmp_path: Path) -> None:
    host = fused_host(methods=[inlay.Pfeiffer(size=2)] * 4)
    seen = inlay.fusion_activations(host, "f", [batch()])
    inlay.prune(host, "f", seen, name="small", keep=2, per_layer=per_layer)
    method = host.inlays["small"].method
    overall = seen.overall()
    best = set(sorted(overall, key=overall.get)[-2:])
    for site in method.sites:
        mine = seen.by_member(site)
        assert set(method.at(site)) == (set(sorted(mine, key=mine.get)[-2:]) if per_layer else best)
    inlay.activate(host, "small")
    pruned = logits(host)
    if not per_layer:  # the same as masking the others
        inlay.activate(host, inlay.Fuse("f", off=sorted(set(overall) - best)))
        torch.testing.assert_close(logits(host), pruned, atol=1e-5, rtol=1e-4)
    for name in (*method.members, "small"):
        inlay.save(host, name, tmp_path / name)
    other = classifier()
    for name in (*method.members, "small"):
        inlay.load(other, tmp_path / name)
    inlay.activate(other, "small")
    assert torch.equal(logits(other), pruned)
    inlay.train(other, "small")
    other(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    with pytest.raises(inlay.ConfigError, match="keep is 1.5"):
        inlay.prune(host, "f", seen, name="half", keep=1.5)  # type: ignore[arg-type]
    inlay.prune(host, "f", seen, name="above", threshold=0.25, per_layer=per_layer)
    for site in host.inlays["above"].method.sites:
        left = host.inlays["above"].method.at(site)
        weights = seen.by_member(site) if per_layer else overall
        assert all(weights[m] >= 0.25 for m in left)
        assert left


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("value", [True, False])
def test_collapse_is_exactly_the_fusion_at_its_mean_weights(family: str, value: bool, tmp_path: Path) -> None:
    host = fused_host(family, [inlay.Houlsby(size=4), inlay.Houlsby(size=3), inlay.Houlsby(size=6)], value=value)
    batches = [batch(seed=s) | {"labels": torch.tensor([0, 1, 1])} for s in range(2)]
    report = inlay.collapse(host, "f", batches, name="plain")
    assert 0 <= report.accuracy_fused <= 1
    assert 0 <= report.accuracy_collapsed <= 1
    for weights in report.weights.values():
        assert sum(weights.values()) == pytest.approx(1)
    inlay.activate(host, "f")
    for place, step in fused_steps(host).items():  # the same weights, forced at every token of the fusion
        step.pinned = report.weights[place]
    wanted = logits(host)
    inlay.activate(host, "plain")
    torch.testing.assert_close(logits(host), wanted, atol=1e-4, rtol=1e-3)
    inlay.save(host, "plain", tmp_path / "plain")
    other = classifier(family)
    inlay.load(other, tmp_path / "plain")
    inlay.activate(other, "plain")
    assert torch.equal(logits(other), logits(host))


@pytest.mark.parametrize("value", [True, False])
def test_collapse_by_hand(value: bool) -> None:
    """Each module of the plain inlay is Σ p_n V z_n, with the means p_n of the paper's attention over real tokens."""
    host = fused_host(methods=[inlay.Pfeiffer(size=4), inlay.Pfeiffer(size=3)], value=value).double()
    seen = inlay.fusion_activations(host, "f", [batch()], per_token=True).by_token[0]
    report = inlay.collapse(host, "f", [batch()], name="plain")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for site, weights in seen.items():
        p = weights[batch()["attention_mask"].bool()].mean(0)
        torch.testing.assert_close(torch.tensor(list(report.weights[site].values())).double(), p, atol=1e-6, rtol=0)
        place = host.inlays.anatomy.places[site]
        mixed = sum(report.weights[site][f"m{n}"] * host.inlays[f"m{n}"].part(place)(x) for n in range(2))
        layer = host.inlays["f"].part(place)
        wanted = mixed if layer.value is None else mixed @ layer.value.weight.T
        torch.testing.assert_close(host.inlays["plain"].part(place)(x), wanted, atol=1e-12, rtol=1e-10)


def test_collapse_tells_an_accuracy_only_where_there_is_one() -> None:
    host = fused_host(methods=[inlay.Pfeiffer(size=2)] * 2)
    inlay.activate(host, "f")
    right = logits(host).argmax(-1)
    right[2] = -100  # not labelled
    assert inlay.collapse(host, "f", [batch() | {"labels": right}], name="plain").accuracy_fused == 1
    inlay.add_fusion(host, "score", ["m0", "m1"], head=inlay.Head(labels=1))
    for labels in (torch.tensor([0, 3, 5]), torch.tensor([2])):  # numbers; the right one of three choices
        report = inlay.collapse(host, "score", [batch() | {"labels": labels}], name=f"plain-{len(labels)}")
        assert report.accuracy_fused is report.accuracy_collapsed is None


def test_collapse_of_unlike_members_is_refused() -> None:
    host = fused_host(methods=[inlay.Houlsby(size=2), inlay.Pfeiffer(size=2)])
    with pytest.raises(inlay.SetupError, match="read and act differently"):
        inlay.collapse(host, "f", [batch()], name="plain")
    for method in (inlay.LoRA(rank=2), inlay.Bapna(size=2)):
        host = fused_host(methods=[method, method])
        inlay.activate(host, "f")
        with pytest.raises(inlay.SetupError, match="LoRA or have norms of their own"):
            inlay.collapse(host, "f", [batch()], name="plain")
        assert inlay.active(host) == "f"
        assert "plain" not in host.inlays


def test_forcing_and_masking() -> None:
    host = fused_host()
    inlay.activate(host, inlay.Fuse("f", pin={"m1": 1.0}))
    only = logits(host)
    inlay.activate(host, inlay.Fuse("f", off=["m0", "m2"]))
    torch.testing.assert_close(logits(host), only)
    inlay.activate(host, inlay.Fuse("f", pin={"m0": 0.5}))
    step = step_at(host, "encoder.0.ffn")
    step.record = []
    logits(host)
    weights = torch.cat(step.record)
    torch.testing.assert_close(weights[..., 0], torch.full(weights.shape[:-1], 0.5))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    inlay.activate(host, inlay.Fuse("f"))
    plain = logits(host)
    inlay.activate(host, "f")
    assert torch.equal(logits(host), plain)
    for make, message in [
        (lambda: inlay.Fuse("f", off=["m9"]), "not a member of 'f'"),
        (lambda: inlay.Fuse("m0"), "'m0' is a pfeiffer inlay"),
        (lambda: inlay.Fuse("f", off=["m0", "m1", "m2"]), "must sum to 1"),
        (lambda: inlay.Fuse("f", pin={"m0": 0.7, "m1": 0.7}), "sum to at most 1"),
        (lambda: inlay.Fuse("f", off=["m0"], pin={"m0": 0.2}), "once"),
    ]:
        with pytest.raises(inlay.SetupError, match=message):
            inlay.activate(host, make())


def test_bad_fusions() -> None:
    host = fused_host()
    inlay.add(host, "attention", inlay.Houlsby(size=2, sites=("attention",)))
    inlay.add(host, "biases", inlay.BitFit())
    for members, message in [
        ([], "at least one member"),
        (["m0", "m0"], "m0 stands twice"),
        (["m0", "nobody"], "no inlay named 'nobody'"),
        (["f", "m0"], "'f' is itself a fusion"),
        (["m0", "attention"], "no place in common: m0 at ffn; attention at attention"),
        (["biases"], "has no bottleneck"),
        (["m0", 1], "list of names, got 1"),
    ]:
        with pytest.raises(inlay.InlayError, match=message):
            inlay.add_fusion(host, "g", members)
    with pytest.raises(inlay.ConfigError, match="subset. is 4, but there are 3"):
        inlay.add_fusion(host, "g", ["m0", "m1", "m2"], subset=4)
    with pytest.raises(inlay.NamingError, match="'x' is not among the members"):
        inlay.add_fusion(host, "g", ["m0"], target="x")
    with pytest.raises(inlay.NamingError, match="no inlays yet"):
        inlay.add_fusion(classifier(), "g", ["m0"])
    with pytest.raises(inlay.SetupError, match="'m1' is a member of the fusion 'f'"):
        inlay.remove(host, "m1")
    assert "g" not in host.inlays


def test_a_fusion_with_a_head_of_its_own_does_not_act_in_the_hosts() -> None:
    """The host's head does not act beside it, so that a layer of the fusion there could learn nothing."""
    host = classifier("roberta")
    for name in "ab":
        inlay.add(host, name, inlay.LoRA(rank=2, targets=("q", "linear.classifier.dense")))
    with pytest.raises(inlay.SetupError, match=r"linear.classifier.dense would change the host's head"):
        inlay.add_fusion(host, "f", ["a", "b"], head=inlay.Head(labels=3))
    assert "f" not in host.inlays
    inlay.add_fusion(host, "f", ["a", "b"], head=inlay.Head(labels=3), sites=["q"])
    inlay.add_fusion(host, "headless", ["a", "b"])
    assert "linear.classifier.dense" in host.inlays["headless"].method.sites


def test_one_place_or_layer_may_stand_alone() -> None:
    host = classifier("bert")
    for name in "ab":
        inlay.add(host, name, inlay.Houlsby(size=2))
    inlay.add_fusion(host, "f", ["a", "b"], sites="ffn")
    inlay.add_fusion(host, "g", ["a", "b"], leave_out=1)
    assert host.inlays["f"].method.sites == ("encoder.0.ffn", "encoder.1.ffn")
    assert host.inlays["g"].method.sites == ("encoder.0.attention", "encoder.0.ffn")
    inlay.leave_out(host, "a", 1)
    inlay.leave_out(host, "b", "encoder.1")
    assert host.inlays["a"].place_ids() == host.inlays["b"].place_ids() == ["encoder.0.attention", "encoder.0.ffn"]


def test_own_norms_of_members_are_not_lost_in_silence() -> None:
    host = classifier()
    inlay.add(host, "c", inlay.Compacter(size=4))
    shake(host, "c")
    with pytest.warns(UserWarning, match="own norms do not act"):
        inlay.add_fusion(host, "f", ["c"])
    inlay.add_fusion(host, "g", ["c"], norms=True)
    for key, part in host.inlays["g"].parts.items():
        if key.startswith("norm"):
            torch.testing.assert_close(part.state_dict(), host.inlays["c"].parts[key].state_dict())


def test_plots(tmp_path: Path) -> None:
    names = [f"a-task-with-a-long-name-{n}" for n in range(20)]
    one = inlay.FusionActivations(
        "fused", tuple(names), {f"encoder.{i}.ffn": torch.rand(20).softmax(0) for i in range(12)}, {}
    )
    for png, svg in (
        inlay.plot_fusion(one, tmp_path / "one"),
        inlay.plot_fusion({"rte": one, "cb": one}, tmp_path / "many"),
    ):
        assert png.read_bytes().startswith(b"\x89PNG")
        assert svg.read_text().count("<use ") > 20 * 12  # a number in every cell
    small = inlay.FusionActivations("a-name-that-is-wider-than-the-table", ("a",), {"encoder.0.ffn": torch.ones(1)}, {})
    png, _ = inlay.plot_fusion(small, tmp_path / "small")
    edges = imread(png)[..., :3]
    assert all(bool((edge == 1).all()) for edge in (edges[:, 0], edges[:, -1], edges[0], edges[-1]))  # nothing cut off


def test_forms_are_the_modules_themselves() -> None:
    host = fused_host(methods=MIXED)
    x = torch.randn(2, 3, 16)
    for n in range(len(MIXED)):
        part, reads = host.inlays.member_part(f"m{n}", host.inlays.anatomy.places["encoder.1.ffn"])
        form: BottleneckForm = part.form(reads)
        given = F.layer_norm(x, (16,)) if form.standardised else x
        by_form = part.act(given @ form.down.T + form.down_bias) @ form.up + form.up_bias
        torch.testing.assert_close(by_form, part(x), atol=1e-5, rtol=1e-4)
