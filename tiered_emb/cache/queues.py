"""Several doubly linked lists over one set of items, oldest first, in two int32 an item.

As `links.py`, but with one head for each list: nodes 0 to HEADS - 1 are the heads, and node `item + HEADS` stands for
an item, a slot or a ghost. `links[2 * node]` is the older neighbour and `links[2 * node + 1]` the newer one, a head's
being the newest and the oldest node of its list. An item is in one list at most, and is cut out by `links.cut` without
knowing which.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import resized
from tiered_emb.cache.verbs import may_leave
from tiered_emb.intrinsics import prefetch_item

HEADS = 2
BYTES_PER_ITEM = 8
HEAD_BYTES = HEADS * BYTES_PER_ITEM
_AHEAD = 12


def empty_queues(items: int) -> NDArray[np.int32]:
    """Links (2 (items + HEADS),) of HEADS empty lists."""
    links: NDArray[np.int32] = zeros(2 * (items + HEADS), np.int32)
    links[: 2 * HEADS] = np.repeat(np.arange(HEADS), 2)
    return links


def resized_queues(links: NDArray[np.int32], items: int) -> NDArray[np.int32]:
    """The same lists over more or fewer items; those that go are in no list."""
    return resized(links, 2 * (items + HEADS))


@njit(forceinline=True)
def oldest_of(links, head):  # type: ignore[no-untyped-def]
    """Oldest node of a list, a head if it is empty."""
    return np.int64(links[2 * head + 1])


@njit(forceinline=True)
def newer_of(links, node):  # type: ignore[no-untyped-def]
    """The next newer node, a head behind the newest."""
    return np.int64(links[2 * node + 1])


@njit(forceinline=True)
def join_queue(links, head, node):  # type: ignore[no-untyped-def]
    """Put a node, which is in no list, between the newest of this list and its head."""
    newest = links[2 * head]
    links[2 * node], links[2 * node + 1] = newest, head
    links[2 * newest + 1] = node
    links[2 * head] = node


@njit(forceinline=True)
def ask_for_queue_neighbours(links, marks, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch without a branch, as in `links.py`, and of what `marks` (S,) say of a slot some way ahead."""
    far = np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)])
    prefetch_item(marks, far)
    prefetch_item(links, 2 * (far + HEADS))
    node = np.int64(slots[min(i + _AHEAD, len(slots) - 1)]) + HEADS
    prefetch_item(links, 2 * np.int64(links[2 * node]))
    prefetch_item(links, 2 * np.int64(links[2 * node + 1]))


@njit(forceinline=True)
def begin_walk(links, head, cursor, at):  # type: ignore[no-untyped-def]
    """The node at which a search of this list goes on, or what is none: a head, or -1 behind the newest.

    cursor[at] is 0 before the first search of a batch.
    """
    node = cursor[at]
    return oldest_of(links, head) if node == 0 else node


@njit(forceinline=True)
def next_on_walk(links, node, cursor, at):  # type: ignore[no-untyped-def]
    """The node after this one, kept in cursor[at]; -1 behind the newest."""
    newer = newer_of(links, node)
    prefetch_item(links, 2 * newer)
    cursor[at] = newer if newer >= HEADS else np.int64(-1)
    return cursor[at]


@njit(forceinline=True)
def find_oldest(links, head, guard, cursor, at):  # type: ignore[no-untyped-def]
    """The oldest node, from where the last search ended, whose slot may leave; -1 if none may. It stays in its list."""
    node = begin_walk(links, head, cursor, at)
    while node >= HEADS:
        newer = next_on_walk(links, node, cursor, at)
        if may_leave(guard, node - HEADS):
            return node
        node = newer
    cursor[at] = -1
    return np.int64(-1)
