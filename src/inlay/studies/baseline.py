"""The baseline that needs no training of the host: logistic regression on its mean-pooled embeddings (scikit-learn).

text          u                            the mean of the last hidden states over real tokens, of length 1
pair          u, v, |u − v|, u · v         as is usual for sentence pairs
choice        one row for each choice, right or not; the likeliest is the answer
regression    ridge regression instead, its strength 1 / C

C is chosen by the validation rows, like everything in a study.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from inlay.data import Prepared, Task
from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.errors import ConfigError
from inlay.training.workbench import longest_input

BATCH = 64
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Fitted:
    """What was fitted, and what it said."""

    said: list[int] | list[float]
    """About the judged rows."""
    validation: dict[str, float]
    trained_parameters: int
    host_parameters: int
    seconds: float
    C: float | None = None


def fit(host_name: str, prepared: Prepared, strengths: Sequence[float], max_length: int) -> Fitted:
    """Embed every row once, fit one regression for each C, and keep the best on the validation rows."""
    task, began = prepared.task, time.monotonic()
    if task.kind not in ("classification", "regression", "choice"):
        raise ConfigError(
            f"{task.name} ({task.kind}): regression on embeddings answers classification, regression, choice."
        )
    embed = _Embedder(host_name, max_length)
    train, judged = (_features(embed, part) for part in (prepared.train, prepared.split(prepared.judge)))
    validation = _features(embed, prepared.validation) if prepared.validation else judged[:0]
    best: tuple[float, Fitted] | None = None
    if not prepared.validation:  # nothing to choose by
        strengths = [1.0 if 1.0 in strengths else strengths[0]]
    for strength in strengths:
        model = _model(task, strength)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a regression that has not quite converged is judged like any other
            model.fit(train, _targets(task, prepared.train))
        seen: dict[str, float] = {}
        if prepared.validation:
            targets, groups = zip(*((e.target, e.group) for e in prepared.validation), strict=True)
            seen = score(task, list(targets), _said(task, model, validation, prepared.validation), list(groups))
        value = seen.get(task.main, 0.0)
        if best is None or value > best[0]:
            size = int(np.size(model.coef_) + np.size(model.intercept_))
            said = _said(task, model, judged, prepared.split(prepared.judge))
            parameters = sum(p.numel() for p in embed.host.parameters())
            best = value, Fitted(said, seen, size, parameters, 0.0, strength)
    assert best is not None
    return replace(best[1], seconds=round(time.monotonic() - began, 3))


def _model(task: Task, strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    return Ridge(alpha=1 / strength) if task.kind == "regression" else LogisticRegression(C=strength, max_iter=1000)


def _targets(task: Task, examples: Sequence[Example]) -> list[Any]:
    if task.kind == "choice":
        return [int(i == example.target) for example in examples for i in range(len(example.texts))]
    return [example.target for example in examples]


def _said(task: Task, model: Any, features: Array, examples: Sequence[Example]) -> Any:
    if task.kind != "choice":
        return model.predict(features).tolist()
    scores, found, at = model.decision_function(features), [], 0
    for example in examples:
        found.append(int(np.argmax(scores[at : at + len(example.texts)])))
        at += len(example.texts)
    return found


def _features(embed: _Embedder, examples: Sequence[Example]) -> Array:
    """(texts, D), or (texts, 4 D) for pairs."""
    texts = [text for example in examples for text in example.texts]
    first = embed([text for text, _ in texts])
    if all(pair is None for _, pair in texts):
        return first
    second = embed([pair or "" for _, pair in texts])
    return np.concatenate([first, second, np.abs(first - second), first * second], axis=1)


class _Embedder:
    """Texts as the mean of the host's last hidden states."""

    def __init__(self, name: str, max_length: int) -> None:
        host = transformers.AutoModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
        self.host = (host.get_encoder() if host.config.is_encoder_decoder else host).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.max_length = longest_input(host.config, self.tokenizer, max_length)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Array:
        different = list(dict.fromkeys(texts))
        order = sorted(range(len(different)), key=lambda i: len(different[i]))
        made = torch.zeros(len(different), self.host.config.hidden_size)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = self.tokenizer(
                [different[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            )
            hidden = self.host(**batch).last_hidden_state  # (B, T, D)
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            made[rows] = torch.nn.functional.normalize(mean, dim=-1)
        at = {text: i for i, text in enumerate(different)}
        return made[[at[text] for text in texts]].numpy()
