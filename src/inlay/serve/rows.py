"""A server's answers as `inlay predict` writes them beside a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DIGITS = 6


def predicted(kind: str, labels: Sequence[str], said: Any) -> dict[str, Any]:
    """One answer of /v1/classify by the names of its columns."""
    if kind == "regression":
        return {"prediction": said["value"]}
    if kind == "text":
        return {"prediction": said["text"]}
    if kind == "spans":
        return {"answer": said["text"], "probability": round(said["score"], DIGITS)}
    if kind == "tags":
        return {
            "tags": [entry["label"] for entry in said],
            "probabilities": [round(entry["score"], DIGITS) for entry in said],
        }
    if kind == "choice":
        whole = sorted(said, key=lambda entry: entry["index"])
        known = [entry["score"] for entry in whole if entry["score"] is not None]
        return {"prediction": said[0]["index"]} | ({"probabilities": known} if known else {})
    scores = {entry["label"]: entry["score"] for entry in said}
    if said[0]["score"] is None:  # the host wrote its answer
        told = {"said": said[0]["said"]} if said[0].get("said") is not None else {}
        return {"label": said[0]["label"], "probabilities": None} | told
    shares = {label: round(scores[label], DIGITS) for label in labels}
    if kind == "multilabel":
        return {"labels": [label for label in labels if scores[label] > 0.5], "probabilities": shares}
    return {"label": said[0]["label"], "probabilities": shares}
