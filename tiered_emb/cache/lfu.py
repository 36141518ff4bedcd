"""Exact LFU: the victim is the row requested least often since it was admitted; of equals, the one there longest.

Slots of equal count form a class, a doubly linked list in which the one that reached the count first stands first;
classes that are not empty form a list in order of count (Shah, Mitra and Matani, "An O(1) algorithm for implementing
the LFU cache eviction scheme", 2010). Raising a count by k passes at most k classes, so that one touch of k costs no
more than k touches of one, and ends in the same order.

Layout: node `slot + 1` stands for a slot and 0 for no node; `nodes[3 * node:]` is (older, newer, class).
`classes[4 * c:]` is (first node, last node, lower class, higher class) and `class_counts[c]` the count. Class 0, of
count 0 and always empty, closes the ring of classes. Unused classes are chained through their last field. The pool of
classes grows when it runs out: there are as many as different counts, after T requests at most sqrt(2 T), and never
more than slots.

Counts are int64, cover only the time a row is resident, and start at the row's own count when a slot is reused.
Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.prefetch import prefetch_item

_AHEAD = 12
_CLASS_BYTES = 24
_FIRST_CLASSES = 64
# Classes planned for: 65,536 different counts need 2^31 requests even when every count occurs once.
_PLANNED_CLASSES = 1 << 16


class Lfu:
    """Least frequently used first, ties by age. Satisfies `tiered_emb.cache.policy.Policy`."""

    bytes_per_slot = 12

    def __init__(self, capacity_rows: int) -> None:
        self._nodes = zeros(3 * (capacity_rows + 1), np.int32)
        self._classes = np.zeros(0, np.int32)
        self._class_counts = np.zeros(0, np.int64)
        self._unused = np.zeros(1, np.int32)
        self.clear()

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head and the classes."""
        return 16 + _CLASS_BYTES * max(_FIRST_CLASSES, min(capacity_rows, _PLANNED_CLASSES) + 2)

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
        nodes = zeros(3 * (capacity_rows + 1), np.int32)
        kept = min(len(nodes), len(self._nodes))
        nodes[:kept] = self._nodes[:kept]
        self._nodes = nodes

    def clear(self) -> None:
        """Forget every slot and every count, and give the pool of classes back."""
        self._classes = np.zeros(4, np.int32)
        self._class_counts = np.zeros(1, np.int64)
        self._unused[0] = 0
        self._grow_pool()

    def _grow_pool(self) -> None:
        """Half as many classes again, never more than one a slot, class 0 and one to move into."""
        old = len(self._class_counts)
        most = max(_FIRST_CLASSES, len(self._nodes) // 3 + 1)
        new = min(max(_FIRST_CLASSES, old + old // 2), most)
        self._classes = np.concatenate([self._classes, np.zeros(4 * (new - old), np.int32)])
        self._class_counts = np.concatenate([self._class_counts, np.zeros(new - old, np.int64)])
        self._classes[4 * old + 3 :: 4] = np.append(np.arange(old + 1, new), 0)
        self._unused[0] = old


@njit(forceinline=True)
def _last_at_most(classes, class_counts, below, goal):  # type: ignore[no-untyped-def]
    """Last class at or after `below` whose count is not above `goal`."""
    while True:
        higher = np.int64(classes[4 * below + 3])
        if higher == 0 or class_counts[higher] > goal:
            return below
        below = higher


@njit(forceinline=True)
def _new_class(classes, class_counts, unused, below, count):  # type: ignore[no-untyped-def]
    """An empty class of this count right above `below`."""
    made, higher = np.int64(unused[0]), np.int64(classes[4 * below + 3])
    unused[0] = classes[4 * made + 3]
    classes[4 * made], classes[4 * made + 1] = 0, 0
    classes[4 * made + 2], classes[4 * made + 3] = below, higher
    classes[4 * below + 3] = made
    classes[4 * higher + 2] = made
    class_counts[made] = count
    return made


@njit(forceinline=True)
def _drop_class(classes, unused, own):  # type: ignore[no-untyped-def]
    """Take an empty class out of the ring."""
    lower, higher = np.int64(classes[4 * own + 2]), np.int64(classes[4 * own + 3])
    classes[4 * lower + 3] = higher
    classes[4 * higher + 2] = lower
    classes[4 * own + 3] = unused[0]
    unused[0] = own


@njit(forceinline=True)
def _link(nodes, classes, unused, own, older, newer):  # type: ignore[no-untyped-def]
    """Make two nodes of a class neighbours, 0 standing for its ends; a class left with nobody is dropped."""
    if older != 0:
        nodes[3 * older + 1] = newer
    else:
        classes[4 * own] = newer
    if newer != 0:
        nodes[3 * newer] = older
    else:
        classes[4 * own + 1] = older
    if older == 0 and newer == 0:
        _drop_class(classes, unused, own)


@njit(forceinline=True)
def _cut(nodes, classes, unused, node):  # type: ignore[no-untyped-def]
    """Take a node out of its class, and the class out of the ring when nobody is left in it."""
    older, newer, own = np.int64(nodes[3 * node]), np.int64(nodes[3 * node + 1]), np.int64(nodes[3 * node + 2])
    _link(nodes, classes, unused, own, older, newer)


@njit(forceinline=True)
def _join(nodes, classes, own, node):  # type: ignore[no-untyped-def]
    """Put a node last in a class."""
    last = np.int64(classes[4 * own + 1])
    nodes[3 * node], nodes[3 * node + 1], nodes[3 * node + 2] = last, 0, own
    if last != 0:
        nodes[3 * last + 1] = node
    else:
        classes[4 * own] = node
    classes[4 * own + 1] = node


@njit(forceinline=True)
def _ask_for_neighbours(nodes, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch without a branch, as in LRU: the node of a slot some way ahead, then its neighbours."""
    prefetch_item(nodes, 3 * (np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)]) + 1))
    node = np.int64(slots[min(i + _AHEAD, len(slots) - 1)]) + 1
    prefetch_item(nodes, 3 * np.int64(nodes[3 * node]))
    prefetch_item(nodes, 3 * np.int64(nodes[3 * node + 1]))


@njit(nogil=True, cache=True)
def _insert(nodes, classes, class_counts, unused, slots, counts, first):  # type: ignore[no-untyped-def]
    """Insert from position `first`; returns the position that found no unused class, or len(slots)."""
    own = np.int64(0)
    for i in range(first, len(slots)):
        if class_counts[own] != counts[i]:  # misses come in runs of equal count: look for the class once a run
            own = _last_at_most(classes, class_counts, np.int64(0), counts[i])
            if class_counts[own] != counts[i]:
                if unused[0] == 0:
                    return i
                own = _new_class(classes, class_counts, unused, own, counts[i])
        _join(nodes, classes, own, np.int64(slots[i]) + 1)
    return len(slots)


@njit(nogil=True, cache=True)
def _raise_counts(nodes, classes, class_counts, unused, slots, counts, first):  # type: ignore[no-untyped-def]
    """Raise counts from position `first`; returns the position that found no unused class, or len(slots)."""
    for i in range(first, len(slots)):
        _ask_for_neighbours(nodes, slots, i)
        node = np.int64(slots[i]) + 1
        own = np.int64(nodes[3 * node + 2])
        goal = class_counts[own] + counts[i]
        goal_class = _last_at_most(classes, class_counts, own, goal)
        alone = nodes[3 * node] == 0 and nodes[3 * node + 1] == 0
        if alone and goal_class == own:
            class_counts[own] = goal  # nobody to pass and nobody left behind: the class itself moves
            continue
        if class_counts[goal_class] != goal:
            if unused[0] == 0:
                return i
            goal_class = _new_class(classes, class_counts, unused, goal_class, goal)
        _cut(nodes, classes, unused, node)
        _join(nodes, classes, goal_class, node)
    return len(slots)


@njit(nogil=True, cache=True)
def _remove(nodes, classes, unused, slots):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        _ask_for_neighbours(nodes, slots, i)
        _cut(nodes, classes, unused, np.int64(slots[i]) + 1)


@njit(nogil=True, cache=True)
def _take_least(nodes, classes, unused, n, pins, out):  # type: ignore[no-untyped-def]
    taken, higher = 0, np.int64(classes[3])
    while taken < n and higher != 0:
        own, higher = higher, np.int64(classes[4 * higher + 3])
        kept, node = np.int64(0), np.int64(classes[4 * own])
        while taken < n and node != 0:  # neighbours are joined once a run of victims, not once a victim
            newer = np.int64(nodes[3 * node + 1])
            prefetch_item(nodes, 3 * newer)
            if pins[node - 1] == 0:
                out[taken] = node - 1
                taken += 1
            else:
                _link(nodes, classes, unused, own, kept, node)
                kept = node
            node = newer
        _link(nodes, classes, unused, own, kept, node)
    return taken
