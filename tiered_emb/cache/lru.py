"""Exact LRU: the victim is the row whose last request is longest ago.

One circular doubly linked list over all slots in two int32 a slot, oldest first. Node `slot + 1` stands for a slot and
node 0 is the list's head, so that no link is ever missing; `links[2 * node]` is the older neighbour and
`links[2 * node + 1]` the newer one.

Invariant: the nodes reachable from the head are exactly the slots inserted and not yet removed or given as victims.
Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.prefetch import prefetch_item

_AHEAD = 12


class Lru:
    """Least recently used first; counts do not matter. Satisfies `tiered_emb.cache.policy.Policy`."""

    bytes_per_slot = 8

    def __init__(self, capacity_rows: int) -> None:
        self._links = zeros(2 * (capacity_rows + 1), np.int32)

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head."""
        return 8

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""
        return self._links.nbytes

    def insert(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Slots that got new rows become the newest, in the order given."""
        _append(self._links, slots)

    def touch(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Requested slots become the newest, in the order given."""
        _renew(self._links, slots)

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Forget slots whose rows left by another way than `victims`."""
        _unlink(self._links, slots)

    def victims(self, n: int, pins: NDArray[np.uint16], out: NDArray[np.int32]) -> int:
        """Take the n oldest slots without a pin out of the order into out[:n], oldest first; returns how many."""
        return int(_take_oldest(self._links, n, pins, out))

    def resize(self, capacity_rows: int) -> None:
        """Change the number of slots; slots at and above it must have been removed."""
        links = zeros(2 * (capacity_rows + 1), np.int32)
        kept = min(len(links), len(self._links))
        links[:kept] = self._links[:kept]
        self._links = links

    def clear(self) -> None:
        """Forget every slot."""
        self._links[:2] = 0


@njit(forceinline=True)
def _cut(links, node):  # type: ignore[no-untyped-def]
    """Join a node's neighbours."""
    older, newer = links[2 * node], links[2 * node + 1]
    links[2 * older + 1] = newer
    links[2 * newer] = older


@njit(forceinline=True)
def _join_newest(links, node):  # type: ignore[no-untyped-def]
    """Put a node between the newest one and the head."""
    newest = links[0]
    links[2 * node], links[2 * node + 1] = newest, 0
    links[2 * newest + 1] = node
    links[0] = node


@njit(forceinline=True)
def _ask_for_neighbours(links, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch: the links of a slot some way ahead, then the links of its neighbours.

    No branch: Numba would count references to the arrays around one, at 30 ns a call (so clamp, do not test).
    """
    prefetch_item(links, 2 * (np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)]) + 1))
    node = np.int64(slots[min(i + _AHEAD, len(slots) - 1)]) + 1
    prefetch_item(links, 2 * np.int64(links[2 * node]))
    prefetch_item(links, 2 * np.int64(links[2 * node + 1]))


@njit(nogil=True, cache=True)
def _append(links, slots):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        _join_newest(links, np.int64(slots[i]) + 1)


@njit(nogil=True, cache=True)
def _renew(links, slots):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        _ask_for_neighbours(links, slots, i)
        node = np.int64(slots[i]) + 1
        _cut(links, node)
        _join_newest(links, node)


@njit(nogil=True, cache=True)
def _unlink(links, slots):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        _ask_for_neighbours(links, slots, i)
        _cut(links, np.int64(slots[i]) + 1)


@njit(nogil=True, cache=True)
def _take_oldest(links, n, pins, out):  # type: ignore[no-untyped-def]
    taken, node = 0, np.int64(links[1])
    while taken < n and node != 0:
        newer = np.int64(links[2 * node + 1])
        prefetch_item(links, 2 * newer)
        if pins[node - 1] == 0:
            _cut(links, node)
            out[taken] = node - 1
            taken += 1
        node = newer
    return taken
