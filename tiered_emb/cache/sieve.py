"""SIEVE: a hand goes from the oldest row to the newest and takes the first one that was not requested since it passed.

Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
caches", NSDI '24. Unlike in CLOCK a row that is kept stays where it is, so new rows are looked at soon. `count`
requests set the bit as one does; a row that is admitted for more than one request has it set.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.links import BYTES_PER_SLOT, HEAD_BYTES, cut, join_newest
from tiered_emb.cache.verbs import implement, may_leave
from tiered_emb.intrinsics import prefetch_item

_AHEAD = 12


class SieveState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 1),), a list as in `tiered_emb.cache.links`.
        visited: uint8 (S,), whether a row was requested since the hand passed it.
        hand: int32 (1,), the node to be looked at next, 0 = the oldest one.
    """

    links: NDArray[np.int32]
    visited: NDArray[np.uint8]
    hand: NDArray[np.int32]


class Sieve(ArrayPolicy[SieveState]):
    """The hand's next row that was not requested since the hand passed it."""

    bytes_per_slot = BYTES_PER_SLOT + 1
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head and the hand."""
        return HEAD_BYTES + 4

    def make(self, capacity_rows: int) -> SieveState:
        """An empty order."""
        return SieveState(
            zeros(2 * (capacity_rows + 1), np.int32), zeros(capacity_rows, np.uint8), np.zeros(1, np.int32)
        )

    def resized(self, capacity_rows: int) -> SieveState:
        """The same order of fewer or more slots."""
        return SieveState(
            resized(self.state.links, 2 * (capacity_rows + 1)),
            resized(self.state.visited, capacity_rows),
            self.state.hand.copy(),
        )


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    state.visited[slot] = 1
    return True


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    state.visited[slot] = count > 1
    join_newest(state.links, slot + 1)
    return True


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    prefetch_item(state.visited, np.int64(slots[min(i + _AHEAD, len(slots) - 1)]))


def _remove(state, slot):  # type: ignore[no-untyped-def]
    if state.hand[0] == slot + 1:
        state.hand[0] = state.links[2 * (slot + 1) + 1]
    cut(state.links, slot + 1)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """A round to clear bits, and one to find a row that may leave; the hand stays where it was if there is none."""
    links, node, begun = state.links, np.int64(state.hand[0]), np.int64(0)
    while begun < 3:
        if node == 0:
            node = np.int64(links[1])
            begun += 1
            if node == 0:
                return np.int64(-1)
        newer = np.int64(links[2 * node + 1])
        prefetch_item(links, 2 * newer)
        if may_leave(guard, node - 1):
            if state.visited[node - 1] == 0:
                state.hand[0] = newer
                cut(links, node)
                return node - 1
            state.visited[node - 1] = 0
        node = newer
    return np.int64(-1)


implement(SieveState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
