"""SetFit as a rival in a study, by its own library: the host learns which texts share a label, then a regression fits.

The rows, the seed and where texts are cut are the study's; the rest is SetFit's own, unless the way says otherwise: one
epoch of pairs, 16 at a time, a rate of 2e-5, scikit-learn's logistic regression (with more steps).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from inlay.data import Prepared
from inlay.data.examples import Example
from inlay.data.metrics import score
from inlay.errors import ConfigError
from inlay.studies.baseline import Fitted


def fit(host_name: str, prepared: Prepared, max_length: int, seed: int, how: Mapping[str, Any]) -> Fitted:
    """Train SetFit on the training rows, and ask it about the others."""
    task = prepared.task
    if task.kind != "classification" or any(len(e.texts) != 1 or e.texts[0][1] is not None for e in prepared.train):
        raise ConfigError(f"{task.name}: SetFit answers classification of single texts.")
    try:
        import setfit
    except ModuleNotFoundError as error:
        raise ConfigError(f"kind setfit needs SetFit ({error}): pip install 'inlay[setfit]'") from None
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sklearn.linear_model import LogisticRegression
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    began = time.monotonic()
    with _quiet(setfit), TemporaryDirectory() as scratch:
        body = SentenceTransformer(host_name)
        body.max_seq_length = min(max_length, body.max_seq_length or max_length)
        model = setfit.SetFitModel(model_body=body, model_head=LogisticRegression(max_iter=1000))
        said = setfit.TrainingArguments(
            output_dir=scratch, batch_size=int(how["batch_size"]), num_epochs=int(how["epochs"]),
            body_learning_rate=float(how["lr"]), seed=seed, save_strategy="no", report_to="none",
            show_progress_bar=False,
        )  # fmt: skip
        rows = {"text": _texts(prepared.train), "label": [example.target for example in prepared.train]}
        trainer = setfit.Trainer(model=model, args=said, train_dataset=Dataset.from_dict(rows))
        for bar in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(bar)
        trainer.train()
        answers = {
            split: [int(label) for label in model.predict(_texts(examples), as_numpy=True, show_progress_bar=False)]
            for split in ("validation", prepared.judge)
            if (examples := getattr(prepared, split))
        }
    validation: dict[str, float] = {}
    if prepared.validation:
        targets, groups = zip(*((e.target, e.group) for e in prepared.validation), strict=True)
        validation = score(task, list(targets), answers["validation"], list(groups))
    size = sum(parameter.numel() for parameter in body.parameters())
    head = model.model_head.coef_.size + model.model_head.intercept_.size
    return Fitted(answers[prepared.judge], validation, size + head, size, round(time.monotonic() - began, 3))


def _texts(examples: Sequence[Example]) -> list[str]:
    return [example.texts[0][0] for example in examples]


@contextmanager
def _quiet(setfit: Any) -> Iterator[None]:
    """Without what SetFit and the libraries below it say of every run."""
    import datasets

    loud = setfit.logging.get_verbosity()
    bars = datasets.utils.are_progress_bars_disabled()
    setfit.logging.set_verbosity_error()
    datasets.utils.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        setfit.logging.set_verbosity(loud)
        if not bars:
            datasets.utils.enable_progress_bars()
