from __future__ import annotations

import pytest
import torch
import transformers as hf

import inlay
from inlay.host.heads import pool
from tests.hosts import CONFIGS, SMALL, T5, batch, classifier, logits, row, shake, shaken


def test_several_label_counts_on_one_host() -> None:
    host = classifier()
    counts = {"two": 2, "five": 5, "score": 1}
    for name, labels in counts.items():
        inlay.add(host, name, inlay.Pfeiffer(size=2), head=inlay.Head(labels=labels))
    for name, labels in counts.items():
        inlay.train(host, name)
        assert logits(host).shape == (3, labels)
        target = torch.tensor([0.5, 1.0, 2.0]) if labels == 1 else torch.tensor([0, 1, labels - 1])
        host(**batch(), labels=target).loss.backward()
        assert host.config.num_labels == host.num_labels == labels
    inlay.activate(host, None)
    assert host.config.num_labels == host.num_labels == 2
    assert host.config.problem_type is None
    assert logits(host).shape == (3, 2)


def test_labels_that_the_user_sets_are_left_alone() -> None:
    host = classifier()
    inlay.add(host, "plain", inlay.Pfeiffer(size=2))
    inlay.add(host, "own", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3))
    host.config.problem_type = "multi_label_classification"
    inlay.activate(host, "plain")
    assert host.config.problem_type == "multi_label_classification"
    inlay.activate(host, "own")
    assert host.config.problem_type == "single_label_classification"
    inlay.activate(host, "plain")
    assert host.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize("head", [inlay.Head(), inlay.Head(labels=3)], ids=["copied", "labelled"])
def test_a_change_of_the_head_beside_an_own_head_is_refused(head: inlay.Head) -> None:
    with pytest.raises(inlay.SetupError, match="linear.classifier would change the host's head"):
        inlay.add(classifier(), "a", inlay.LoRA(rank=2, targets=("linear",)), head=head)


def test_label_names_reach_the_pipeline_words() -> None:
    host = classifier()
    inlay.add(host, "cb", inlay.Pfeiffer(size=2), head=inlay.Head(labels=["yes", "no", "unclear"], pooling="mean"))
    with inlay.activated(host, "cb"):
        assert host.config.id2label == {0: "yes", 1: "no", 2: "unclear"}
        assert host.config.label2id["unclear"] == 2
    assert host.config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
@pytest.mark.parametrize("left", [False, True])
def test_pooling_sees_real_tokens_only(pooling: str, left: bool) -> None:
    hidden = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    if left:
        mask = mask.flip(-1)
    real = [hidden[i][mask[i].bool()] for i in range(2)]
    wanted = torch.stack([{"first": x[0], "last": x[-1], "mean": x.mean(0)}[pooling] for x in real])
    torch.testing.assert_close(pool(hidden, mask, pooling), wanted)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "t5", "bart", "modernbert", "opt"])
def test_padding_does_not_reach_a_pooled_head(family: str) -> None:
    host = classifier(family)
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=4, pooling="mean", layers=2))
    shake(host, "a")
    inlay.activate(host, "a")
    inputs = batch()
    mixed = logits(host, inputs)
    for at in range(3):
        alone = {k: v[:, : int(inputs["attention_mask"][at].sum())] for k, v in row(inputs, at).items()}
        torch.testing.assert_close(logits(host, alone), mixed[at : at + 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("text", ["copy", "pooled", None])
def test_beside_logits_for_every_token_those_of_a_text_are_the_same_everywhere(family: str, text: str | None) -> None:
    """Also those of decoders that pick a token: of their own head, and of a copy of it."""
    host = classifier(family)
    inlay.add(host, "tags", inlay.Pfeiffer(size=2), head=inlay.Head(labels=3, pooling="tokens"))
    inlay.add(host, "copy", inlay.Pfeiffer(size=2), head=inlay.Head(labels=2))
    inlay.add(host, "pooled", inlay.Pfeiffer(size=2), head=inlay.Head(labels=2, pooling="last"))
    for name in ("tags", "copy", "pooled"):
        shake(host, name)
    inlay.activate(host, inlay.Rows(text, "tags", text))
    together = logits(host)
    for number, setup in enumerate((text, "tags", text)):
        inlay.activate(host, setup)
        alone = logits(host, row(batch(), number))[0]
        theirs = together[number, :, : alone.shape[-1]]
        torch.testing.assert_close(theirs, alone.expand_as(theirs), atol=1e-5, rtol=0)


def test_a_host_whose_last_hidden_states_are_narrower() -> None:
    host = classifier("opt-post-ln", word_embed_proj_dim=8)
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=4, pooling="mean", layers=2))
    inlay.activate(host, "a")
    assert logits(host).shape == (3, 4)


