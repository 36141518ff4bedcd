"""CLOCK: the victim is the row admitted longest ago that was not requested since the hand last passed it.

Corbató, "A paging experiment with the Multics system", 1968, with one bit a row. The clock is a list: where the hand
would pass a row whose bit is set, the bit is cleared and the row becomes the newest. `count` requests set the bit as
one does; a row that is admitted for more than one request has it set.
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


class ClockState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 1),), a list as in `tiered_emb.cache.links`.
        visited: uint8 (S,), whether a row was requested since the hand passed it.
    """

    links: NDArray[np.int32]
    visited: NDArray[np.uint8]


class Clock(ArrayPolicy[ClockState]):
    """Oldest first, with a second chance for rows that were requested."""

    bytes_per_slot = BYTES_PER_SLOT + 1
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head."""
        return HEAD_BYTES

    def make(self, capacity_rows: int) -> ClockState:
        """An empty order."""
        return ClockState(zeros(2 * (capacity_rows + 1), np.int32), zeros(capacity_rows, np.uint8))

    def resized(self, capacity_rows: int) -> ClockState:
        """The same order of fewer or more slots."""
        return ClockState(
            resized(self.state.links, 2 * (capacity_rows + 1)), resized(self.state.visited, capacity_rows)
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
    cut(state.links, slot + 1)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """One pass along the list: a row that gets its second chance is met again behind the others."""
    links, node = state.links, cursor[0]
    if node == 0:
        node = np.int64(links[1])
    while node > 0:
        newer = np.int64(links[2 * node + 1])
        prefetch_item(links, 2 * newer)
        cursor[0] = newer if newer > 0 else -1
        if may_leave(guard, node - 1):
            cut(links, node)
            if state.visited[node - 1] == 0 or newer == 0:  # who is last has nobody to stand behind
                return node - 1
            state.visited[node - 1] = 0
            join_newest(links, node)
        node = newer
    return np.int64(-1)


implement(ClockState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
