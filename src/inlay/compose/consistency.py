"""AdaMix in training: the task loss of one stochastic pass, and how far a second one is from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from inlay.errors import ConfigError, SetupError
from inlay.host.setup import Rows, names_in, walk
from inlay.host.verbs import active, bare, inlays_of
from inlay.methods.acting import upcast
from inlay.methods.mixture import doubled

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) to a scalar."""


@dataclass(frozen=True)
class MixtureLoss:
    """`loss` = `task` + weight · `consistency`; the logits are those of the first pass."""

    loss: Tensor
    task: Tensor
    consistency: Tensor
    logits: Tensor


def mixture_loss(
    host: nn.Module, batch: Mapping[str, Any], loss_fn: Loss | None = None, weight: float = 1.0, *, detach: bool = True,
    compared: Callable[[Tensor], Tensor] | None = None, problem: str | None = None, aligned: bool = False,
) -> MixtureLoss:  # fmt: skip
    """AdaMix's loss: the task loss of one stochastic pass, and how far a second one with other draws is from it.

    Both passes are the halves of one doubled batch. `batch` is what the host takes, with `labels`.
    loss_fn: the task loss; by default cross-entropy, squared error for one output, token-wise for language models.
    detach:  each KL's target is a constant, as in the published code; False is the paper's plain formula.
    compared: what is done to a pass's logits before they are scored and compared, such as one row per question.
    problem: one of transformers' problem types; by default the host's own.
    aligned: whether the logits that `compared` gives are those of the labels' own tokens; a causal language model's own
             are for the next token.
    """
    model = bare(host)
    labels = batch.get("labels")
    if labels is None:
        raise ConfigError("mixture_loss needs `labels` in the batch")
    setup = active(model)
    inlays = [inlays_of(model)[name] for name in names_in(setup)]
    mixing = [inlay.draw for inlay in inlays if inlay.method.compared_passes() > 1]
    passes = 2 if mixing and weight and model.training else 1  # in evaluation both would be the merged weights
    if passes == 2 and any(isinstance(part, Rows) for part in walk(setup)):
        raise SetupError("mixture_loss doubles the batch, which Rows cannot follow. Train the mixtures one by one.")
    rows = next((batch[k].shape[0] for k in ("input_ids", "inputs_embeds") if k in batch), labels.shape[0])
    inputs = {k: _repeated(v, rows, passes) for k, v in batch.items() if k != "labels" or _needs_labels(model, labels)}
    with doubled(mixing, passes):
        both = host(**inputs).logits
    shaped = compared or (lambda logits: logits)
    first = shaped(both.chunk(passes)[0])
    task = loss_fn(first, labels) if loss_fn is not None else task_loss(model, first, labels)
    if passes == 1:
        return MixtureLoss(task, task, torch.zeros_like(task), first)
    second = shaped(both.chunk(passes)[1])
    problem = problem or problem_of(model, first, labels)
    if shifts(model, labels) and not aligned:
        consistency = distance(first[:, :-1], second[:, :-1], labels[:, 1:], detach, problem)
    else:
        consistency = distance(first, second, labels, detach, problem)
    return MixtureLoss(task + weight * consistency, task, consistency, first)


def _repeated(value: Any, rows: int, times: int) -> Any:
    """A tensor with one entry per row of the batch, several times below itself; anything else as it is."""
    repeats = isinstance(value, Tensor) and value.dim() and value.shape[0] == rows and times > 1
    return torch.cat([value] * times) if repeats else value


def _needs_labels(model: PreTrainedModel, labels: Tensor) -> bool:
    """Encoder-decoders make the decoder's inputs of the labels."""
    return model.config.is_encoder_decoder and labels.dim() == 2


def shifts(model: PreTrainedModel, labels: Tensor) -> bool:
    """Whether the logits at a token are for the next one, as in causal language models.

    Decoders cut out of encoder-decoders (BartForCausalLM) are given labels that are shifted already.
    """
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return causal and labels.dim() == 2 and not getattr(type(model.config), "is_encoder_decoder", False)


def problem_of(model: PreTrainedModel, logits: Tensor, labels: Tensor) -> str:
    """transformers' problem type: the host's own, or by the shapes of logits and labels."""
    known = getattr(model.config, "problem_type", None)
    if known is not None and logits.dim() == 2:
        return known
    if logits.shape[-1] == 1 or (labels.is_floating_point() and labels.shape != logits.shape):
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def task_loss(model: PreTrainedModel, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that the host itself would compute."""
    logits, problem = upcast(logits), problem_of(model, logits, labels)
    if problem == "regression":
        return F.mse_loss(logits.reshape(-1), labels.reshape(-1).to(logits.dtype))
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    if shifts(model, labels):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def distance(a: Tensor, b: Tensor, labels: Tensor, detach: bool = True, problem: str | None = None) -> Tensor:
    """½[KL(a‖b) + KL(b‖a)] of logits, the mean over texts or real tokens; squared difference for regression."""
    a, b = upcast(a), upcast(b)
    if problem == "regression" or a.shape[-1] == 1:
        return (a - b).square().mean()
    if problem == "multi_label_classification":  # each label is a choice of its own: yes or no
        a, b = (torch.stack([x, torch.zeros_like(x)], -1) for x in (a, b))
        return divergence(a, b, detach).sum(-1).mean()
    each = divergence(a, b, detach)
    if each.dim() < 2:
        return each.mean()
    real = (labels != -100).to(each.dtype)
    return (each * real).sum() / real.sum().clamp(min=1)


def divergence(a: Tensor, b: Tensor, detach: bool) -> Tensor:
    """The symmetric KL over the last dimension."""
    lowest = torch.finfo(torch.float32).min / 8  # not -inf, whose product with a probability of 0 is not a number
    p, q = a.log_softmax(-1).clamp(min=lowest), b.log_softmax(-1).clamp(min=lowest)
    to_p, to_q = (p.detach(), q.detach()) if detach else (p, q)
    one = F.kl_div(q, to_p, reduction="none", log_target=True)
    return (one + F.kl_div(p, to_q, reduction="none", log_target=True)).sum(-1) / 2