def test_positional_mask_and_no_mask() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=4, pooling="mean"))
    inlay.activate(host, "a")
    inputs = batch()
    with torch.no_grad():
        positional = host(inputs["input_ids"], inputs["attention_mask"]).logits
        whole = host(inputs["input_ids"][:1]).logits
    assert torch.equal(positional, logits(host, inputs))
    torch.testing.assert_close(whole, positional[:1])


@pytest.mark.parametrize("method", [inlay.PAL(size=8, heads=2), inlay.UniPELT(), inlay.Prompt(length=2), "pooled"])
def test_a_mask_of_who_attends_to_whom_is_refused_where_padding_has_to_be_known(method: inlay.Method | str) -> None:
    """Packed texts have one, (B, 1, T, T). What needs no padding takes it, also a head with logits for every token."""
    host, inputs = classifier(), batch()
    inlay.add(host, "rest", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2, pooling="tokens"))
    if isinstance(method, str):
        inlay.add(host, "a", inlay.Pfeiffer(size=4), head=inlay.Head(labels=2, pooling="mean"))
    else:
        inlay.add(host, "a", method)
    packed = inputs | {"attention_mask": inputs["attention_mask"][:, None, None, :].bool().expand(-1, 1, 7, -1)}
    inlay.activate(host, "rest")
    torch.testing.assert_close(logits(host, packed), logits(host, inputs))
    inlay.activate(host, "a")
    wanted = logits(host, inputs)
    with pytest.raises(inlay.SetupError, match=r"which tokens are real, and a mask \(3, 1, 7, 7\)"):
        logits(host, packed)
    torch.testing.assert_close(logits(host, inputs), wanted)


def test_what_is_no_head() -> None:
    host = classifier()
    with pytest.raises(inlay.SetupError, match=r"such as inlay.Head\(labels=3\), got 3"):
        inlay.add(host, "a", inlay.Pfeiffer(size=4), head=3)  # type: ignore[arg-type]
    assert not hasattr(host, "inlays")


def test_two_layer_head_by_hand() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=4, pooling="first", layers=2))
    inlay.activate(host, "a")
    first, second = (m for m in host.inlays["a"].parts["head:classifier"].layers if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        hidden = host.bert(**batch()).last_hidden_state
        torch.testing.assert_close(logits(host), second(torch.tanh(first(hidden[:, 0]))))


def test_a_copied_head_has_the_pooler_too_and_is_the_inlays_own() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2, init="identity"), head=inlay.Head())
    bare = logits(host)
    inlay.activate(host, "a")
    assert torch.equal(logits(host), bare)  # a copy says the same until it learns
    host.inlays["a"].parts["head:pooler"].dense.weight.data.add_(1)
    assert not torch.equal(logits(host), bare)
    inlay.activate(host, None)
    assert torch.equal(logits(host), bare)


def test_heads_of_other_hosts() -> None:
    config = hf.BertConfig(**SMALL)
    tokens = shaken(hf.BertForTokenClassification(config))
    inlay.add(tokens, "ner", inlay.Pfeiffer(size=2), head=inlay.Head(labels=["O", "B", "I"]))
    inlay.activate(tokens, "ner")
    assert logits(tokens).shape == (3, 7, 3)
    choices = shaken(hf.BertForMultipleChoice(config))
    inlay.add(choices, "copa", inlay.Pfeiffer(size=2), head=inlay.Head(pooling="mean"))
    inlay.train(choices, "copa")
    inputs = {k: v.reshape(2, 3, 7) for k, v in batch(6).items()}
    assert logits(choices, inputs).shape == (2, 3)
    choices(**inputs, labels=torch.tensor([0, 2])).loss.backward()
    inlay.add(choices, "same", inlay.Pfeiffer(size=2), head=inlay.Head(labels=1))
    both = shaken(hf.GPT2DoubleHeadsModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, num_labels=1)))
    inlay.add(both, "copy", inlay.Pfeiffer(size=2), head=inlay.Head())
    assert {"head:lm_head", "head:multiple_choice_head"} <= set(both.inlays["copy"].parts)
    words = shaken(hf.BertForMaskedLM(config))
    inlay.add(words, "mlm", inlay.Pfeiffer(size=2), head=inlay.Head())
    inlay.activate(words, "mlm")
    assert logits(words).shape == (3, 7, 50)


