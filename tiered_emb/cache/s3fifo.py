"""S3-FIFO: new rows pass through a small queue, and only those requested again there get into the main one.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP '23. Three FIFO queues: small
(a tenth of the slots), main (the others), and ghosts (names of rows, nine tenths of the slots) that left from small.
Each row counts its requests since admission, up to 3. What leaves small goes to main if it was requested at least
twice more, else it is the victim and becomes a ghost. What comes to the end of main starts anew with its count lowered
by one, or is the victim if the count is 0. A row whose ghost is found goes straight into main.

Where the paper leaves a choice ours is libCacheSim's 0.3.5: main gives a victim when it is longer than its share or
small is empty, small otherwise; a row that moves to main starts there with a count of 0; and before anything was ever
evicted, what no longer fits into small goes into main. Our own: small has at least one slot, where libCacheSim admits
nothing into fewer than 20; after a growth the larger cache fills as a new one.

In a batch all victims leave before the first row comes. Rows on their way into main count as being there (the cursor
holds how many), so that a batch of returning rows takes its victims from main as single requests would.

Invariant: each slot inserted and not yet removed or given as a victim is in one of the two queues, `queue_of` its mark
says in which, and `ledger` counts both.
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
    begin_walk,
    empty_queues,
    join_queue,
    next_on_walk,
    resized_queues,
)
from tiered_emb.cache.verbs import implement, may_leave
from tiered_emb.intrinsics import prefetch_item

SMALL, MAIN = 0, 1
_EVICTED = 2  # position in the ledger, behind the lengths of the queues
_MOVES_TO_MAIN, _MOST = 2, 3
_IN_MAIN, _COUNT = 4, 3  # bits of a mark
_FLIGHT = 2  # position in the cursor, behind the walks: rows on their way into small, into main
_AHEAD = 12


class S3FifoState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 2),), queues SMALL and MAIN, as in `tiered_emb.cache.queues`.
        marks: uint8 (S,), requests since admission (0 to 3), and _IN_MAIN.
        keys: uint64 (S,), of the row in each slot, for its ghost.
        ledger: int64 (3,), length of small and of main, and whether anything was evicted.
        ghost_buckets, ghost_keys, ghost_links, ghost_ledger: see `tiered_emb.cache.ghosts`.
    """

    links: NDArray[np.int32]
    marks: NDArray[np.uint8]
    keys: NDArray[np.uint64]
    ledger: NDArray[np.int64]
    ghost_buckets: NDArray[np.uint64]
    ghost_keys: NDArray[np.uint64]
    ghost_links: NDArray[np.int32]
    ghost_ledger: NDArray[np.int64]


class S3Fifo(ArrayPolicy[S3FifoState]):
    """A small queue on probation, a main queue with second chances, ghosts of the small one."""

    bytes_per_slot = BYTES_PER_ITEM + 1 + 8 + 27  # 0.9 ghosts of 29.6 bytes

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: heads and ledgers."""
        return HEAD_BYTES + 24 + FIXED_BYTES

    def make(self, capacity_rows: int) -> S3FifoState:
        """An empty order without ghosts."""
        return S3FifoState(
            empty_queues(capacity_rows),
            zeros(capacity_rows, np.uint8),
            zeros(capacity_rows, np.uint64),
            np.zeros(3, np.int64),
            *make_ghosts(_ghost_capacity(capacity_rows)),
        )

    def resized(self, capacity_rows: int) -> S3FifoState:
        """The same queues, and the newest of the ghosts."""
        old = self.state
        ledger = old.ledger.copy()
        ledger[_EVICTED] &= capacity_rows <= len(old.marks)
        ghosts = Ghosts(old.ghost_buckets, old.ghost_keys, old.ghost_links, old.ghost_ledger)
        return S3FifoState(
            resized_queues(old.links, capacity_rows),
            resized(old.marks, capacity_rows),
            resized(old.keys, capacity_rows),
            ledger,
            *resized_ghosts(ghosts, _ghost_capacity(capacity_rows)),
        )


def _ghost_capacity(capacity_rows: int) -> int:
    return capacity_rows * 9 // 10


@njit(forceinline=True)
def _small_share(state):  # type: ignore[no-untyped-def]
    """Slots of the small queue."""
    return max(1, len(state.marks) // 10)


@njit(forceinline=True)
def _ghosts_of(state):  # type: ignore[no-untyped-def]
    return Ghosts(state.ghost_buckets, state.ghost_keys, state.ghost_links, state.ghost_ledger)


@njit(forceinline=True)
def queue_of(mark):  # type: ignore[no-untyped-def]
    """The queue that a slot with this mark is in."""
    return MAIN if mark & _IN_MAIN else SMALL


def _miss(state, table, id):  # type: ignore[no-untyped-def]
    """1 if the row's ghost was found (it is forgotten), else 0."""
    ghosts = _ghosts_of(state)
    ghost = find_ghost(ghosts, key_of(table, id))
    if ghost < 0:
        return 0
    remove_ghost(ghosts, ghost)
    return 1


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    ledger, queue = state.ledger, np.int64(code)
    if queue == SMALL and ledger[_EVICTED] == 0 and ledger[SMALL] >= _small_share(state):
        queue = np.int64(MAIN)
    state.keys[slot] = key_of(table, id)
    state.marks[slot] = min(count - 1, _MOST) + _IN_MAIN * queue
    ledger[queue] += 1
    join_queue(state.links, queue, slot + HEADS)
    return True


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    mark = np.int64(state.marks[slot])
    state.marks[slot] = (mark & _IN_MAIN) + min((mark & _COUNT) + count, _MOST)
    return True


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    prefetch_item(state.marks, np.int64(slots[min(i + _AHEAD, len(slots) - 1)]))


