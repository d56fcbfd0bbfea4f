"""Answers as JSON, by the kind of the task.

classification    [{"label", "score"}, …]            all labels, the likeliest first
multilabel        [{"label", "score"}, …]            all labels; those that are said have a score above 0.5
choice            [{"label", "score", "index"}, …]   all choices, the likeliest first
tags              [{"word", "label", "score"}, …]    every word
regression        {"value"}
spans             {"text", "score"}
text              {"text"}

A host that writes its answer gives one label and no score; what it wrote stands beside it where that is no label.
"""

from __future__ import annotations

from typing import Any

from inlay.data.examples import Example
from inlay.data.task import Task
from inlay.training.codec import Answer


def as_json(task: Task, example: Example, answer: Answer) -> Any:
    """One answer."""
    said = answer.prediction
    if task.kind == "tags":
        assert isinstance(said, tuple)
        rows = zip(example.words, said, answer.probabilities or (), strict=True)
        return [{"word": word, "label": task.labels[i], "score": score} for word, i, score in rows]
    if task.kind == "regression":
        return {"value": float(said)}  # type: ignore[arg-type]
    if task.kind == "spans":
        return {"text": said, "score": (answer.probabilities or (0.0,))[0]}
    if task.kind == "text":
        return {"text": said}
    return _labels(task, example, answer)


def _labels(task: Task, example: Example, answer: Answer) -> list[dict[str, Any]]:
    if task.kind == "choice":
        names = [choice if choice is not None else text for text, choice in example.texts]
        whole: list[dict[str, Any]] = [{"label": name, "score": None, "index": i} for i, name in enumerate(names)]
    else:
        whole = [{"label": name, "score": None} for name in task.labels]
    if answer.probabilities:
        shares = zip(whole, answer.probabilities, strict=False)  # beside rows with more choices there are zeros
        scored = [entry | {"score": score} for entry, score in shares]
        return sorted(scored, key=lambda entry: -entry["score"])
    if isinstance(answer.prediction, int) and answer.prediction >= 0:
        return [whole[answer.prediction]]
    return [{"label": None, "score": None, "said": str(answer.prediction) if answer.said is None else answer.said}]
