"""ARC: rows requested once and rows requested more often share the slots as the ghosts of both say they should.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST '03. T1 holds rows requested once since
they came, T2 those requested again, both least recently requested first; B1 and B2 are ghosts of rows that left them.
A row whose ghost is found in B1 says that T1 is too small, one in B2 that T2 is: the target p for T1's length goes up
or down, and the row goes into T2. T1 gives the victim while it is longer than p, T2 otherwise. T1 and B1 together hold
as many rows as there are slots, and B1 and B2 as many ghosts.

Where the paper leaves a choice ours is libCacheSim's 0.3.5, request by request: p is a real number, it moves by the
true quotient of the lengths of B1 and B2, at least 1, and a row that leaves T1 while T1 fills all slots is not
remembered.

In a batch all victims leave before the first row comes. Rows on their way into T1 and T2 count as being there (the
cursor holds how many), and the ghosts' limits are kept by dropping as many as it takes.

Invariant: each slot inserted and not yet removed or given as a victim is in one of the two queues, `in_often` says in
which, and `ledger` counts both. The ghosts' first list is B1, their second B2.
Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.ghosts import (
    FIXED_BYTES,
    Ghosts,
    add_ghost,
    drop_oldest_ghost,
    find_ghost,
    ghosts_in,
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

ONCE, OFTEN = 0, 1  # T1 with ghosts B1, T2 with ghosts B2
_FLIGHT = 2  # position in the cursor, behind the walks: rows on their way into T1, into T2
_NO_GHOST, _IN_B1, _IN_B2 = 0, 1, 2  # what `miss` says


class ArcState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 2),), queues ONCE and OFTEN, as in `tiered_emb.cache.queues`.
        in_often: uint8 (S,), whether a slot is in OFTEN.
        keys: uint64 (S,), of the row in each slot, for its ghost.
        ledger: int64 (2,), length of each queue.
        target: float64 (1,), p: 0 to S.
        ghost_buckets, ghost_keys, ghost_links, ghost_ledger: see `tiered_emb.cache.ghosts`.
    """

    links: NDArray[np.int32]
    in_often: NDArray[np.uint8]
    keys: NDArray[np.uint64]
    ledger: NDArray[np.int64]
    target: NDArray[np.float64]
    ghost_buckets: NDArray[np.uint64]
    ghost_keys: NDArray[np.uint64]
    ghost_links: NDArray[np.int32]
    ghost_ledger: NDArray[np.int64]


