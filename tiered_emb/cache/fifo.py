"""FIFO: the victim is the row that was admitted longest ago.

Invariant: the nodes reachable from the head are exactly the slots inserted and not yet removed or given as victims.
Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.links import BYTES_PER_SLOT, HEAD_BYTES, cut, join_newest, take_oldest
from tiered_emb.cache.verbs import implement


class FifoState(NamedTuple):
    """`links` int32 (2 (S + 1),): a list as in `tiered_emb.cache.links`."""

    links: NDArray[np.int32]


class Fifo(ArrayPolicy[FifoState]):
    """First in, first out; requests change nothing."""

    bytes_per_slot = BYTES_PER_SLOT
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head."""
        return HEAD_BYTES

    def make(self, capacity_rows: int) -> FifoState:
        """An empty order."""
        return FifoState(zeros(2 * (capacity_rows + 1), np.int32))

    def resized(self, capacity_rows: int) -> FifoState:
        """The same order of fewer or more slots."""
        return FifoState(resized(self.state.links, 2 * (capacity_rows + 1)))


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    return True


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    join_newest(state.links, slot + 1)
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    cut(state.links, slot + 1)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    return take_oldest(state.links, guard, cursor)


implement(FifoState, hit=_hit, insert=_insert, remove=_remove, victim=_victim)
