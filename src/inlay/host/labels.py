"""The labels that a host shows: its own, or those of the heads that are active."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from inlay.host.heads import Head

SAVE = "save_pretrained"


class Labels:
    """What losses and pipelines of transformers ask a host for.

    What `save_pretrained` writes has the host's own labels, because it has the host's own head.
    """

    def __init__(self, host: PreTrainedModel) -> None:
        self.host = host
        self.others = False
        """Whether the host shows those of an own head."""
        self._remember()

    def _remember(self) -> None:
        config: Any = self.host.config
        self.count: int | None = getattr(self.host, "num_labels", None)
        self.names: dict[int, str] | None = getattr(config, "id2label", None)
        self.numbers: dict[str, int] | None = getattr(config, "label2id", None)
        self.problem: str | None = getattr(config, "problem_type", None)

    def show(self, rows: Sequence[Sequence[Head]]) -> None:
        """Show the labels of the active heads; if these differ, numbered ones, as many as the widest head has.

        rows: the own heads of all rows together, or of each part of Rows; where there are none, the host's own acts.
        """
        heads = [head for row in rows for head in row if head.names is not None]
        if heads and not self.others:
            self._remember()
            vars(self.host)[SAVE] = self.save_pretrained
        elif self.others and not heads:
            self.put_back()
        if heads:
            kinds = {head.names or () for head in heads}
            if any(not row or any(head.names is None for head in row) for row in rows):
                kinds.add(tuple((self.names or {}).values()))  # what some rows have is the host's own
            widest = max(kinds, key=len)  # Rows over several tasks: as wide as the widest
            names = widest if len(kinds) == 1 else tuple(f"LABEL_{i}" for i in range(len(widest)))
            numbers = {name: i for i, name in enumerate(names)}
            self._say(len(names), dict(enumerate(names)), numbers, heads[0].problem_type)
        self.others = bool(heads)

    def put_back(self) -> None:
        """Show the host's own labels again."""
        if self.others:
            vars(self.host).pop(SAVE, None)
            self._say(self.count, self.names, self.numbers, self.problem)
            self.others = False

    def keep(self) -> None:
        """What the host shows is its own from now on: it has the active head for good."""
        vars(self.host).pop(SAVE, None)
        self.others = False

    def _say(
        self, count: int | None, names: dict[int, str] | None, numbers: dict[str, int] | None, problem: str | None
    ) -> None:
        config: Any = self.host.config
        if self.count is not None:
            self.host.num_labels = count  # type: ignore[assignment]
        if self.names is not None:
            config.id2label, config.label2id, config.problem_type = names, numbers, problem

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """What the host's own does, with its own labels."""
        with self._own():
            return type(self.host).save_pretrained(self.host, *args, **kwargs)

    @contextmanager
    def _own(self) -> Iterator[None]:
        config: Any = self.host.config
        shown: Any = getattr(self.host, "num_labels", None)
        told = {name: getattr(config, name, None) for name in ("id2label", "label2id", "problem_type")}
        self._say(self.count, self.names, self.numbers, self.problem)
        try:
            yield
        finally:
            self._say(shown, *told.values())
