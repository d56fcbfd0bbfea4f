"""No maths at any site: an inlay that is only a head, as the baseline 'head only' and for full fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from inlay.anatomy.places import Place
from inlay.anatomy.survey import Anatomy
from inlay.methods.base import Method, register


@register("head")
class HeadOnly(Method):
    """An inlay without modules; give it a head."""

    rate: ClassVar[float] = 1e-3
    standalone: ClassVar[bool] = False

    def places(self, anatomy: Anatomy) -> Iterator[Place]:
        return iter(())
