"""AdapterDrop: leave adapters out of the first layers (Rücklé et al. 2021).

    layer   0  1  2 │ 3  4 … L        fixed:   `leave_out` has no module there at all
            ─ left out │ adapters     robust:  `drop_first` leaves out the first n in each training step, n drawn anew

Every bottleneck has both settings. `AdapterDrop`, in bottleneck.py, is the placement that Compacter compares with:
Houlsby without the lowest five layers. What was trained with `drop_first` is prepared for `inlay.leave_out`.
"""

from __future__ import annotations

import torch

from inlay.anatomy.places import Place
from inlay.methods.acting import Draw


class FirstLayers(Draw):
    """Robust AdapterDrop: a training step leaves out the first n layers, n drawn evenly from 0 to the most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left_out = 0

    def draw(self) -> None:
        self.left_out = int(torch.randint(0, self.most + 1, (), device="cpu"))

    def drawn(self) -> int:
        return self.left_out

    def take(self, drawn: int) -> None:
        self.left_out = drawn

    def skips(self, place: Place) -> bool:
        return 0 <= place.layer < self.left_out
