"""LFU with ageing: counts are halved from time to time, so that a row that was popular once has to leave in the end.

The exact LFU of `tiered_emb.cache.lfu`, and TinyLFU's reset (Einziger, Friedman and Manes, "TinyLFU: a highly efficient
cache admission policy", ACM Transactions on Storage 13(4), 2017) applied to its counts: each time 10 S requests of S
slots have passed, every count is halved, but never below 1. Rows that reach the same count that way leave in the order
in which they would have left before. A row that had all the requests for ever is passed by one with half of them after
a few periods, whatever its count was: counts stay below 20 S.

Requests are counted in the kernels. A verb says that it cannot go on where a period ends, `grow` halves (O(S), so O(1)
a request), and the verb goes on: `done` is how many requests of the row in hand were counted before the period ended.

Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache.arrays import ArrayPolicy, Arrays
from tiered_emb.cache.lfu import Lfu, LfuState, drop_class
from tiered_emb.cache.verbs import ask, hit, implement, insert, remove, victim

REQUESTS_PER_SLOT = 10  # between two halvings
_SEEN, _PERIOD, _DONE = 0, 1, 2
# Halvings after which nothing changes any more while one row has all the requests: counts are int64.
_SETTLED = 128


class LfuAgedState(NamedTuple):
    """The arrays of `LfuState`, and a clock.

    Attributes:
        nodes, classes, class_counts, unused: as there.
        clock: int64 (3,), requests seen in this period, requests of a period, and requests done of the row in hand.
    """

    nodes: NDArray[np.int32]
    classes: NDArray[np.int32]
    class_counts: NDArray[np.int64]
    unused: NDArray[np.int32]
    clock: NDArray[np.int64]


class LfuAged(ArrayPolicy[LfuAgedState]):
    """Least frequently used first, by counts that are halved every 10 S requests; ties by age."""

    bytes_per_slot = Lfu.bytes_per_slot
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: LFU's and the clock."""
        return Lfu.reserve_bytes(capacity_rows) + 24

    def make(self, capacity_rows: int) -> LfuAgedState:
        """An empty order, at the begin of a period."""
        clock = np.array([0, REQUESTS_PER_SLOT * capacity_rows, 0], np.int64)
        return LfuAgedState(*Lfu(capacity_rows).state, clock)

    def resized(self, capacity_rows: int) -> LfuAgedState:
        """The same order of fewer or more slots; the period is that of the new size, and is over if it was as long."""
        clock = self.state.clock.copy()
        clock[_PERIOD] = REQUESTS_PER_SLOT * capacity_rows
        clock[_SEEN] = min(clock[_SEEN], clock[_PERIOD])
        return LfuAgedState(*self._as_lfu().resized(capacity_rows), clock)

    def grow(self) -> None:
        """Halve all counts if the period is over; else more classes."""
        clock = self.state.clock
        if clock[_SEEN] == clock[_PERIOD]:
            _halve(*self.state[:4])
            clock[_SEEN] = 0
        else:
            counts = self._as_lfu()
            counts.grow()
            self.state = LfuAgedState(*counts.state, clock)

    def check_saved(self, arrays: Arrays) -> None:
        """As many nodes as slots; the pool of classes may have grown to any size."""
        self._as_lfu().check_saved(arrays)
        clock, own = arrays["clock"], self.state.clock
        if clock.dtype != own.dtype or clock.shape != own.shape or clock[_PERIOD] != own[_PERIOD]:
            raise ValueError(f"clock {clock} is not that of {self.capacity_rows} slots: their period is {own[_PERIOD]}")

    def _as_lfu(self) -> Lfu:
        """The order without its clock; what that replaces is not replaced here."""
        counts = Lfu(1)
        counts.capacity_rows, counts.state = self.capacity_rows, LfuState(*self.state[:4])
        return counts


@njit(forceinline=True)
def _counts(state):  # type: ignore[no-untyped-def]
    """The order without its clock."""
    return LfuState(state.nodes, state.classes, state.class_counts, state.unused)


@njit(forceinline=True)
def _now(clock, left):  # type: ignore[no-untyped-def]
    """How many of the requests that are left come before the period ends."""
    return min(left, clock[_PERIOD] - clock[_SEEN])


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    clock = state.clock
    left = count - clock[_DONE]
    if left > 2 * _SETTLED * clock[_PERIOD]:  # as whole periods of one row only: all the same after the first ones
        skipped = (left // clock[_PERIOD] - _SETTLED) * clock[_PERIOD]
        clock[_DONE] += skipped
        left -= skipped
    now = _now(clock, left)
    if now > 0:
        if not hit(_counts(state), slot, now):
            return False
        clock[_SEEN] += now
    if now < left:
        clock[_DONE] += now
        return False
    clock[_DONE] = 0
    return True


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    clock = state.clock
    if clock[_DONE] > 0:
        return hit(state, slot, count)
    now = _now(clock, count)
    if now == 0 or not insert(_counts(state), slot, table, id, now, code):
        return False
    clock[_SEEN] += now
    if now < count:
        clock[_DONE] = now
        return False
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    remove(_counts(state), slot)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask(_counts(state), slots, i)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    return victim(_counts(state), guard, cursor, code)


@njit(nogil=True, cache=True)
def _halve(nodes, classes, class_counts, unused):  # type: ignore[no-untyped-def]
    """Halve the counts of all classes, those above 1; classes of one count become one, the lower one's rows first."""
    own = np.int64(classes[3])
    while own != 0:
        lower, higher = np.int64(classes[4 * own + 2]), np.int64(classes[4 * own + 3])
        count = max(np.int64(1), class_counts[own] >> 1)
        if lower != 0 and class_counts[lower] == count:
            _append(nodes, classes, lower, own)
            drop_class(classes, unused, own)
        else:
            class_counts[own] = count
        own = higher


@njit(forceinline=True)
def _append(nodes, classes, lower, own):  # type: ignore[no-untyped-def]
    """Put the nodes of a class behind those of a lower one."""
    first, last = np.int64(classes[4 * own]), np.int64(classes[4 * lower + 1])
    nodes[3 * last + 1], nodes[3 * first] = first, last
    classes[4 * lower + 1] = classes[4 * own + 1]
    while first != 0:
        nodes[3 * first + 2] = lower
        first = np.int64(nodes[3 * first + 1])


implement(LfuAgedState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
