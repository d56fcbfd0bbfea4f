"""What a fusion attends to: mean weights per layer and member over real tokens, per label, and per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.errors import ConfigError, SetupError
from inlay.host.plan import Plan
from inlay.host.steps import leaves
from inlay.host.verbs import activated, bare, evaluating, inlays_of
from inlay.methods.fusion import Fused, Fusion, as_fusion, recording


@dataclass
class FusionActivations:
    """Mean attention of a fusion. `mean[place][n]` is the weight of `members[n]`; rows sum to one."""

    fusion: str
    members: tuple[str, ...]
    mean: dict[str, Tensor]
    """Place to (N,), over all real tokens."""
    tokens_seen: dict[str, int]
    """Place to the number of real tokens."""
    by_label: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Label to the same, where the batches have one label per text."""
    by_token: list[dict[str, Tensor]] = field(default_factory=list)
    """For each batch, place to (B, T, N); only if asked for."""

    def by_member(self, place: str) -> dict[str, float]:
        return dict(zip(self.members, self.mean[place].tolist(), strict=True))

    def overall(self) -> dict[str, float]:
        """Member to its mean weight over all places."""
        return dict(zip(self.members, torch.stack(list(self.mean.values())).mean(0).tolist(), strict=True))


def fusion_activations(
    host: nn.Module, fusion: str, batches: Iterable[Mapping[str, Any]], *, per_token: bool = False
) -> FusionActivations:  # fmt: skip
    """Run batches through a fusion and keep its mean weights. Padding does not count."""
    model, inlays = bare(host), inlays_of(host)
    method = as_fusion(fusion, inlays[fusion].method)
    sums = {site: torch.zeros(len(method.members), dtype=torch.float64) for site in method.sites}
    counts = dict.fromkeys(method.sites, 0)
    label_sums: dict[int, dict[str, Tensor]] = {}
    label_counts: dict[int, dict[str, int]] = {}
    found = FusionActivations(fusion, method.members, {}, counts)
    with evaluating(model), activated(model, fusion), torch.no_grad():
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise ConfigError(f"batches is a list, such as [batch], got {str(batch)[:80]!r} in it")
            recorded = _recorded(model, method, batch)
            for site, weights in recorded.items():
                mask = real_tokens(model, batch, weights, site).bool()
                sums[site] += weights[mask].sum(0)
                counts[site] += int(mask.sum())
                for label, rows in _rows_by_label(batch, weights.shape[0]).items():
                    of_label = label_sums.setdefault(label, {s: torch.zeros_like(t) for s, t in sums.items()})
                    of_label[site] += weights[rows][mask[rows]].sum(0)
                    number = label_counts.setdefault(label, dict.fromkeys(method.sites, 0))
                    number[site] += int(mask[rows].sum())
            if per_token:
                found.by_token.append(recorded)
    if not all(counts.values()):
        raise SetupError("no real tokens were seen: give at least one batch")
    found.mean = {site: total / counts[site] for site, total in sums.items()}
    found.by_label = {
        label: {site: total / label_counts[label][site] for site, total in by_site.items()}
        for label, by_site in sorted(label_sums.items())
    }  # fmt: skip
    return found


def fused_steps(plan: Plan) -> dict[str, Fused]:
    """Place to what a fusion does there, in the order of the plan."""
    steps = [leaf for step in plan.steps.values() for leaf in leaves(step)]
    return {step.place.id: step for step in steps if isinstance(step, Fused)}


def _recorded(model: PreTrainedModel, method: Fusion, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """One batch through the host: place to (B, T, N) in the order of the members, in float64."""
    steps = fused_steps(inlays_of(model).acting.plan)
    inputs = {key: value for key, value in batch.items() if key != "labels" or _writes(model, value)}
    with recording(steps.values()):
        model(**inputs)
        return {site: steps[site].recorded(method.members, _rows(batch)).double() for site in method.sites}


def _rows(batch: Mapping[str, Any]) -> int:
    return next(value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim())


def real_tokens(model: PreTrainedModel, batch: Mapping[str, Any], weights: Tensor, site: str) -> Tensor:
    """1 at real tokens (B, T), for the stack whose tokens the place sees: cross-attention has the encoder's as keys."""
    shape = weights.shape[:2]
    mask = batch.get("attention_mask")
    read = site.removeprefix("linear.").startswith("encoder") or site.endswith((".cross_k", ".cross_v"))
    if model.config.is_encoder_decoder and not read:
        written = batch.get("decoder_attention_mask")
        if written is not None or "decoder_input_ids" in batch:
            mask = written
        elif _writes(model, batch.get("labels")):
            mask = batch["labels"] != -100
    if mask is not None and mask.numel() == shape.numel():
        return mask.reshape(shape).cpu()
    return torch.ones(shape)


def _writes(model: PreTrainedModel, labels: Any) -> bool:
    """Whether labels are a text, of which an encoder-decoder that writes words makes its decoder's inputs."""
    writer = model.config.is_encoder_decoder and model.get_output_embeddings() is not None
    return bool(writer) and isinstance(labels, Tensor) and labels.dim() == 2


def _rows_by_label(batch: Mapping[str, Any], rows: int) -> dict[int, Tensor]:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or len(labels) != rows:
        return {}
    known = labels[labels != -100].unique()  # -100 is no label, as in a loss
    return {int(label): (labels == label).nonzero().flatten().cpu() for label in known}