@pytest.mark.parametrize(("host", "head", "message"), [
    (lambda: shaken(hf.BertModel(hf.BertConfig(**SMALL))), inlay.Head(labels=2), "BertModel has no head"),
    (lambda: shaken(hf.BertForTokenClassification(hf.BertConfig(**SMALL))), inlay.Head(labels=2, pooling="mean"), "one per token"),
    (lambda: shaken(hf.GPT2DoubleHeadsModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, num_labels=1))), inlay.Head(labels=3), "cannot have 3 labels"),
    (lambda: shaken(hf.BertForQuestionAnswering(hf.BertConfig(**SMALL))), inlay.Head(labels=3), "cannot have 3 labels"),
    (lambda: shaken(hf.BertForMultipleChoice(hf.BertConfig(**SMALL))), inlay.Head(labels=3, pooling="mean"), "cannot have 3 labels"),
    (lambda: shaken(hf.T5ForConditionalGeneration(hf.T5Config(**T5))), inlay.Head(labels=3), "cannot have 3 labels"),
])  # fmt: skip
def test_heads_that_cannot_be(host, head, message: str) -> None:
    made = host()
    with pytest.raises(inlay.ConfigError, match=message):
        inlay.add(made, "a", inlay.Pfeiffer(size=2), head=head)
    assert not hasattr(made, "inlays")


@pytest.mark.parametrize(("fields", "message"), [
    ({"labels": 0}, "at least one label"),
    ({"labels": ["a", "a"]}, "must differ"),
    ({"labels": (0, 1)}, "labels are names"),
    ({"labels": 2, "layers": 2}, "set pooling"),
    ({"labels": 2, "pooling": "max"}, "pooling"),
    ({"labels": 1, "problem": "single_label_classification"}, "one label leaves nothing to choose"),
    ({"label": 2}, "Did you mean 'labels'"),
])  # fmt: skip
def test_bad_heads(fields: dict, message: str) -> None:
    with pytest.raises(inlay.ConfigError, match=message):
        inlay.Head(**fields)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_hosts_of_one_config_do_not_see_each_others_heads_and_prefixes(family: str) -> None:
    config = CONFIGS[family]()
    one, other = (hf.AutoModelForSequenceClassification.from_config(config).eval() for _ in range(2))
    assert one.config is other.config
    labels = torch.tensor([0, 1, 0])
    loss, before = other(**batch(), labels=labels).loss, config.to_dict()
    inlay.add(one, "a", inlay.Prefix(length=2), head=inlay.Head(labels=1))
    inlay.activate(one, "a")
    assert one.config.num_labels == 1
    assert other.config.num_labels == 2
    assert torch.equal(other(**batch(), labels=labels).loss, loss)
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"
    inlay.strip(one)
    assert one.config is config
    assert all(m.config is config for m in one.modules() if getattr(m, "config", None) == config)


def test_what_is_set_on_a_hosts_config_meanwhile_is_kept() -> None:
    host = classifier()
    inlay.add(host, "a", inlay.Pfeiffer(size=2), head=inlay.Head(labels=5))
    inlay.activate(host, "a")
    host.config.pad_token_id = 7
    inlay.strip(host)
    assert host.config.pad_token_id == 7
    assert host.config.num_labels == 2


def test_a_refused_inlay_leaves_the_config_alone() -> None:
    host = classifier()
    config = host.config
    with pytest.raises(inlay.ConfigError):
        inlay.add(host, "a", inlay.Pfeiffer(size=1000))
    assert host.config is config
