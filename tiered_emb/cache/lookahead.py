"""LRU with lookahead: rows that planned batches will ask for leave last, the others in the order of LRU.

A trainer that reads ahead knows some of the future. `foresee` tells the policy which resident rows are needed until
which batch, `advance` which batch it is; a row that is needed by a batch to come is a victim only when no other row may
leave, then again the one used longest ago first. Without foresight it is LRU.

Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.links import BYTES_PER_SLOT, HEAD_BYTES, ask_for_neighbours, cut, join_newest
from tiered_emb.cache.verbs import implement, may_leave
from tiered_emb.intrinsics import prefetch_item

_NOW_BYTES = 8


class LookaheadState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 1),), a list as in `tiered_emb.cache.links`.
        needed: int64 (S,), the last batch that is known to need the row.
        now: int64 (1,), the batch that is being worked on.
    """

    links: NDArray[np.int32]
    needed: NDArray[np.int64]
    now: NDArray[np.int64]


class Lookahead(ArrayPolicy[LookaheadState]):
    """Least recently used first among the rows that no planned batch needs."""

    bytes_per_slot = BYTES_PER_SLOT + 8
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head and the batch."""
        return HEAD_BYTES + _NOW_BYTES

    def make(self, capacity_rows: int) -> LookaheadState:
        """An empty order, before the first batch."""
        return LookaheadState(
            zeros(2 * (capacity_rows + 1), np.int32), zeros(capacity_rows, np.int64), np.zeros(1, np.int64)
        )

    def resized(self, capacity_rows: int) -> LookaheadState:
        """The same order of fewer or more slots."""
        links, needed, now = self.state
        return LookaheadState(resized(links, 2 * (capacity_rows + 1)), resized(needed, capacity_rows), now.copy())

    def foresee(self, slots: NDArray[np.int32], batch: int) -> None:
        """Slots (N,) hold rows that this batch will need; batches are numbered in their order, from 1 on."""
        _foresee(self.state.needed, slots, batch)

    def advance(self, batch: int) -> None:
        """It is this batch's turn: what it needs it asks for itself."""
        self.state.now[0] = batch


@njit(nogil=True, cache=True)
def _foresee(needed, slots, batch):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        needed[slots[i]] = max(needed[slots[i]], batch)


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    cut(state.links, slot + 1)
    join_newest(state.links, slot + 1)
    return True


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    state.needed[slot] = 0
    join_newest(state.links, slot + 1)
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    cut(state.links, slot + 1)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_neighbours(state.links, slots, i)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """cursor is the node to go on at (-1 = behind the newest one) and the pass: 1 takes needed rows too."""
    links, node = state.links, cursor[0]
    if node == 0:
        node = np.int64(links[1])
    while True:
        if node <= 0:
            if cursor[1] == 1:
                cursor[0] = -1
                return np.int64(-1)
            cursor[1] = 1
            node = np.int64(links[1])
            if node == 0:
                continue
        newer = np.int64(links[2 * node + 1])
        prefetch_item(links, 2 * newer)
        cursor[0] = newer if newer > 0 else -1
        needless = state.needed[node - 1] <= state.now[0]
        if (needless or cursor[1] == 1) and may_leave(guard, node - 1):
            cut(links, node)
            return node - 1
        node = newer


implement(LookaheadState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
