"""What a fusion listens to on some rows."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from inlay.analysis.activations import FusionActivations, fusion_activations
from inlay.analysis.plots import plot_fusion
from inlay.learning.batching import reading_batches
from inlay.learning.evaluate import BATCH
from inlay.learning.material import Split


def attention_on(host: PreTrainedModel, fusion: str, split: Split) -> FusionActivations:
    """Mean attention per place and member over the rows' real tokens."""
    batches = []
    for rows in reading_batches(split.features.lengths, BATCH):
        batch = split.features.batch(rows)
        batch.pop("there", None)
        batches.append({name: tensor.to(host.device) for name, tensor in batch.items()})
    return fusion_activations(host, fusion, batches)


def heat_map(seen: FusionActivations) -> str:
    """Members × layers as an <svg> element."""
    with TemporaryDirectory() as folder:
        drawn = plot_fusion(seen, Path(folder) / "heat")[1].read_text(encoding="utf-8")
    return drawn[drawn.index("<svg") :]