class Arc(ArrayPolicy[ArcState]):
    """Two LRU queues whose shares follow the ghosts of both."""

    bytes_per_slot = BYTES_PER_ITEM + 1 + 8 + 30  # one ghost of 29.6 bytes

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: heads, ledgers and the target."""
        return HEAD_BYTES + 24 + FIXED_BYTES

    def make(self, capacity_rows: int) -> ArcState:
        """An empty order without ghosts."""
        return ArcState(
            empty_queues(capacity_rows),
            zeros(capacity_rows, np.uint8),
            zeros(capacity_rows, np.uint64),
            np.zeros(2, np.int64),
            np.zeros(1, np.float64),
            *make_ghosts(capacity_rows),
        )

    def resized(self, capacity_rows: int) -> ArcState:
        """The same queues, and the newest of the ghosts; the target keeps its share of the slots."""
        old = self.state
        ghosts = Ghosts(old.ghost_buckets, old.ghost_keys, old.ghost_links, old.ghost_ledger)
        _drop_surplus(ghosts, old.ledger[ONCE], capacity_rows)
        return ArcState(
            resized_queues(old.links, capacity_rows),
            resized(old.in_often, capacity_rows),
            resized(old.keys, capacity_rows),
            old.ledger.copy(),
            old.target * capacity_rows / len(old.keys),
            *resized_ghosts(ghosts, capacity_rows),
        )


@njit(forceinline=True)
def _ghosts_of(state):  # type: ignore[no-untyped-def]
    return Ghosts(state.ghost_buckets, state.ghost_keys, state.ghost_links, state.ghost_ledger)


@njit(forceinline=True)
def _keep_first_within(ghosts, most):  # type: ignore[no-untyped-def]
    """Drop the oldest of B1 while there are more than `most`."""
    while ghosts_in(ghosts, ONCE) > max(0, most):
        drop_oldest_ghost(ghosts, ONCE)


@njit(forceinline=True)
def _keep_within(ghosts, most):  # type: ignore[no-untyped-def]
    """Drop the oldest ghost, of B2 if it has any, while both lists have more than `most`."""
    while ghosts_in(ghosts, ONCE) + ghosts_in(ghosts, OFTEN) > most:
        drop_oldest_ghost(ghosts, OFTEN if ghosts_in(ghosts, OFTEN) > 0 else ONCE)


@njit(nogil=True, cache=True)
def _drop_surplus(ghosts, once, capacity):  # type: ignore[no-untyped-def]
    """Drop ghosts that are too many for another number of slots, T1 having `once` rows."""
    _keep_first_within(ghosts, capacity - once)
    _keep_within(ghosts, capacity)


def _miss(state, table, id):  # type: ignore[no-untyped-def]
    """Whether the row's ghost was found, and where; it is forgotten, and the target moves."""
    ghosts, key, most = _ghosts_of(state), key_of(table, id), len(state.keys)
    found, ghost = _IN_B1, find_ghost(ghosts, key)
    if ghost < 0:
        found, ghost = _IN_B2, find_ghost(ghosts, key | uint64(OFTEN))
    if ghost < 0:
        return _NO_GHOST
    once, often = float(ghosts_in(ghosts, ONCE)), float(ghosts_in(ghosts, OFTEN))
    if found == _IN_B1:
        state.target[0] = min(state.target[0] + max(often / once, 1.0), float(most))
    else:
        state.target[0] = max(state.target[0] - max(once / often, 1.0), 0.0)
    remove_ghost(ghosts, ghost)
    return found


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    queue = np.int64(ONCE if code == _NO_GHOST and count == 1 else OFTEN)
    state.keys[slot] = key_of(table, id)
    state.in_often[slot] = queue
    state.ledger[queue] += 1
    join_queue(state.links, queue, slot + HEADS)
    return True


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    moved = 1 - np.int64(state.in_often[slot])
    state.in_often[slot] = 1
    state.ledger[ONCE] -= moved
    state.ledger[OFTEN] += moved
    cut(state.links, slot + HEADS)
    join_queue(state.links, OFTEN, slot + HEADS)
    return True


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_queue_neighbours(state.links, state.in_often, slots, i)


def _remove(state, slot):  # type: ignore[no-untyped-def]
    state.ledger[np.int64(state.in_often[slot])] -= 1
    cut(state.links, slot + HEADS)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """REPLACE of the paper, from the other queue if none may leave there, and the ghosts that it has to drop."""
    links, ledger, ghosts, most = state.links, state.ledger, _ghosts_of(state), len(state.keys)
    once, target = ledger[ONCE] + cursor[_FLIGHT + ONCE], state.target[0]
    fills_all = code == _NO_GHOST and once >= most and ghosts_in(ghosts, ONCE) == 0
    from_once = once > target or (once == target and code == _IN_B2) or fills_all
    queue = np.int64(ONCE if from_once else OFTEN)
    node = find_oldest(links, queue, guard, cursor, queue)
    if node < 0:
        queue = 1 - queue
        node = find_oldest(links, queue, guard, cursor, queue)
    cursor[_FLIGHT + np.int64(code != _NO_GHOST)] += 1
    if node < 0:
        return np.int64(-1)
    cut(links, node)
    ledger[queue] -= 1
    if code == _NO_GHOST:
        _keep_first_within(ghosts, most - 1 - once)
    if queue == OFTEN or not fills_all:
        _keep_within(ghosts, most - 1)
        add_ghost(ghosts, state.keys[node - HEADS] | uint64(queue))
    return node - HEADS


implement(ArcState, miss=_miss, victim=_victim, insert=_insert, hit=_hit, remove=_remove, ask=_ask)
