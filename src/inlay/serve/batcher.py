"""Which rows run together: a budget of tokens, rows of like length, clients in turn.

    clients   a: ▭▭▭▭▭▭▭▭  b: ▬  c: ▭▬
    batch 1   a ▭ ▭ ▭ ▭  c ▭          every batch begins with the first row of the client whose turn it is, so that no
    batch 2   b ▬  c ▬                row and no client waits for ever; the rows nearest to it in length join while
    batch 3   a ▭ ▭ ▭ ▭               rows × longest ≤ budget; all clients are asked for them, for one each at a time

Only rows of one group run together: those of hosts that answer with logits are all in one; what acts on something that
all rows share has a group of its own. The batcher knows neither threads nor clocks; the engine has both.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice, zip_longest
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A row in the queue."""

    length: int
    """Tokens."""
    group: Hashable

    @property
    def arrived(self) -> float:
        """When its request came."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it."""
        ...


R = TypeVar("R", bound=Waiting)


class Batcher(Generic[R]):
    """The queue."""

    def __init__(self, rows: int, tokens: int, wait: float) -> None:
        self.rows, self.tokens, self.wait = rows, tokens, wait
        self.clients: OrderedDict[str, deque[R]] = OrderedDict()

    def add(self, client: str, rows: Iterable[R]) -> None:
        self.clients.setdefault(client, deque()).extend(rows)

    def __len__(self) -> int:
        return sum(map(len, self.clients.values()))

    def __iter__(self) -> Iterator[R]:
        for rows in self.clients.values():
            yield from rows

    def ready_at(self) -> float | None:
        """From when on a batch should begin: at once where one is full; None where nothing waits."""
        if not self.clients:
            return None
        if len(self) >= self.rows or sum(row.length for row in self) >= self.tokens:
            return 0.0
        return min(rows[0].arrived for rows in self.clients.values()) + self.wait

    def take(self) -> list[R]:
        """The next batch, sorted by length; empty where nothing waits."""
        self.drop_unwanted()
        if not self.clients:
            return []
        first = next(iter(self.clients))
        self.clients.move_to_end(first)  # the next batch begins with another client
        head = self.clients[first][0]
        fair = (row for row in self._in_turn(first) if row.group == head.group and row is not head)
        near = sorted(islice(fair, 4 * self.rows), key=lambda row: abs(row.length - head.length))
        batch, longest = [head], head.length
        for row in near:
            if len(batch) == self.rows:
                break
            if (len(batch) + 1) * max(longest, row.length) <= self.tokens:
                batch.append(row)
                longest = max(longest, row.length)
        taken = set(map(id, batch))
        self._keep(lambda row: id(row) not in taken)
        return sorted(batch, key=lambda row: row.length)

    def drop_unwanted(self) -> None:
        """Let the rows go that nobody waits for any more."""
        self._keep(lambda row: row.wanted)

    def _in_turn(self, first: str) -> Iterator[R]:
        """One row of each client, then the second of each, and so on; `first` before the others."""
        others = [rows for client, rows in self.clients.items() if client != first]
        for turn in zip_longest(self.clients[first], *others):
            yield from (row for row in turn if row is not None)

    def _keep(self, good: Callable[[R], bool]) -> None:
        for client, rows in list(self.clients.items()):
            left = deque(filter(good, rows))
            if left:
                self.clients[client] = left
            else:
                del self.clients[client]
