"""2Q: a row gets into the LRU queue only when it is requested again some time after it came.

Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB '94, the full
version with Kin = 25% and Kout = 50% of the slots. New rows go through A1in, a FIFO queue in which requests change
nothing; A1out holds ghosts of rows that left it. A row whose ghost is found goes into Am, an LRU queue. A1in gives the
victim while it is longer than Kin, Am otherwise; what leaves Am is not remembered.

The same as libCacheSim's 0.3.5, request by request, from 4 slots on: below, its A1in has no room and it admits nothing,
while ours has at least one slot.

In a batch all victims leave before the first row comes. Rows on their way into A1in count as being there (the cursor
holds how many), so that a batch of new rows takes its victims from A1in as long as there are any, not from Am.

Invariant: each slot inserted and not yet removed or given as a victim is in one of the two queues, `in_main` says in
which, and `ledger` counts both.
Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.ghosts import (
    FIXED_BYTES,
    Ghosts,
    add_ghost,
    find_ghost,
    key_of,
    make_ghosts,
    remove_ghost,
    resized_ghosts,
)
from tiered_emb.cache.links import cut
from tiered_emb.cache.queues import (
    BYTES_PER_ITEM,
    HEAD_BYTES,
    HEADS,
    ask_for_queue_neighbours,
    empty_queues,
    find_oldest,
    join_queue,
    resized_queues,
)
from tiered_emb.cache.verbs import implement

NEW, MAIN = 0, 1  # A1in and Am
_FLIGHT = 2  # position in the cursor, behind the walks: rows on their way into A1in, into Am


class TwoQState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 2),), queues NEW and MAIN, as in `tiered_emb.cache.queues`.
        in_main: uint8 (S,), whether a slot is in MAIN.
        keys: uint64 (S,), of the row in each slot, for its ghost.
        ledger: int64 (2,), length of each queue.
        ghost_buckets, ghost_keys, ghost_links, ghost_ledger: see `tiered_emb.cache.ghosts`.
    """

    links: NDArray[np.int32]
    in_main: NDArray[np.uint8]
    keys: NDArray[np.uint64]
    ledger: NDArray[np.int64]
    ghost_buckets: NDArray[np.uint64]
    ghost_keys: NDArray[np.uint64]
    ghost_links: NDArray[np.int32]
    ghost_ledger: NDArray[np.int64]


class TwoQ(ArrayPolicy[TwoQState]):
    """A FIFO queue of new rows, ghosts of it, and an LRU queue of rows that came back."""

    bytes_per_slot = BYTES_PER_ITEM + 1 + 8 + 15  # half a ghost of 29.6 bytes

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: heads and ledgers."""
        return HEAD_BYTES + 16 + FIXED_BYTES

    def make(self, capacity_rows: int) -> TwoQState:
        """An empty order without ghosts."""
        return TwoQState(
            empty_queues(capacity_rows),
            zeros(capacity_rows, np.uint8),
            zeros(capacity_rows, np.uint64),
            np.zeros(2, np.int64),
            *make_ghosts(capacity_rows // 2),
        )

    def resized(self, capacity_rows: int) -> TwoQState:
        """The same queues, and the newest of the ghosts."""
        old = self.state
        ghosts = Ghosts(old.ghost_buckets, old.ghost_keys, old.ghost_links, old.ghost_ledger)
        return TwoQState(
            resized_queues(old.links, capacity_rows),
            resized(old.in_main, capacity_rows),
            resized(old.keys, capacity_rows),
            old.ledger.copy(),
            *resized_ghosts(ghosts, capacity_rows // 2),
        )


@njit(forceinline=True)
def _ghosts_of(state):  # type: ignore[no-untyped-def]
    return Ghosts(state.ghost_buckets, state.ghost_keys, state.ghost_links, state.ghost_ledger)


def _miss(state, table, id):  # type: ignore[no-untyped-def]
    """MAIN if the row's ghost was found (it is forgotten), else NEW."""
    ghosts = _ghosts_of(state)
    ghost = find_ghost(ghosts, key_of(table, id))
    if ghost < 0:
        return NEW
    remove_ghost(ghosts, ghost)
    return MAIN


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    state.keys[slot] = key_of(table, id)
    state.in_main[slot] = code
    state.ledger[code] += 1
    join_queue(state.links, code, slot + HEADS)
    return True


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    if state.in_main[slot]:
        cut(state.links, slot + HEADS)
        join_queue(state.links, MAIN, slot + HEADS)
    return True


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_queue_neighbours(state.links, state.in_main, slots, i)


def _remove(state, slot):  # type: ignore[no-untyped-def]
    state.ledger[np.int64(state.in_main[slot])] -= 1
    cut(state.links, slot + HEADS)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """From A1in while it is longer than Kin, else from Am; from the other queue if none may leave there."""
    links, ledger, most = state.links, state.ledger, max(1, len(state.in_main) // 4)
    queue = np.int64(NEW if ledger[NEW] + cursor[_FLIGHT + NEW] > most else MAIN)
    node = find_oldest(links, queue, guard, cursor, queue)
    if node < 0:
        queue = 1 - queue
        node = find_oldest(links, queue, guard, cursor, queue)
    cursor[_FLIGHT + code] += 1
    if node < 0:
        return np.int64(-1)
    cut(links, node)
    ledger[queue] -= 1
    if queue == NEW:
        add_ghost(_ghosts_of(state), state.keys[node - HEADS])
    return node - HEADS


implement(TwoQState, miss=_miss, victim=_victim, insert=_insert, hit=_hit, remove=_remove, ask=_ask)
