"""Several doubly linked lists over the same nodes, each oldest first: for policies that move rows from list to list.

As in `tiered_emb.cache.links`, but with a head for each list: nodes 0 to `heads` - 1 are the heads, node `slot + heads`
stands for a slot. A list is a ring through its head h: `links[2 * h + 1]` is its oldest node, `links[2 * h]` its newest
one, both h if it is empty. A node is in one ring or in none; `links.cut` takes it out of whichever it is in.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.verbs import may_leave
from tiered_emb.intrinsics import prefetch_item

_AHEAD = 12


def empty_rings(nodes: int, heads: int) -> NDArray[np.int32]:
    """Links, int32 (2 nodes,), of `heads` empty rings over so many nodes, the heads among them."""
    links: NDArray[np.int32] = zeros(2 * nodes, np.int32)
    links[: 2 * heads] = np.repeat(np.arange(heads), 2)
    return links


@njit(forceinline=True)
def join(links, before, node):  # type: ignore[no-untyped-def]
    """Put a node right before another one, on its older side; before the head it is the newest of the ring."""
    older = np.int64(links[2 * before])
    links[2 * node], links[2 * node + 1] = older, before
    links[2 * older + 1] = node
    links[2 * before] = node


@njit(forceinline=True)
def oldest_free(links, head, heads, guard, cursor, at):  # type: ignore[no-untyped-def]
    """The oldest node of a ring whose slot may leave, still in it; 0 if there is none.

    `cursor[at]` is the last node that was passed over, 0 for none yet. It may not leave before the batch is over, so
    the search goes on behind it, and finds what joined the ring in between.
    """
    passed = np.int64(cursor[at])
    node = np.int64(links[2 * (passed if passed != 0 else np.int64(head)) + 1])
    while node != head:
        prefetch_item(links, 2 * np.int64(links[2 * node + 1]))
        if may_leave(guard, node - heads):
            return node
        cursor[at] = node
        node = np.int64(links[2 * node + 1])
    return np.int64(0)


@njit(forceinline=True)
def ask_for_ring(links, heads, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch without a branch: the links of a slot some way ahead, then the links of its neighbours."""
    prefetch_item(links, 2 * (np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)]) + heads))
    node = np.int64(slots[min(i + _AHEAD, len(slots) - 1)]) + heads
    prefetch_item(links, 2 * np.int64(links[2 * node]))
    prefetch_item(links, 2 * np.int64(links[2 * node + 1]))
