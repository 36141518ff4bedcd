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

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, Arrays, resized
from tiered_emb.cache.verbs import implement, may_leave
from tiered_emb.intrinsics import prefetch_item

_AHEAD = 12
_CLASS_BYTES = 24
_FIRST_CLASSES = 64
# Classes planned for: 65,536 different counts need 2^31 requests even when every count occurs once.
_PLANNED_CLASSES = 1 << 16


class LfuState(NamedTuple):
    """See the module's docstring.

    Attributes:
        nodes: int32 (3 (S + 1),).
        classes: int32 (4 C,).
        class_counts: int64 (C,).
        unused: int32 (1,), the first class of the chain of unused ones.
    """

    nodes: NDArray[np.int32]
    classes: NDArray[np.int32]
    class_counts: NDArray[np.int64]
    unused: NDArray[np.int32]


class Lfu(ArrayPolicy[LfuState]):
    """Least frequently used first, ties by age."""

    bytes_per_slot = 12
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: the list's head and the classes."""
        return 16 + _CLASS_BYTES * max(_FIRST_CLASSES, min(capacity_rows, _PLANNED_CLASSES) + 2)

    def make(self, capacity_rows: int) -> LfuState:
        """An empty order, with a small pool of classes."""
        none = np.zeros(0, np.int32)
        empty = LfuState(zeros(3 * (capacity_rows + 1), np.int32), none, np.zeros(0, np.int64), np.zeros(1, np.int32))
        return _with_classes(empty, _FIRST_CLASSES)

    def resized(self, capacity_rows: int) -> LfuState:
        """The same order of fewer or more slots."""
        return self.state._replace(nodes=resized(self.state.nodes, 3 * (capacity_rows + 1)))

    def grow(self) -> None:
        """Half as many classes again, never more than one a slot, class 0 and one to move into."""
        old = len(self.state.class_counts)
        most = max(_FIRST_CLASSES, self.capacity_rows + 2)
        self.state = _with_classes(self.state, min(max(_FIRST_CLASSES, old + old // 2), most))

    def check_saved(self, arrays: Arrays) -> None:
        """As many nodes as slots; the pool may have grown to any size."""
        nodes, classes, counts = arrays["nodes"], arrays["classes"], arrays["class_counts"]
        if nodes.shape != self.state.nodes.shape or len(classes) != 4 * len(counts) or arrays["unused"].shape != (1,):
            raise ValueError(
                f"these are {len(nodes) // 3 - 1} slots in {len(counts)} classes, not {self.capacity_rows}"
            )


def _with_classes(state: LfuState, new: int) -> LfuState:
    """The state with a pool of `new` classes, of which those that are added are unused."""
    old = max(1, len(state.class_counts))  # class 0 is never used
    classes, counts = resized(state.classes, 4 * new), resized(state.class_counts, new)
    classes[4 * old + 3 :: 4] = np.append(np.arange(old + 1, new), 0)
    return state._replace(classes=classes, class_counts=counts, unused=np.array([old], np.int32))


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
def drop_class(classes, unused, own):  # type: ignore[no-untyped-def]
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
        drop_class(classes, unused, own)


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


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    nodes, classes, class_counts, unused = state
    own = _last_at_most(classes, class_counts, np.int64(0), count)
    if own == 0 or class_counts[own] != count:
        if unused[0] == 0:
            return False
        own = _new_class(classes, class_counts, unused, own, count)
    _join(nodes, classes, own, slot + 1)
    return True


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    nodes, classes, class_counts, unused = state
    node = slot + 1
    own = np.int64(nodes[3 * node + 2])
    goal = class_counts[own] + count
    goal_class = _last_at_most(classes, class_counts, own, goal)
    if goal_class == own and nodes[3 * node] == 0 and nodes[3 * node + 1] == 0:
        class_counts[own] = goal  # nobody to pass and nobody left behind: the class itself moves
        return True
    if class_counts[goal_class] != goal:
        if unused[0] == 0:
            return False
        goal_class = _new_class(classes, class_counts, unused, goal_class, goal)
    _cut(nodes, classes, unused, node)
    _join(nodes, classes, goal_class, node)
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    _cut(state.nodes, state.classes, state.unused, slot + 1)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    _ask_for_neighbours(state.nodes, slots, i)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """The first that may leave; cursor is the class and the node to go on at, -1 behind the last class."""
    nodes, classes, _, unused = state
    own, node = cursor[0], cursor[1]
    if own == 0:
        own, node = _first_of(classes, np.int64(classes[3]))
    while own > 0:
        newer, class_then = np.int64(nodes[3 * node + 1]), own
        if newer == 0:
            class_then, newer = _first_of(classes, np.int64(classes[4 * own + 3]))
        prefetch_item(nodes, 3 * newer)
        cursor[0], cursor[1] = class_then, newer
        if may_leave(guard, node - 1):
            _cut(nodes, classes, unused, node)
            return node - 1
        own, node = class_then, newer
    return np.int64(-1)


@njit(forceinline=True)
def _first_of(classes, own):  # type: ignore[no-untyped-def]
    """A class and its first node; (-1, 0) for class 0, which closes the ring."""
    return (own, np.int64(classes[4 * own])) if own != 0 else (np.int64(-1), np.int64(0))


implement(LfuState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
