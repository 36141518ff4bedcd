"""What a policy is: the order in which slots give up their rows, behind four batch verbs, `resize` and `clear`.

A policy keeps an order of slots and nothing else: no ids, no pins of its own, no rows. The Directory tells it what
happened and asks it for victims. A new policy is one file with a class like `lru.Lru`, one line in `POLICIES`, and one
line in the policies' contract test.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache.lfu import Lfu
from tiered_emb.cache.lru import Lru


class Policy(Protocol):
    """An order of slots. Every slot given to `touch` or `remove` was inserted and is still in the order."""

    bytes_per_slot: int

    def __init__(self, capacity_rows: int) -> None: ...

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Most bytes it comes to hold beyond `bytes_per_slot` a slot."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""

    def insert(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Slots (N,), not in the order, got new rows that were requested `counts` (N,) times each."""

    def touch(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Slots (N,) were requested `counts` (N,) times each, in this order."""

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Slots (N,) lost their rows."""

    def victims(self, n: int, pins: NDArray[np.uint16], out: NDArray[np.int32]) -> int:
        """Take n slots whose `pins` (S,) are 0 out of the order into out[:n], first victim first; returns how many."""

    def resize(self, capacity_rows: int) -> None:
        """Slots at and above the new capacity are gone already; the others keep their order."""

    def clear(self) -> None:
        """Forget every slot."""


POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
}