def _remove(state, slot):  # type: ignore[no-untyped-def]
    state.ledger[queue_of(state.marks[slot])] -= 1
    cut(state.links, slot + HEADS)


@njit(forceinline=True)
def _leaves_small(state, guard, cursor):  # type: ignore[no-untyped-def]
    """The victim of the small queue, -1 if none may leave; those before it that were requested twice move to main."""
    links, marks, node = state.links, state.marks, begin_walk(state.links, SMALL, cursor, SMALL)
    while node >= HEADS:
        newer, slot = next_on_walk(links, node, cursor, SMALL), node - HEADS
        if may_leave(guard, slot):
            cut(links, node)
            state.ledger[SMALL] -= 1
            if marks[slot] < _MOVES_TO_MAIN:
                return slot
            marks[slot] = _IN_MAIN
            state.ledger[MAIN] += 1
            join_queue(links, MAIN, node)
            cursor[MAIN] = node if cursor[MAIN] < 0 else cursor[MAIN]
        node = newer
    cursor[SMALL] = -1
    return np.int64(-1)


@njit(forceinline=True)
def _leaves_main(state, guard, cursor):  # type: ignore[no-untyped-def]
    """The victim of the main queue, -1 if none may leave; those before it whose count is not 0 start anew."""
    links, marks, node = state.links, state.marks, begin_walk(state.links, MAIN, cursor, MAIN)
    while node >= HEADS:
        newer, slot = next_on_walk(links, node, cursor, MAIN), node - HEADS
        if may_leave(guard, slot):
            cut(links, node)
            if marks[slot] == _IN_MAIN:
                state.ledger[MAIN] -= 1
                return slot
            marks[slot] -= 1
            join_queue(links, MAIN, node)
            newer = node if newer < 0 else newer  # it is met again, behind the others
        node = newer
    cursor[MAIN] = -1
    return np.int64(-1)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """From the queue whose turn it is, else the other one; what small moved to main may leave as well."""
    ledger = state.ledger
    main_share = len(state.marks) - _small_share(state)
    turn, slot = 0 if ledger[MAIN] + cursor[_FLIGHT + MAIN] > main_share else 1, np.int64(-1)
    while slot < 0 and turn < 3:
        if turn == 1:
            slot = _leaves_small(state, guard, cursor)
            if slot >= 0:
                add_ghost(_ghosts_of(state), state.keys[slot])
        else:
            slot = _leaves_main(state, guard, cursor)
        turn += 1
    cursor[_FLIGHT + code] += 1
    ledger[_EVICTED] |= slot >= 0
    return slot


implement(S3FifoState, miss=_miss, victim=_victim, insert=_insert, hit=_hit, remove=_remove, ask=_ask)
