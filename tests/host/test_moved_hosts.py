"""Hosts whose weights are elsewhere, packed, or replaced, and what transformers saves of a host with inlays."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import inlay
from tests.hosts import CONFIGS, batch, classifier, logits, shake, shaken


def writer() -> hf.PreTrainedModel:
    return shaken(hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]()))


def offloaded(host: hf.PreTrainedModel) -> hf.PreTrainedModel:
    cpu_offload(host, execution_device=torch.device("cpu"))
    assert any(p.is_meta for p in host.parameters())
    return host


METHODS = {
    "pfeiffer": inlay.Pfeiffer(size=4),
    "compacter": inlay.Compacter(size=4),
    "lora": inlay.LoRA(rank=2),
    "ia3": inlay.IA3(),
    "bitfit": inlay.BitFit(),
    "prefix": inlay.Prefix(length=3),
    "prompt": inlay.Prompt(length=3, init="vocabulary"),
}


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("name", METHODS)
def test_an_offloaded_host_has_the_same_answers(family: str, name: str, tmp_path: Path) -> None:
    hosts = [classifier() if family == "bert" else writer() for _ in range(2)]
    hosts[1].load_state_dict(hosts[0].state_dict())
    offloaded(hosts[1])
    for host in hosts:
        torch.manual_seed(1)
        inlay.add(
            host, "a", METHODS[name], norms=family == "bert", head=inlay.Head(labels=3) if family == "bert" else None
        )
        inlay.activate(host, "a")
        assert not any(p.is_meta for p in host.inlays["a"].parameters())
    here, there = ({k: v.clone() for k, v in host.inlays["a"].tensors().items()} for host in hosts)
    assert all(torch.equal(here[key], there[key]) for key in here)
    for host in hosts:
        shake(host, "a")
    torch.testing.assert_close(logits(hosts[1]), logits(hosts[0]), atol=0, rtol=0)
    inlay.save(hosts[1], "a", tmp_path / "a")
    inlay.load(hosts[1], tmp_path / "a", name="again")
    inlay.activate(hosts[1], "again")
    torch.testing.assert_close(logits(hosts[1]), logits(hosts[0]), atol=0, rtol=0)


def test_a_copied_head_is_compared_with_an_offloaded_hosts(tmp_path: Path) -> None:
    host = offloaded(classifier())
    inlay.add(host, "a", inlay.LoRA(rank=2), head=inlay.Head())
    inlay.export(host, "a", tmp_path / "a", "peft")
    other = classifier()
    inlay.load(other, tmp_path / "a")
    for each in (host, other):
        inlay.activate(each, "a")
    assert torch.equal(logits(other), logits(host))


def test_inlays_that_were_offloaded_with_their_host_are_not_read(tmp_path: Path) -> None:
    """A mean of them had computed what the first of them does."""
    host = classifier()
    for name in "ab":
        inlay.add(host, name, inlay.Pfeiffer(size=2))
        shake(host, name, ord(name))
    inlay.activate(host, "a")
    before = logits(host)
    offloaded(host)
    assert torch.equal(logits(host), before)
    with pytest.raises(inlay.SetupError, match="'a' cannot be read"):
        inlay.average(host, ["a", "b"], name="mean")
    with pytest.raises(inlay.SetupError, match="'a' cannot be read"):
        inlay.save(host, "a", tmp_path / "a")
    assert "mean" not in host.inlays
    assert not (tmp_path / "a").exists()


def test_what_needs_the_weights_of_an_offloaded_host_is_refused() -> None:
    host = offloaded(classifier())
    with pytest.raises(inlay.SetupError, match="said changes the host's weights, and those of this host are elsewhere"):
        inlay.add(host, "s", inlay.SAID(d=10))
    inlay.add(host, "a", inlay.LoRA(rank=2))
    with pytest.raises(inlay.SetupError, match=r"cannot be folded: its weight is elsewhere"):
        inlay.fold(host, "a")


class Packed(nn.Linear):
    """A linear map as 4-bit libraries keep it: a column of bytes, and the sizes beside it."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        self.whole = whole.weight.detach().clone()
        self.weight = nn.Parameter(torch.zeros(self.whole.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.whole)


@pytest.mark.parametrize("name", METHODS)
def test_a_host_with_packed_weights_acts_as_the_whole_one(name: str) -> None:
    whole = writer()
    packed = copy.deepcopy(whole)
    for module in list(packed.model.layers.modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                setattr(module, child, Packed(linear))
    for host in (whole, packed):
        torch.manual_seed(1)
        inlay.add(host, "a", METHODS[name])
        shake(host, "a")
        inlay.activate(host, "a")
    assert packed.inlays["a"].tensors().keys() == whole.inlays["a"].tensors().keys()
    torch.testing.assert_close(logits(packed), logits(whole), atol=0, rtol=0)


class Coded(Tensor):
    """A weight as torchao keeps it: a floating-point tensor of a class of its own, which can do little."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, dtype: torch.dtype) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.codes.to(x.dtype) / 127, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Coded(args[0].codes, args[0].dtype)
        raise NotImplementedError(f"Coded has no {function}")


def coded(host: hf.PreTrainedModel, *, head: bool = False) -> hf.PreTrainedModel:
    for name, module in host.named_modules():
        if type(module) is nn.Linear and (head or name != "lm_head"):
            codes = Coded((module.weight.detach() * 127).round().to(torch.int8), module.weight.dtype)
            module.weight = nn.Parameter(codes, requires_grad=False)
    return host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_an_inlay_of_a_host_with_coded_weights_trains_and_is_kept(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    host = coded(writer().to(dtype))
    before = logits(host)
    inlay.add(host, "a", METHODS[name])
    shake(host, "a", std=0.1)
    inlay.train(host, "a")
    host(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert all(p.grad is not None for p in host.inlays["a"].parameters())
    after = logits(host.eval())
    assert not torch.equal(after, before)
    inlay.save(host, "a", tmp_path / "a")
    inlay.load(host, tmp_path / "a", name="again")
    inlay.train(host, "again")
    assert torch.equal(logits(host.eval()), after) or dtype == torch.bfloat16


def test_what_would_change_coded_weights_is_refused() -> None:
    host = coded(writer(), head=True)
    inlay.add(host, "a", inlay.LoRA(rank=2))
    with pytest.raises(inlay.SetupError, match=r"cannot be folded: its weight is quantised \(Coded"):
        inlay.fold(host, "a")
    with pytest.raises(
        inlay.SetupError, match=r"said changes the host's weights, and those .* are quantised: layers\.0"
    ):
        inlay.add(host, "s", inlay.SAID(d=10))
    with pytest.raises(inlay.ConfigError, match="the head of this LlamaForCausalLM is quantised"):
        inlay.add(host, "h", inlay.LoRA(rank=2), head=inlay.Head())


def test_packed_weights_are_not_changed_by_half() -> None:
    """SAID would have moved the norms and embeddings alone."""
    host = writer()
    host.model.layers[0].mlp.down_proj = Packed(host.model.layers[0].mlp.down_proj)
    with pytest.raises(inlay.SetupError, match=r"quantised: layers\.0\.mlp\.down_proj\.weight\. Load it without"):
        inlay.add(host, "s", inlay.SAID(d=10))


def test_a_host_that_was_quantised_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = torch.ao.quantization.quantize_dynamic(classifier(), {nn.Linear}, dtype=torch.qint8).eval()
    before = logits(host)
    for name, method in (("a", inlay.LoRA(rank=2)), ("b", inlay.Pfeiffer(size=4)), ("c", inlay.IA3())):
        inlay.add(host, name, method)
    inlay.activate(host, inlay.Stack("a", "c"))
    assert torch.equal(logits(host), before), "fresh ones change nothing"
    for name in "abc":
        shake(host, name)
        inlay.activate(host, name)
        assert not torch.equal(logits(host), before)


@pytest.mark.parametrize("head", [None, inlay.Head()])
def test_a_resized_vocabulary_leaves_nothing_that_acts_in_silence(head: inlay.Head | None) -> None:
    host = writer()
    inlay.add(host, "a", inlay.LoRA(rank=2, targets=("q",) if head else ("linear",)), head=head)
    inlay.add(host, "b", inlay.LoRA(rank=2))
    for name in "ab":
        shake(host, name)
    inlay.activate(host, "a")
    host.resize_token_embeddings(host.config.vocab_size + 4, mean_resizing=False)
    with pytest.raises(inlay.SetupError, match=r"lm_head stands where another module stood .*resize_token_embeddings"):
        host(**batch())
    with pytest.raises(inlay.SetupError, match="lm_head stands where another module stood"):
        inlay.activate(host, "a")
    inlay.activate(host, "b")
    with_b = logits(host)
    with inlay.activated(host, None):
        assert not torch.equal(logits(host), with_b)
    inlay.remove(host, "a")
    assert torch.equal(logits(host), with_b)


def test_prompts_read_the_words_of_a_resized_vocabulary() -> None:
    host = classifier()
    inlay.add(host, "p", inlay.Prompt(length=2))
    inlay.activate(host, "p")
    host.resize_token_embeddings(host.config.vocab_size + 4, mean_resizing=False)
    given = batch() | {"input_ids": torch.full_like(batch()["input_ids"], host.config.vocab_size - 1)}
    with torch.no_grad():
        first = host(**given).logits
        host.get_input_embeddings().weight[-1] += 1
        assert not torch.equal(host(**given).logits, first)


def test_what_is_saved_of_a_host_is_the_host(tmp_path: Path) -> None:
    host = classifier(num_labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=("x", "y", "z")))
    inlay.activate(host, "a")
    host.save_pretrained(tmp_path / "host")
    assert host.config.id2label == {0: "x", 1: "y", 2: "z"}, "it still shows what is active"
    assert host.num_labels == 3
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "host")
    assert again.config.id2label == {0: "no", 1: "yes"}
    with inlay.activated(host, None):
        assert torch.equal(logits(again.eval()), logits(host))
    for same in (copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        same.classifier.weight.data.zero_()
        same.save_pretrained(tmp_path / "same")
        assert same.config.id2label == {0: "x", 1: "y", 2: "z"}
        saved = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "same")
        assert saved.num_labels == 2
        assert not saved.classifier.weight.any(), "a copy saves itself"
    inlay.activate(host, None)
    assert "save_pretrained" not in vars(host)
    assert host.config.id2label == {0: "no", 1: "yes"}


def test_a_trainers_checkpoint_of_a_host_with_an_own_head_can_be_opened(tmp_path: Path) -> None:
    host = classifier(num_labels=2)
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=3))
    inlay.train(host, "a")
    arguments = hf.TrainingArguments(tmp_path, report_to=[], use_cpu=True, disable_tqdm=True)
    hf.Trainer(host, arguments).save_model(str(tmp_path / "saved"))
    assert hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").num_labels == 2


def test_prompts_on_longformer_lengthen_its_global_attention() -> None:
    config = hf.LongformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=60, pad_token_id=0, attention_window=4,
        max_position_embeddings=64,
    )  # fmt: skip
    host = shaken(hf.LongformerForSequenceClassification(config))
    ids = torch.randint(3, 60, (3, 8))
    inlay.add(host, "p", inlay.Prompt(length=3))
    inlay.activate(host, "p")
    with torch.no_grad():
        mine = host(input_ids=ids).logits
        inlay.activate(host, None)
        words = host.get_input_embeddings()(ids)
        (tokens,) = host.inlays["p"].parameters()
        at = torch.zeros(3, 11, dtype=torch.long).index_fill(1, torch.tensor([3]), 1)  # the text's first token
        out = host.longformer(inputs_embeds=torch.cat([tokens.expand(3, -1, -1), words], 1), global_attention_mask=at)[
            0
        ]
        torch.testing.assert_close(mine, host.classifier(out[:, 3:]), atol=0, rtol=0)


def test_prompts_on_a_host_without_a_last_position() -> None:
    host = shaken(
        hf.XLNetForSequenceClassification(hf.XLNetConfig(vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=48))
    )
    ids = torch.randint(3, 60, (3, 8))
    inlay.add(host, "p", inlay.Prompt(length=3))
    inlay.activate(host, "p")
    with torch.no_grad():
        mine = host(input_ids=ids).logits
        with pytest.raises(
            inlay.SetupError, match="is given input_mask for each token, and there is none for the tokens"
        ):
            host(input_ids=ids, input_mask=torch.zeros(3, 8))
        inlay.activate(host, None)
        (tokens,) = host.inlays["p"].parameters()
        words = torch.cat([tokens.expand(3, -1, -1), host.get_input_embeddings()(ids)], 1)
        torch.testing.assert_close(mine, host(inputs_embeds=words).logits, atol=0, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_a_prompt_on_a_decoder_compiles_without_complaints(training: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    host = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).train(training)
    inlay.add(host, "p", inlay.Prompt(length=3))
    inlay.activate(host, "p")
    with torch.no_grad():
        compiled = torch.compile(host, backend="eager")(**batch()).logits
        torch.testing.assert_close(compiled, host(**batch()).logits)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    torch._dynamo.reset()


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone, which then has every piece."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_what_tensor_parallel_processes_have_in_pieces_is_left_alone(process_group: None) -> None:
    host = writer()
    mesh = init_device_mesh("cpu", (1,))
    split = [m for m in (*host.model.layers.modules(), host.lm_head) if type(m) is nn.Linear]
    for module in split:
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh), requires_grad=False)
    host._tp_size = 2
    refused = "is split among processes .tensor parallelism.*open the host without a tp_plan"
    for name in ("lora", "ia3", "prefix"):
        with pytest.raises(inlay.SetupError, match=refused):
            inlay.add(host, name, METHODS[name])
    with pytest.raises(inlay.SetupError, match=refused):
        inlay.add(host, "s", inlay.SAID(d=10))
    for name in ("pfeiffer", "compacter", "prompt"):
        inlay.add(host, name, METHODS[name])
    with pytest.raises(inlay.ConfigError, match="each process has a piece, so it cannot be copied"):
        inlay.add(host, "h", METHODS["pfeiffer"], head=inlay.Head())


def test_a_half_precision_host_is_told_to_train_before_it_is_sharded(process_group: None) -> None:
    """Afterwards the pieces stay in half precision, where steps are lost."""
    host = classifier().bfloat16()
    inlay.add(host, "a", inlay.Pfeiffer(size=4))
    inlay.add(host, "b", inlay.Pfeiffer(size=4))
    inlay.train(host, "b")
    mesh = init_device_mesh("cpu", (1,))
    for part in (*host.bert.encoder.layer, host):
        fully_shard(part, mesh=mesh)
    for more in ({}, {"host_too": True}):
        with pytest.raises(inlay.SetupError, match="torch.bfloat16, has to be float32.*inlay.train before the host is"):
            inlay.train(host, "a" if not more else "b", **more)
        assert inlay.active(host) == "b"
    inlay.train(host, "a", keep_dtype=True)
    inlay.train(host, "b")
    before = [p.full_tensor().clone() for p in host.inlays["b"].parameters()]
    host(**batch()).logits.float().square().sum().backward()
    torch.optim.SGD([p for p in host.parameters() if p.requires_grad], lr=1e-4).step()
    assert any(
        not torch.equal(p.full_tensor(), old) for p, old in zip(host.inlays["b"].parameters(), before, strict=True)
    )
