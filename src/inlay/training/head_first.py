"""The head before the rest: the last linear layer of a new head, fitted to a few rows before the first step.

    min over W, b of  Σ_rows loss(W x + b) + s² ‖W‖² / (2 C)          x what reaches the layer, s² the mean of ‖x‖²

With cross-entropy that is logistic regression on the host's own features. It is convex, so a run from fifty rows begins
where a regression ends, whatever its seed, instead of at random weights that mislead the inlay. The factor s² makes C
mean the same on every host: it is that of features of length 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy.modules import last_linear
from inlay.host.setup import names_in
from inlay.host.verbs import active, inlays_of
from inlay.training.batching import reading_batches
from inlay.training.codec import Codec, EncodedSplit
from inlay.training.evaluate import BATCH, by_choice, scores

C = 5.0
"""The best on the demo's sentiment tasks, without the rows that judge there. For two labels scikit-learn's is 2 C."""
STEPS = 200
"""Of L-BFGS, at most."""


def fit_head(host: PreTrainedModel, codec: Codec, split: EncodedSplit) -> bool:
    """Fit the active setup's own head to labelled rows. False where there is none, or it does not train."""
    layer = last_layer(host)
    if codec.form != "labels" or layer is None or not layer.weight.requires_grad:
        return False
    reached = _what_reaches(host, layer, codec, split)
    rows = sum(x[..., 0].numel() for x, _, _ in reached)
    scale = sum(float(x.square().sum()) for x, _, _ in reached) / max(1, rows)
    weight, bias = layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu()
    weight, bias = torch.zeros_like(weight, requires_grad=True), torch.zeros_like(bias, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        whole = scale * weight.square().sum() / (2 * C)
        for x, labels, there in reached:
            logits = nn.functional.linear(x, weight, bias)
            whole = whole + codec.loss(logits if there is None else by_choice(logits, there), labels)
        whole.backward()
        return whole

    optimizer.step(objective)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        return False
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return True


def last_layer(host: PreTrainedModel) -> nn.Linear | None:
    """The layer that makes the logits of the active inlay's own head; of a stack the uppermost one's."""
    inlays = inlays_of(host)
    heads = [inlays[name] for name in names_in(active(host)) if inlays[name].head is not None]
    if not heads:
        return None
    part = heads[-1].part(list(inlays.anatomy.of_kind("head"))[-1])
    found = last_linear(part) if part is not None else None
    return found[1] if found is not None and found[1].bias is not None else None


@torch.no_grad()
def _what_reaches(
    host: PreTrainedModel, layer: nn.Linear, codec: Codec, split: EncodedSplit
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Every batch's (inputs of the layer, labels, which choices are there), without dropout, in double precision."""
    found, seen, training = [], list[Tensor](), host.training
    host.eval()
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        for rows in reading_batches(split.features.lengths, BATCH):
            batch: dict[str, Any] = {
                name: tensor.to(host.device) for name, tensor in split.features.collate(rows).items()
            }
            labels, there = batch.pop("labels"), batch.get("there")
            scores(host, batch, codec)
            found.append((seen.pop().double().cpu(), labels.cpu(), None if there is None else there.cpu()))
            seen.clear()
    finally:
        hook.remove()
        host.train(training)
    return found
