"""A doubly linked list over the slots of a tier, oldest first, in two int32 a slot.

Circular: node `slot + 1` stands for a slot and node 0 is the list's head, so that no link is ever missing.
`links[2 * node]` is the older neighbour and `links[2 * node + 1]` the newer one; so links[1] is the oldest node and
links[0] the newest, 0 if the list is empty.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tiered_emb.cache.verbs import may_leave
from tiered_emb.intrinsics import prefetch_item

BYTES_PER_SLOT = HEAD_BYTES = 8
_AHEAD = 12


@njit(forceinline=True)
def cut(links, node):  # type: ignore[no-untyped-def]
    """Join a node's neighbours."""
    older, newer = links[2 * node], links[2 * node + 1]
    links[2 * older + 1] = newer
    links[2 * newer] = older


@njit(forceinline=True)
def join_newest(links, node):  # type: ignore[no-untyped-def]
    """Put a node between the newest one and the head."""
    newest = links[0]
    links[2 * node], links[2 * node + 1] = newest, 0
    links[2 * newest + 1] = node
    links[0] = node


@njit(forceinline=True)
def ask_for_neighbours(links, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch: the links of a slot some way ahead, then the links of its neighbours.

    No branch: Numba would count references to the arrays around one, at 30 ns a call (so clamp, do not test).
    """
    prefetch_item(links, 2 * (np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)]) + 1))
    node = np.int64(slots[min(i + _AHEAD, len(slots) - 1)]) + 1
    prefetch_item(links, 2 * np.int64(links[2 * node]))
    prefetch_item(links, 2 * np.int64(links[2 * node + 1]))


@njit(forceinline=True)
def take_oldest(links, guard, cursor):  # type: ignore[no-untyped-def]
    """Cut the oldest slot that may leave; -1 if none may. cursor[0] is the node to go on at, -1 behind the newest."""
    node = cursor[0]
    if node == 0:
        node = np.int64(links[1])
    while node > 0:
        newer = np.int64(links[2 * node + 1])
        prefetch_item(links, 2 * newer)
        cursor[0] = newer if newer > 0 else -1
        if may_leave(guard, node - 1):
            cut(links, node)
            return node - 1
        node = newer
    return np.int64(-1)
