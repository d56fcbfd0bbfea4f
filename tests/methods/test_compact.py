"""PHM, Compacter, LowRank, BitFit."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import inlay
from inlay.methods.phm import cheapest_order, contract, dense
from tests.hosts import FAMILIES, SMALL, batch, classifier, logits, shake, shaken, without_dropout

COMPACT = [inlay.PHM(size=4), inlay.PHM(size=4, rank=2, share_rule=True), inlay.Compacter(size=4), inlay.CompacterPlusPlus(size=8),
           inlay.Compacter(size=4, share_rule=False, rank=2), inlay.LowRank(size=4)]  # fmt: skip
T5_BASE = hf.T5Config(
    vocab_size=32100, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
)


def kron(rule: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return sum(torch.kron(a, s @ t) for a, s, t in zip(rule, left, right, strict=True))


def factors(n: int, rank: int, k: int, d: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, k), (n, n, n), (n, k // n, rank), (n, rank, d // n), (d,)]
    return [
        (torch.randn(s, generator=generator, dtype=torch.float64) * (s[-1] ** -0.5)).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize(("method", "norms", "published", "percent"), [
    (inlay.Houlsby(size=24), True, 1_855_104, 0.832),
    (inlay.Houlsby(size=24, sites=("attention",)), True, 951_360, 0.427),
    (inlay.AdapterDrop(size=24), True, 1_101_984, 0.494),
    (inlay.LowRank(), None, 161_664, 0.073),
    (inlay.PHM(n=12), None, 398_976, 0.179),
    (inlay.Compacter(), None, 161_728, 0.073),
    (inlay.CompacterPlusPlus(), None, 104_704, 0.047),
])  # fmt: skip
def test_counts_on_t5_base_equal_the_paper(
    method: inlay.Method, norms: bool | None, published: int, percent: float
) -> None:
    found = inlay.count(T5_BASE, method, norms=norms)
    assert found.trainable == published
    assert found.host == 222_882_048
    assert found.percent == pytest.approx(percent, abs=6e-4)
    assert found.by_site["norm"] == 47_616
    assert sum(found.by_site.values()) == published


@pytest.mark.parametrize(("method", "published", "weights"), [
    (inlay.Compacter(size=24), 57_088, "38,080"), (inlay.CompacterPlusPlus(size=24), 28_576, "19,072"),
])  # fmt: skip
def test_counts_on_bert_base(method: inlay.Method, published: int, weights: str) -> None:
    found = inlay.count(hf.BertConfig(), method, norms=False)
    assert found.trainable == published
    assert f"= {weights} " in found.closed_form  # 48 or 24 projections of k + d = 792, and n³ = 64


def test_count_of_a_host_equals_what_add_makes() -> None:
    host = classifier("t5")
    for i, method in enumerate([*COMPACT, inlay.BitFit(), inlay.Pfeiffer(size=4)]):
        head = inlay.Head(labels=3)
        expected = inlay.count(host, method, head=head)
        inlay.add(host, f"m{i}", method, head=head)
        assert expected.trainable == inlay.summary(host).rows[-1].parameters
        assert expected.host == inlay.summary(host).host_parameters
        assert "trainable" in str(expected)


def test_a_compacterplusplus_inlay_for_t5_base_is_small_on_disk(tmp_path: Path) -> None:
    with torch.device("meta"):
        host = hf.T5ForConditionalGeneration(T5_BASE)
    inlay.add(host, "a", inlay.CompacterPlusPlus())
    for tensor in host.inlays.all["a"].to_empty(device="cpu").state_dict().values():
        tensor.zero_()  # memory as it is found need not hold finite numbers
    folder = inlay.save(host, "a", tmp_path / "a")
    assert (folder / "weights.safetensors").stat().st_size <= 450 * 1024


@settings(max_examples=60, deadline=None)
@given(n=st.sampled_from([1, 2, 3, 4, 8, 12]), rank=st.integers(1, 3), wide=st.integers(1, 6), narrow=st.integers(1, 3),
       swap=st.booleans(), order=st.sampled_from(["narrow out", "narrow in", "dense", None]), seed=st.integers(0, 2**31))  # fmt: skip
def test_fast_equals_torch_kron_forward_and_gradients(
    n: int, rank: int, wide: int, narrow: int, swap: bool, order, seed: int
) -> None:
    k, d = (n * narrow, n * wide) if swap else (n * wide, n * narrow)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        x, rule, left, right, bias = given_tensors = factors(n, rank, k, d, dtype, seed)
        fast = contract(x, rule, left, right, bias, order)
        slow = x @ kron(rule, left, right) + bias
        weight = torch.randn(slow.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(
            dtype
        )
        scale = max(1.0, slow.abs().max().item())
        torch.testing.assert_close(fast, slow, atol=tolerance * scale, rtol=0)
        ours = torch.autograd.grad((fast * weight).sum(), given_tensors)
        wanted = torch.autograd.grad((slow * weight).sum(), given_tensors)
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=3 * tolerance * max(1.0, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize(("n", "rank", "k", "d"), list(itertools.product((2, 4, 8, 12), (1, 2), (48, 96), (24, 192))))
def test_bfloat16_within_its_precision(n: int, rank: int, k: int, d: int) -> None:
    tensors = factors(n, rank, k, d, torch.bfloat16)
    with torch.no_grad():
        exact = contract(*(t.double() for t in tensors))
        found = contract(*tensors).double()
    assert (found - exact).abs().max() <= 0.03 * exact.abs().max()


def test_phm_blocks_equal_torch_kron() -> None:
    rule, blocks = torch.randn(4, 4, 4), torch.randn(4, 3, 5)
    torch.testing.assert_close(dense(rule, blocks), sum(torch.kron(a, b) for a, b in zip(rule, blocks, strict=True)))


@pytest.mark.parametrize(("n", "rank", "k", "d", "order"), [
    (4, 1, 768, 24, "narrow out"), (4, 1, 24, 768, "narrow in"), (12, 1, 768, 48, "narrow out"), (8, 8, 768, 24, "dense"),
])  # fmt: skip
def test_the_order_of_contraction(n: int, rank: int, k: int, d: int, order: str) -> None:
    assert cheapest_order(n, rank, k, d) == order


def test_nothing_of_size_k_by_d_is_made() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        weights = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, Tensor) and t.dim() == 2:
                    self.weights = max(self.weights, min(t.shape) if sorted(t.shape) == [24, 768] else 0)
            return out

    for k, d in ((768, 24), (24, 768)):
        tensors = factors(4, 1, k, d, torch.float32)
        with Largest() as seen:
            contract(*tensors).sum().backward()
        assert seen.weights == 0
        with Largest() as seen:
            contract(*tensors, order="dense").sum().backward()
        assert seen.weights == 24  # the check sees it where it is made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", COMPACT, ids=lambda m: f"{m.kind}-{getattr(m, 'rank', '')}")
def test_compact_methods_on_every_family(family: str, method: inlay.Method, tmp_path: Path) -> None:
    host = classifier(family)
    bare = logits(host)
    inlay.add(host, "fresh", method.model_copy(update={"init": "identity"}))
    inlay.activate(host, "fresh")
    assert torch.equal(logits(host), bare)
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    assert not torch.allclose(wanted, bare, atol=1e-3)
    inlay.save(host, "a", tmp_path / "a")
    other = classifier(family)
    inlay.load(other, tmp_path / "a")
    inlay.activate(other, "a")
    assert torch.equal(logits(other), wanted)
    inlay.train(other, "a")
    other(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    missing = {name for name, p in other.inlays.named_parameters() if p.requires_grad and p.grad is None}
    assert all(":" in name and name.split(".")[3].startswith("norm") for name in missing), missing


def test_a_shared_rule_is_one_tensor_everywhere(tmp_path: Path) -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.Compacter(size=4))
    shake(host, "a")
    rules = [name for name, _ in host.named_parameters() if name.endswith("rule")]
    assert rules == ["inlays.all.a.shared.rule"]
    inlay.train(host, "a")
    host(**batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    rule = host.inlays["a"].shared.rule
    assert rule.grad is not None
    used = [m.borrowed[0].rule for m in host.modules() if type(m).__name__ == "KroneckerLinear"]
    assert len(used) == 16
    assert all(r is rule for r in used)
    tensors = host.inlays["a"].tensors()
    assert [key for key in tensors if key.endswith("rule")] == ["shared.rule"]
    host.eval()
    for twin in (copy.deepcopy(host), copy.deepcopy(host).double()):
        with torch.no_grad():
            twin.inlays["a"].shared.rule.mul_(2)
        assert not torch.allclose(logits(twin).float(), logits(host), atol=1e-4)
        assert all(
            m.borrowed[0] is twin.inlays["a"].shared for m in twin.modules() if type(m).__name__ == "KroneckerLinear"
        )
    inlay.save(host, "a", tmp_path / "a")
    other = classifier("t5")
    inlay.load(other, tmp_path / "a")
    assert torch.equal(other.inlays["a"].shared.rule, rule)


def test_the_gradient_of_a_shared_rule_is_the_sum_over_its_uses() -> None:
    host = classifier().double()
    inlay.add(host, "a", inlay.Compacter(size=4, leave_out=(0,)), norms=False)
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    rule = host.inlays["a"].shared.rule

    def loss(value: Tensor) -> Tensor:
        return torch.func.functional_call(host, {"inlays.all.a.shared.rule": value}, kwargs=batch(2, 4)).logits

    assert torch.autograd.gradcheck(loss, (rule,), eps=1e-6, atol=1e-7)


def test_one_site_may_have_another_size_or_none() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Compacter(size={"encoder.0.attention": 8, "default": 4}), norms=False)
    inlay.add(host, "b", inlay.Compacter(size=4, leave_out=("encoder.0.attention", 1)), norms=False)
    assert [part.down.out_features for part in host.inlays["a"].parts.values()] == [8, 4, 4, 4]
    assert host.inlays["b"].place_ids() == ["encoder.0.ffn.raw"]


def test_a_rule_that_does_not_learn() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Compacter(size=4, learn_rule=False))
    inlay.train(host, "a")
    assert not host.inlays["a"].shared.rule.requires_grad
    assert "shared" not in {
        k for k, v in inlay.count(host, inlay.Compacter(size=4, learn_rule=False)).by_site.items() if v
    }


def test_the_papers_start() -> None:
    host = classifier(hidden_size=64, num_attention_heads=2, intermediate_size=64)
    inlay.add(host, "c", inlay.Compacter(size=32, n=8))
    inlay.add(host, "p", inlay.PHM(size=32, n=8))
    shared = host.inlays["c"].shared.rule
    assert 0.5e-4 < shared.std() < 2e-4
    part = host.inlays["p"].parts["encoder:0:ffn:raw"].down
    assert 0.7e-2 < part.own.rule.std() < 1.3e-2
    bound = (2**0.5) * (6 / (8 + 4)) ** 0.5
    assert 0.9 * bound < part.blocks.abs().max() <= bound
    left = host.inlays["c"].parts["encoder:0:ffn:raw"].down.left
    assert left.abs().max() <= (2**0.5) * (6 / (8 + 1)) ** 0.5
    assert not part.bias.any()


@pytest.mark.parametrize(("method", "message"), [
    (inlay.Compacter(n=5), "n = 5 does not divide the hidden size 16. Nearest n that do: 2, 4, 8"),
    (inlay.Compacter(n=4, size=6), r"n = 4 does not divide the bottleneck 6 \(hidden size 16\). Nearest sizes that work: 4 and 8"),
    (inlay.PHM(n=8, size=2), "Nearest sizes that work: 8"),
])  # fmt: skip
def test_sizes_that_do_not_divide(method: inlay.Method, message: str) -> None:
    host = classifier()
    with pytest.raises(inlay.ConfigError, match=message):
        inlay.add(host, "a", method)
    assert not hasattr(host, "inlays")


@pytest.mark.parametrize("family", FAMILIES)
def test_bitfit(family: str, tmp_path: Path) -> None:
    host = classifier(family)
    bare = logits(host)
    for seed, name in enumerate("ab"):
        inlay.add(host, name, inlay.BitFit())
        inlay.activate(host, name)
        assert torch.equal(logits(host), bare)
        shake(host, name, seed)
    results = {}
    for name in "ab":
        inlay.activate(host, name)
        results[name] = logits(host)
    assert not torch.allclose(results["a"], results["b"], atol=1e-3)
    inlay.activate(host, None)
    assert torch.equal(logits(host), bare)
    inlay.save(host, "a", tmp_path / "a")
    assert all(key.startswith("bias.") and key.endswith(".bias") for key in host.inlays["a"].tensors())


def test_bitfit_equals_training_the_hosts_biases() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.BitFit())
    shake(host, "a")
    inlay.activate(host, "a")
    wanted = logits(host)
    twin = classifier()
    biases = {
        n for n, _ in twin.named_parameters() if n.endswith(".bias") and "pooler" not in n and "classifier" not in n
    }
    assert {f"bert.{k.removeprefix('bias.')}" for k in host.inlays["a"].tensors()} == biases
    for key, value in host.inlays["a"].tensors().items():
        twin.get_parameter(f"bert.{key.removeprefix('bias.')}").data.add_(value)
    torch.testing.assert_close(logits(twin), wanted, atol=1e-5, rtol=1e-4)


def test_bitfit_on_a_convolution() -> None:
    host = shaken(hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**SMALL, conv_kernel_size=3)))
    inlay.add(host, "a", inlay.BitFit())
    shake(host, "a")
    bias = host.inlays["a"].tensors()["bias.encoder.conv.conv.bias"]
    inlay.activate(host, "a")
    wanted = logits(host)
    host.deberta.encoder.conv.conv.bias.data.add_(bias)
    bias.zero_()
    torch.testing.assert_close(logits(host), wanted, atol=1e-5, rtol=1e-4)


def test_bitfit_on_t5_adds_to_linears_and_norms() -> None:
    host = classifier("t5")
    inlay.add(host, "a", inlay.BitFit())
    modules = {place.module for place in host.inlays.anatomy.of_kind("bias")}
    assert "transformer.encoder.block.0.layer.0.SelfAttention.q" in modules
    assert "transformer.decoder.final_layer_norm" in modules
    assert not any("classification_head" in name for name in modules)


@pytest.mark.parametrize("method", [*COMPACT, inlay.BitFit()], ids=lambda m: f"{m.kind}-{getattr(m, 'rank', '')}")
def test_gradients_against_finite_differences(method: inlay.Method) -> None:
    host = classifier(num_hidden_layers=1).double()
    inlay.add(host, "a", method, norms=False)
    shake(host, "a")
    inlay.train(host, "a")
    host.eval()
    names, values = zip(*host.inlays["a"].named_parameters(), strict=True)

    def result(*parameters: Tensor) -> Tensor:
        given = {f"inlays.all.a.{name}": value for name, value in zip(names, parameters, strict=True)}
        return torch.func.functional_call(host, given, kwargs=batch(2, 4)).logits

    assert torch.autograd.gradcheck(result, values, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "method", [inlay.BitFit(), inlay.LoRA(rank=2, targets=("linear",)), *COMPACT], ids=lambda m: m.kind
)
def test_training_mode_without_dropout_is_evaluation(method: inlay.Method) -> None:
    host = classifier()
    inlay.add(host, "a", method)
    shake(host, "a")
    inlay.train(host, "a")
    without_dropout(host)
    found = host(**batch(), labels=torch.tensor([0, 1, 1]))
    found.loss.backward()
    host.eval()
    torch.testing.assert_close(found.logits.detach(), logits(host), atol=1e-6, rtol=1e-5)
