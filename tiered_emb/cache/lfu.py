"""Exact LFU: the victim is the row requested least often since it was admitted; of equals, the one there longest.

All slots stand in one circular doubly linked list ordered by (count, when the count was reached), victims first. Slots
of equal count are neighbours and form a class; a class knows its count and its last slot, and classes are themselves
linked in order of count (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme",
2010, with one list of slots instead of one a class). Raising a count by k walks over at most k classes, so that one
touch of k costs no more than k touches of one and ends in the same order.

Layout: node `slot + 1` stands for a slot, node 0 is the list's head; `nodes[3 * node:]` is (previous, next, class).
Class 0 has count 0 and the head as its last slot; `classes[3 * c:]` is (last node, previous class, next class),
`class_counts[c]` its count. Unused classes are chained through their next field. The pool of classes grows when it runs
out: there are as many as different counts, which after T requests is at most sqrt(2 T) and never more than the slots.

Counts are int64, cover only the time a row is resident, and start at the row's own count when a slot is reused.
Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache.prefetch import prefetch_item

_AHEAD = 12
_CLASS_BYTES = 20
_FIRST_CLASSES = 64
# Classes planned for: 65,536 different counts need 2^31 requests even when every count occurs once.
_PLANNED_CLASSES = 1 << 16


class Lfu:
    """Least frequently used first, ties by age. Satisfies `tiered_emb.cache.policy.Policy`."""

    bytes_per_slot = 12

    def __init__(self, capacity_rows: int) -> None:
        self._nodes = np.zeros(3 * (capacity_rows + 1), np.int32)
        self._classes = np.zeros(0, np.int32)
        self._class_counts = np.zeros(0, np.int64)
        self._unused = np.zeros(1, np.int32)
        self.clear()

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head and the classes."""
        return 16 + _CLASS_BYTES * max(_FIRST_CLASSES, min(capacity_rows, _PLANNED_CLASSES) + 1)

    @property
    def memory_bytes(self) -> int:
        """Bytes held now, the pool of classes included."""
        return self._nodes.nbytes + self._classes.nbytes + self._class_counts.nbytes + self._unused.nbytes

    def insert(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Slots that got new rows start at the rows' counts (1 or more), in the order given."""
        done = 0
        while done < len(slots):
            done = _insert(self._nodes, self._classes, self._class_counts, self._unused, slots, counts, done)
            if done < len(slots):
                self._grow_pool()

    def touch(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Raise each slot's count by `counts` (1 or more), as that many single requests would."""
        done = 0
        while done < len(slots):
            done = _raise_counts(self._nodes, self._classes, self._class_counts, self._unused, slots, counts, done)
            if done < len(slots):
                self._grow_pool()

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Forget slots whose rows left by another way than `victims`."""
        _remove(self._nodes, self._classes, self._unused, slots)

    def victims(self, n: int, pins: NDArray[np.uint16], out: NDArray[np.int32]) -> int:
        """Take the n least frequent slots without a pin out of the order into out[:n]; returns how many."""
        return int(_take_least(self._nodes, self._classes, self._unused, n, pins, out))

    def resize(self, capacity_rows: int) -> None:
        """Change the number of slots; slots at and above it must have been removed."""
        nodes = np.zeros(3 * (capacity_rows + 1), np.int32)
        kept = min(len(nodes), len(self._nodes))
        nodes[:kept] = self._nodes[:kept]
        self._nodes = nodes

    def clear(self) -> None:
        """Forget every slot and every count, and give the pool of classes back."""
        self._nodes[:3] = 0
        self._classes = np.zeros(3, np.int32)
        self._class_counts = np.zeros(1, np.int64)
        self._unused[0] = 0
        self._grow_pool()

    def _grow_pool(self) -> None:
        """Half as many classes again, never more than slots need: called when no class is unused."""
        old = len(self._class_counts)
        most = max(_FIRST_CLASSES, len(self._nodes) // 3)
        new = min(max(_FIRST_CLASSES, old + old // 2), most)
        self._classes = np.concatenate([self._classes, np.zeros(3 * (new - old), np.int32)])
        self._class_counts = np.concatenate([self._class_counts, np.zeros(new - old, np.int64)])
        self._classes[3 * old + 2 :: 3] = np.append(np.arange(old + 1, new), 0)
        self._unused[0] = old


@njit(nogil=True, inline="always")
def _last_at_most(classes, class_counts, below, goal):  # type: ignore[no-untyped-def]
    """Last class at or after `below` whose count is not above `goal`."""
    while True:
        above = np.int64(classes[3 * below + 2])
        if above == 0 or class_counts[above] > goal:
            return below
        below = above


@njit(nogil=True, inline="always")
def _cut(nodes, classes, unused, node):  # type: ignore[no-untyped-def]
    """Take a node out of the list and its class, and drop the class when it was the last."""
    previous, following, own = np.int64(nodes[3 * node]), np.int64(nodes[3 * node + 1]), np.int64(nodes[3 * node + 2])
    nodes[3 * previous + 1] = following
    nodes[3 * following] = previous
    if classes[3 * own] != node:
        return
    if nodes[3 * previous + 2] == own:
        classes[3 * own] = previous
        return
    lower, higher = np.int64(classes[3 * own + 1]), np.int64(classes[3 * own + 2])
    classes[3 * lower + 2] = higher
    classes[3 * higher + 1] = lower
    classes[3 * own + 2] = unused[0]
    unused[0] = own


@njit(nogil=True, inline="always")
def _new_class(classes, class_counts, unused, below, count):  # type: ignore[no-untyped-def]
    """A class of this count right above `below`."""
    made = np.int64(unused[0])
    unused[0] = classes[3 * made + 2]
    above = np.int64(classes[3 * below + 2])
    classes[3 * made + 1], classes[3 * made + 2] = below, above
    classes[3 * below + 2] = made
    classes[3 * above + 1] = made
    class_counts[made] = count
    return made


@njit(nogil=True, inline="always")
def _join(nodes, classes, class_counts, unused, node, below, goal):  # type: ignore[no-untyped-def]
    """Put a node last among those of count `goal`, whose class is `below` or is made right above it."""
    previous = np.int64(classes[3 * below])
    if class_counts[below] != goal:
        below = _new_class(classes, class_counts, unused, below, goal)
    following = np.int64(nodes[3 * previous + 1])
    nodes[3 * node], nodes[3 * node + 1], nodes[3 * node + 2] = previous, following, below
    nodes[3 * previous + 1] = node
    nodes[3 * following] = node
    classes[3 * below] = node


@njit(nogil=True, inline="always")
def _ask_for_neighbours(nodes, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch: the node of a slot some way ahead, then its neighbours."""
    if i + 2 * _AHEAD < len(slots):
        prefetch_item(nodes, 3 * (np.int64(slots[i + 2 * _AHEAD]) + 1))
    if i + _AHEAD < len(slots):
        node = np.int64(slots[i + _AHEAD]) + 1
        prefetch_item(nodes, 3 * np.int64(nodes[3 * node]))
        prefetch_item(nodes, 3 * np.int64(nodes[3 * node + 1]))


@njit(nogil=True, cache=True)
def _insert(nodes, classes, class_counts, unused, slots, counts, first):  # type: ignore[no-untyped-def]
    """Insert from position `first`; returns the position that found no unused class, or len(slots)."""
    for i in range(first, len(slots)):
        below = _last_at_most(classes, class_counts, np.int64(0), counts[i])
        if class_counts[below] != counts[i] and unused[0] == 0:
            return i
        _join(nodes, classes, class_counts, unused, np.int64(slots[i]) + 1, below, counts[i])
    return len(slots)


@njit(nogil=True, cache=True)
def _raise_counts(nodes, classes, class_counts, unused, slots, counts, first):  # type: ignore[no-untyped-def]
    """Raise counts from position `first`; returns the position that found no unused class, or len(slots)."""
    for i in range(first, len(slots)):
        _ask_for_neighbours(nodes, slots, i)
        node = np.int64(slots[i]) + 1
        own = np.int64(nodes[3 * node + 2])
        goal = class_counts[own] + counts[i]
        below = _last_at_most(classes, class_counts, own, goal)
        alone = classes[3 * own] == node and nodes[3 * np.int64(nodes[3 * node]) + 2] != own
        if alone and below == own:
            class_counts[own] = goal  # nobody to pass and nobody left behind: the class itself moves
            continue
        if class_counts[below] != goal and unused[0] == 0 and not alone:
            return i
        _cut(nodes, classes, unused, node)
        _join(nodes, classes, class_counts, unused, node, below, goal)
    return len(slots)


@njit(nogil=True, cache=True)
def _remove(nodes, classes, unused, slots):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        _ask_for_neighbours(nodes, slots, i)
        _cut(nodes, classes, unused, np.int64(slots[i]) + 1)


@njit(nogil=True, cache=True)
def _take_least(nodes, classes, unused, n, pins, out):  # type: ignore[no-untyped-def]
    taken, node = 0, np.int64(nodes[1])
    while taken < n and node != 0:
        following = np.int64(nodes[3 * node + 1])
        prefetch_item(nodes, 3 * following)
        if pins[node - 1] == 0:
            _cut(nodes, classes, unused, node)
            out[taken] = node - 1
            taken += 1
        node = following
    return taken
