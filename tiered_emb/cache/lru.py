"""Exact LRU: the victim is the row whose last request is longest ago.

Invariant: the nodes reachable from the head are exactly the slots inserted and not yet removed or given as victims.
Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.links import BYTES_PER_SLOT, HEAD_BYTES, ask_for_neighbours, cut, join_newest, take_oldest
from tiered_emb.cache.verbs import implement


class LruState(NamedTuple):
    """`links` int32 (2 (S + 1),): a list as in `tiered_emb.cache.links`."""

    links: NDArray[np.int32]


class Lru(ArrayPolicy[LruState]):
    """Least recently used first; counts do not matter."""

    kind: ClassVar[type[LruState]] = LruState
    bytes_per_slot = BYTES_PER_SLOT
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head."""
        return HEAD_BYTES

    def make(self, capacity_rows: int) -> LruState:
        """An empty order."""
        return self.kind(zeros(2 * (capacity_rows + 1), np.int32))

    def resized(self, capacity_rows: int) -> LruState:
        """The same order of fewer or more slots."""
        return self.kind(resized(self.state.links, 2 * (capacity_rows + 1)))


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    cut(state.links, slot + 1)
    join_newest(state.links, slot + 1)
    return True


def insert_newest(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    """The verb `insert`."""
    join_newest(state.links, slot + 1)
    return True


def remove_slot(state, slot):  # type: ignore[no-untyped-def]
    """The verb `remove`."""
    cut(state.links, slot + 1)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_neighbours(state.links, slots, i)


def take_oldest_slot(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """The verb `victim`."""
    return take_oldest(state.links, guard, cursor)


implement(LruState, hit=_hit, insert=insert_newest, remove=remove_slot, victim=take_oldest_slot, ask=_ask)
