"""Collapse: a fusion with its mean weights is one wider bottleneck, a plain inlay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.anatomy.survey import Anatomy
from inlay.compose.activations import fusion_activations
from inlay.errors import SetupError
from inlay.host.registry import Inlay, Inlays, key_of
from inlay.host.verbs import activated, bare, evaluating, free_name, inlays_of
from inlay.methods.base import BottleneckForm
from inlay.methods.bottleneck import Wide
from inlay.methods.fusion import Fusion, as_fusion


@dataclass(frozen=True)
class Collapse:
    """What collapsing did: mean weights per place, and accuracy before and after where the batches had labels."""

    name: str
    weights: dict[str, dict[str, float]]
    accuracy_fused: float | None
    accuracy_collapsed: float | None


def collapse(host: nn.Module, fusion: str, batches: Iterable[Mapping[str, Any]], *, name: str) -> Collapse:
    """Replace the learned mixing by its mean weights over a data set: exactly one wider bottleneck, a plain inlay."""
    model, inlays = bare(host), inlays_of(host)
    free_name(model, name)
    old, batches = inlays[fusion], list(batches)
    method = as_fusion(fusion, old.method)
    seen = fusion_activations(model, fusion, batches)
    forms = {site: found for site in method.sites if (found := _forms(inlays, method, site))}
    inlay = Inlay(name, _wide(fusion, forms, inlays.anatomy), old.head, old.norms).fill(model, inlays.anatomy)
    if set(inlay.place_ids()) - {p.id for p in inlays.anatomy.of_kind("norm", "head")} != set(forms):
        raise SetupError(f"{fusion!r} acts at different branches in different layers, which no plain method does")
    with torch.no_grad():
        for site, found in forms.items():
            _copy_mean(inlay.parts[key_of(site)], old.parts[key_of(site)], found, seen.by_member(site))
    inlay.start_like(old, inlays.anatomy.of_kind("norm", "head"))
    inlays.admit(model, inlay)
    accuracy = {setup: labelled_accuracy(model, setup, batches) for setup in (fusion, name)}
    return Collapse(name, {site: seen.by_member(site) for site in method.sites}, accuracy[fusion], accuracy[name])


def _wide(fusion: str, forms: Mapping[str, Mapping[str, BottleneckForm]], anatomy: Anatomy) -> Wide:
    """The method of one bottleneck that is as wide as all members together."""
    kinds = {(form.reads, form.standardised, form.activation) for found in forms.values() for form in found.values()}
    if len(kinds) != 1:
        alike = "; ".join(sorted(f"{reads} through {activation}" for reads, _, activation in kinds))
        raise SetupError(f"{fusion!r} cannot be one bottleneck: its members read and act differently ({alike}).")
    reads, standardised, activation = kinds.pop()
    if reads == "input" or standardised:
        raise SetupError(f"{fusion!r} cannot be one bottleneck: its members are LoRA or have norms of their own.")
    places = [anatomy.places[site] for site in forms]
    sizes = {site: sum(form.down.shape[0] for form in found.values()) for site, found in forms.items()}
    settings: dict[str, Any] = {
        "reads": reads,
        "activation": activation,
        "sites": tuple(dict.fromkeys(place.kind.removesuffix(".raw") for place in places)),
        "size": {"default": 1} | sizes,
        "before_dropout": all(place.kind.endswith(".raw") for place in places),
        "leave_out": anatomy.layers_without(places),
    }
    return Wide(**settings)


def _forms(inlays: Inlays, method: Fusion, site: str) -> dict[str, BottleneckForm]:
    parts = {m: inlays.member_part(m, inlays.anatomy.places[site]) for m in method.at(site)}
    return {m: part[0].form(part[1]) for m, part in parts.items() if part is not None}  # type: ignore[operator]


def _copy_mean(adapter: Any, layer: Any, forms: Mapping[str, BottleneckForm], weights: Mapping[str, float]) -> None:
    """Σ_n p_n V z_n with p fixed: all downs below each other, all ups times p_n V beside each other."""
    adapter.down.weight.copy_(torch.cat([form.down for form in forms.values()]))
    adapter.down.bias.copy_(torch.cat([form.down_bias for form in forms.values()]))
    exact = torch.promote_types(adapter.up.weight.dtype, torch.float32)  # rounded once, at the end
    up = torch.cat([weights[m] * form.up.to(exact) for m, form in forms.items()])  # (Σb, D)
    up_bias = torch.stack([weights[m] * form.up_bias.to(exact) for m, form in forms.items()]).sum(0)
    if layer.value is not None:
        value = layer.value.weight.to(exact)
        up, up_bias = up @ value.T, value @ up_bias
    adapter.up.weight.copy_(up.T)
    adapter.up.bias.copy_(up_bias)


def labelled_accuracy(host: nn.Module, setup: str, batches: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of right answers over batches with one label per text; None where there are no such labels."""
    model, right, seen = bare(host), 0, 0
    with evaluating(model), activated(model, setup), torch.no_grad():
        for batch in batches:
            labels = batch.get("labels")
            if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
                logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
                if logits.dim() != 2 or len(logits) != len(labels) or logits.shape[-1] == 1:  # nothing to choose from
                    continue
                right += int((logits.argmax(-1) == labels).sum())
                seen += int((labels != -100).sum())  # which is no label, as in a loss
    return right / seen if seen else None
