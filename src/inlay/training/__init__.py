"""From rows to a trained host: codec, batches, objectives, the loop, evaluation."""
