"""Rows of tokens with labels, as transformers.Trainer takes them."""

from __future__ import annotations

import torch

from tests.hosts import batch


class Texts(torch.utils.data.Dataset):
    def __init__(self, rows: int = 12) -> None:
        self.inputs = batch(rows)

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    def __getitem__(self, at: int) -> dict:
        return {k: v[at] for k, v in self.inputs.items()} | {"labels": torch.tensor(at % 3)}
