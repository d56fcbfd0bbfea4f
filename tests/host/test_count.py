"""What is counted is what `add` would make on the class that is named."""

from __future__ import annotations

import pytest
import transformers as hf

import inlay

CLASSES = [
    hf.AutoModel,
    hf.AutoModelForSequenceClassification,
    hf.AutoModelForTokenClassification,
    hf.AutoModelForMaskedLM,
]
METHODS = [
    inlay.BitFit(),
    inlay.LoRA(rank=2, bias="all"),
    inlay.LoRA(rank=2, targets=("linear",)),
    inlay.LoRA(rank=2, targets=("linear", "q"), bias="targets"),
    inlay.Compacter(size=8),
    inlay.Mixture(inlay.Compacter(size=8)),
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.kind} {getattr(m, 'bias', '')}")
@pytest.mark.parametrize("family", [hf.BertConfig, hf.RobertaConfig])
def test_a_config_counts_as_its_host_does(kind: type, method: inlay.Method, family: type) -> None:
    config = family(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=50)
    host = kind.from_config(config)
    inlay.add(host, "a", method)
    made = sum(p.numel() for p in host.inlays["a"].parameters())
    counted = inlay.count(config, method, model=kind)
    assert counted.trainable == made
    assert counted.host == sum(p.numel() for n, p in host.named_parameters() if not n.startswith("inlays."))


def test_bitfit_on_bert_base_by_class() -> None:
    """The pooler belongs to the head of a classifier, and to the base model otherwise."""
    assert inlay.count(hf.BertConfig(), inlay.BitFit()).trainable == 102_912
    assert (
        inlay.count(hf.BertConfig(), inlay.BitFit(), model=hf.AutoModelForSequenceClassification).trainable == 102_144
    )
    assert inlay.count(hf.BertConfig(), inlay.BitFit(), model=hf.BertForSequenceClassification).trainable == 102_144


def test_a_class_for_a_host_is_refused() -> None:
    host = hf.BertModel(
        hf.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=50)
    )
    with pytest.raises(inlay.ConfigError, match="has its class already"):
        inlay.count(host, inlay.BitFit(), model=hf.AutoModel)


def test_a_class_for_a_method_is_refused() -> None:
    with pytest.raises(inlay.ConfigError, match="a method is an object"):
        inlay.count(hf.BertConfig(), inlay.Pfeiffer)  # type: ignore[arg-type]


def test_a_mixture_owns_the_norms_that_its_method_owns() -> None:
    plain = inlay.count(hf.BertConfig(), inlay.Compacter())
    mixed = inlay.count(hf.BertConfig(), inlay.Mixture(inlay.Compacter()))
    assert plain.by_site["norm"] == mixed.by_site["norm"] == 25 * 2 * 768
    assert "norm" not in inlay.count(hf.BertConfig(), inlay.Mixture(inlay.Pfeiffer())).by_site
