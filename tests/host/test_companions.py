"""The host goes on working with what people use it with."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import accelerate
import pytest
import torch
import transformers as hf

import inlay
from tests.hosts import BART, CAUSAL, CONFIGS, SMALL, T5, batch, classifier, logits, shake, shaken
from tests.texts import Texts


@pytest.mark.parametrize(("family", "method"), [("bert", inlay.Parallel), ("gpt2", inlay.Pfeiffer)])
@pytest.mark.long
def test_compile_without_graph_breaks_follows_activation(family: str, method: type) -> None:
    torch._dynamo.reset()
    host = classifier(family)
    inlay.add(host, "a", method(size=4))
    inlay.add(host, "b", inlay.Houlsby(size=2), norms=True)
    shake(host, "a")
    shake(host, "b")
    compiled = torch.compile(host, backend="eager", fullgraph=family == "bert")  # GPT-2's classifier breaks by itself
    for setup in ("a", None, "b", inlay.Stack("a", "b"), "a", inlay.Rows("b", "a", None)):
        inlay.activate(compiled, setup)
        torch.testing.assert_close(logits(compiled), logits(host))
    inlay.add(compiled, "late", inlay.Parallel(size=3))  # a place that was not hooked when it was compiled
    shake(host, "late", seed=5)
    inlay.activate(compiled, "late")
    torch.testing.assert_close(logits(compiled), logits(host))
    inlay.strip(compiled)
    torch.testing.assert_close(logits(compiled), logits(host))
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_compile_without_graph_breaks_on_other_families(family: str) -> None:
    torch._dynamo.reset()
    host = shaken(hf.AutoModel.from_config(CONFIGS[family]()))
    inlay.add(host, "a", inlay.Compacter(size=4))
    inlay.add(host, "b", inlay.Pfeiffer(size=4))
    for name in "ab":
        shake(host, name)
    inlay.activate(host, inlay.Rows("b", None, inlay.Stack("a", "b")))
    with torch.no_grad():
        compiled = torch.compile(host, backend="eager", fullgraph=True)(**batch())[0]
        torch.testing.assert_close(compiled, host(**batch())[0])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo hides, where warnings are not errors
def test_compiled_training_step() -> None:
    torch._dynamo.reset()
    host = classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=3, pooling="mean", dropout=0.0))
    shake(host, "a")
    inlay.train(host, "a")
    gradients = []
    for model in (host, torch.compile(host, backend="aot_eager")):
        host.zero_grad()
        model(**batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
        gradients.append([p.grad.clone() for p in host.inlays["a"].parameters()])
    torch.testing.assert_close(*gradients)
    torch._dynamo.reset()


def test_trainer_learns_and_resumes(tmp_path) -> None:
    host = classifier()
    before = {k: v.clone() for k, v in host.state_dict().items()}
    inlay.add(host, "a", inlay.Pfeiffer(size=8), head=inlay.Head(labels=3, pooling="mean"))
    inlay.train(host, "a")
    arguments = hf.TrainingArguments(
        tmp_path, max_steps=30, learning_rate=2e-2, per_device_train_batch_size=12, report_to=[], save_steps=15, logging_steps=5,
        use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(host, arguments, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    after = host.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    learned = [p.clone() for p in host.inlays.parameters()]
    for parameter in host.inlays.parameters():
        parameter.data.zero_()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    torch.testing.assert_close([p.detach() for p in host.inlays.parameters()], learned)


def test_accelerate() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=8), head=inlay.Head(labels=3))
    inlay.train(host, "a")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW([p for p in host.parameters() if p.requires_grad], lr=2e-2)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=6)
    host, optimizer, loader = accelerator.prepare(host, optimizer, loader)
    losses = []
    for _ in range(12):
        for rows in loader:
            loss = host(**rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    inlay.activate(host, None)


@pytest.mark.parametrize("make", [
    lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, pad_token_id=0, bos_token_id=2, eos_token_id=49)),
    lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL | {"eos_token_id": 49})),
    lambda: hf.OPTForCausalLM(hf.OPTConfig(hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
                                           word_embed_proj_dim=16, pad_token_id=0, bos_token_id=2, eos_token_id=49)),
    lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, eos_token_id=49)),
    lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART | {"eos_token_id": 49})),
], ids=["gpt2", "llama", "opt", "t5", "bart"])  # fmt: skip
@pytest.mark.parametrize("method", [inlay.Houlsby(size=4), inlay.Pfeiffer(size=4, sites=("attention", "ffn")), inlay.Parallel(size=4)],
                         ids=lambda m: m.kind)  # fmt: skip
def test_generate_with_and_without_cache(make, method: inlay.Method) -> None:
    host = shaken(make())
    ids = {"input_ids": batch(2, 5)["input_ids"].clamp(min=3)}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    bare = host.generate(**ids, **options)
    for seed, name in enumerate("ab"):
        inlay.add(host, name, method)
        shake(host, name, seed)
    texts = {}
    for name in "ab":
        inlay.activate(host, name)
        texts[name] = host.generate(**ids, **options)
        assert torch.equal(texts[name], host.generate(**ids, **options, use_cache=False))
    assert any(not torch.equal(text, bare) for text in texts.values())
    for beams in (1, 2):
        inlay.activate(host, inlay.Rows("b", "a", each=beams))
        mixed = host.generate(**ids, **options, num_beams=beams)
        for row, name in enumerate("ba"):
            inlay.activate(host, name)
            alone = host.generate(**ids, **options, num_beams=beams)
            width = min(mixed.shape[1], alone.shape[1])
            assert torch.equal(mixed[row, :width], alone[row, :width])


def test_autocast() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=3), norms=True)
    shake(host, "a", std=0.05)
    inlay.train(host, "a")
    host.eval()
    with torch.autocast("cpu", torch.bfloat16):
        loss = host(**batch(), labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    torch.testing.assert_close(loss, host(**batch(), labels=torch.tensor([0, 1, 2])).loss, atol=0.05, rtol=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in host.inlays["a"].parameters())


def test_moves_take_the_inlays_along() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Houlsby(size=4), head=inlay.Head(labels=3), norms=True)
    inlay.activate(host, "a")
    assert {p.dtype for p in host.double().parameters()} == {torch.float64}
    assert logits(host).dtype == torch.float64
    assert {p.device.type for p in host.to("meta").parameters()} == {"meta"}


def test_pickle_and_deepcopy_of_an_active_host() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Parallel(size=4), head=inlay.Head(labels=3, pooling="mean"))
    inlay.activate(host, inlay.Rows("a", None, "a"))
    wanted = logits(host)
    stream = io.BytesIO()
    pickle.dump(host, stream)
    for twin in (pickle.loads(stream.getvalue()), copy.deepcopy(host)):
        assert torch.equal(logits(twin), wanted)
        inlay.activate(twin, "a")
        assert not torch.equal(logits(twin), wanted)
        assert torch.equal(logits(host), wanted)


def test_threads_do_not_mix_their_batches() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Parallel(size=4, sites=("attention", "ffn")), head=inlay.Head(labels=3, pooling="mean"))
    shake(host, "a")
    inlay.activate(host, "a")
    batches = [batch(3, 7 + 4 * seed, seed) for seed in range(4)]
    alone = [logits(host, inputs) for inputs in batches]
    wrong = []

    def work(at: int) -> None:
        wrong.extend(at for _ in range(40) if not torch.equal(logits(host, batches[at]), alone[at]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_hosts_without_a_head() -> None:
    for make in (hf.BertModel, hf.BertForMaskedLM, hf.BertForQuestionAnswering):
        host = shaken(make(hf.BertConfig(**SMALL)))
        inlay.add(host, "a", inlay.Pfeiffer(size=4))
        shake(host, "a")
        bare = host(**batch())[0]
        inlay.activate(host, "a")
        assert not torch.allclose(host(**batch())[0], bare, atol=1e-3)


def test_an_inlay_moves_between_hosts_of_one_family(tmp_path) -> None:
    """The same base model under another head: the places have the same names."""
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=4), norms=True)
    shake(host, "a")
    inlay.save(host, "a", tmp_path / "a")
    base = host.bert
    plain = copy.deepcopy(base)
    for module in plain.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    inlay.load(plain, tmp_path / "a")
    inlay.activate(plain, "a")
    inlay.activate(host, "a")
    with torch.no_grad():
        assert torch.equal(plain(**batch())[0], base(**batch())[0])


def test_pipeline_speaks_the_labels_of_the_active_inlay() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    host = classifier()
    inlay.add(host, "mood", inlay.Pfeiffer(size=4), head=inlay.Head(labels=["sad", "glad", "calm"], pooling="mean"))
    shake(host, "mood")
    inlay.activate(host, "mood")
    ask = hf.pipeline("text-classification", model=host, tokenizer=tokenizer, device="cpu")
    answers = ask(["good film", "bad"], top_k=None)
    assert [{a["label"] for a in each} for each in answers] == [{"sad", "glad", "calm"}] * 2
    wanted = logits(host, dict(tokenizer(["good film"], return_tensors="pt"))).softmax(-1)[0]
    assert {a["label"]: pytest.approx(a["score"], abs=1e-5) for a in answers[0]} == {
        label: wanted[at].item() for at, label in enumerate(["sad", "glad", "calm"])
    }
