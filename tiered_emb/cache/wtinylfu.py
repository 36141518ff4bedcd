"""W-TinyLFU: a row stays if it was requested more often, lately, than the row that would leave for it.

Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage 13(4),
2017. New rows enter a *window*, an LRU list of 1% of the slots, at least one. The rest, *main*, is a segmented LRU
(Karedla, Love and Wherry, 1994): rows enter its *probation* part, become *protected* (four fifths of main) when they
are requested there, and come back to probation when rows requested later need their place. If a row has to leave, the
oldest of the window, the *candidate*, and the oldest of probation compete: the one that was counted more often is in
main afterwards, the other one leaves; of equals, the candidate leaves.

Where the paper leaves a choice, and where it does not, we follow libCacheSim:

- A row is counted when it comes in, each time it competes or is moved to main, and at each request in main; requests in
  the window are not counted. Counts are halved after 32 requests in main for each of its slots, and reach 65,535: see
  `tiered_emb.cache.counting_bloom`. (Counting in the window too, as the paper does, takes the miss ratios on the golden
  traces up to 0.005 away from libCacheSim's, to either side.)
- Before the first row leaves all rows are in the window. Then main is filled from it, oldest first and without a
  competition, first probation, then protected; so it is whenever it has room.
- Probation and protected hold a fifth and four fifths of main, rounded down. Where that leaves a slot over, probation
  has it until a row becomes protected in the stead of another: then a row of probation is *owed*, and main has room.

Three differences, within 0.01 of its miss ratio on the golden traces (the largest is 0.0023) as on others that do not
change abruptly: on those its own varies by 0.03 with the hash function, as one cold row with a count too high can keep
all candidates out for long. The hash functions differ, and there are eight counters of 12 a row for its ten of 14.4. It
evicts the owed row at once; here that is the next victim, without a competition, and may be requested until then. Below
100 slots its window has no slot, and it keeps nothing; ours has one.

In batches: a row comes in with all the requests that the batch has for it, since none of them found it in the window.
All victims of a batch are taken before its rows come in, each by a competition. If the window has no more rows that may
leave, rows of main leave, and as many slots are *lent* to the window: what comes in competes from there, also after the
next batch, and does not get into main for nothing. A slot is given back by a candidate that wins: nobody leaves for it.

Layout: nodes 0, 1, 2 are the heads of the rings of window, probation and protected; node `slot + 3` stands for a slot.

Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.counting_bloom import (
    COUNTERS_PER_ROW,
    add,
    add_requests,
    ask_for_counters,
    estimate,
    make_counters,
)
from tiered_emb.cache.links import cut
from tiered_emb.cache.probing import name_of
from tiered_emb.cache.rings import ask_for_ring, empty_rings, join, oldest_free
from tiered_emb.cache.verbs import implement
from tiered_emb.intrinsics import prefetch_item

WINDOW_SHARE, PROBATION_SHARE, PROTECTED_SHARE = 0.01, 0.2, 0.8  # of all slots; of those of main
REQUESTS_PER_SLOT = 32  # of main, between two halvings
_WINDOW, _PROBATION, _PROTECTED, _HEADS = 0, 1, 2, 3
_AHEAD = 12
# What `numbers` holds: rows in each of the three rings; slots lent to the window; whether a row of probation is owed;
# the most rows of main, of probation and of protected.
_LENT, _OWED, _MOST_MAIN, _MOST_PROBATION, _MOST_PROTECTED, _NUMBERS = range(3, 9)


class WTinyLfuState(NamedTuple):
    """See the module's docstring.

    Attributes:
        links: int32 (2 (S + 3),), the three rings.
        rings: uint8 (S,), the ring that each slot is in.
        names: uint64 (S,), of each slot's row.
        counters: uint16, of a counting Bloom filter for the slots of main.
        clock: int64 (2,), of the same: requests in main since counters were halved, and when to halve.
        numbers: int64 (8,), see above.
    """

    links: NDArray[np.int32]
    rings: NDArray[np.uint8]
    names: NDArray[np.uint64]
    counters: NDArray[np.uint16]
    clock: NDArray[np.int64]
    numbers: NDArray[np.int64]


class WTinyLfu(ArrayPolicy[WTinyLfuState]):
    """Of the oldest new row and the oldest of the others, the one requested less often."""

    bytes_per_slot = 8 + 1 + 8 + 2 * COUNTERS_PER_ROW
    has_ghosts = False

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot that this policy may come to hold: heads, numbers, fewest counters."""
        return 8 * _HEADS + 8 * _NUMBERS + 16 + 2 * 64

    def make(self, capacity_rows: int) -> WTinyLfuState:
        """An empty order."""
        main = capacity_rows - max(1, int(WINDOW_SHARE * capacity_rows))
        numbers = np.zeros(_NUMBERS, np.int64)
        numbers[_MOST_MAIN:] = main, int(PROBATION_SHARE * main), int(PROTECTED_SHARE * main)
        return WTinyLfuState(
            empty_rings(_HEADS + capacity_rows, _HEADS),
            zeros(capacity_rows, np.uint8),
            zeros(capacity_rows, np.uint64),
            make_counters(main),
            np.array([0, REQUESTS_PER_SLOT * max(1, main)], np.int64),
            numbers,
        )

    def resized(self, capacity_rows: int) -> WTinyLfuState:
        """The same order of fewer or more slots; of counts those of rows here, as they are estimated."""
        old, new = self.state, self.make(capacity_rows)
        new = new._replace(
            links=resized(old.links, 2 * (_HEADS + capacity_rows)),
            rings=resized(old.rings, capacity_rows),
            names=resized(old.names, capacity_rows),
        )
        _move(old, new)
        return new


@njit(forceinline=True)
def _leave(state, node):  # type: ignore[no-untyped-def]
    """Take a node out of its ring; its slot."""
    cut(state.links, node)
    state.numbers[state.rings[node - _HEADS]] -= 1
    return node - _HEADS


@njit(forceinline=True)
def _enter(state, node, ring):  # type: ignore[no-untyped-def]
    """Make a node that is in no ring the newest of one."""
    join(state.links, ring, node)
    state.rings[node - _HEADS] = ring
    state.numbers[ring] += 1


@njit(forceinline=True)
def _enter_main(state, node):  # type: ignore[no-untyped-def]
    """Probation, unless it is full and protected is not."""
    numbers = state.numbers
    full = numbers[_PROBATION] >= numbers[_MOST_PROBATION]
    _enter(state, node, _PROTECTED if full and numbers[_PROTECTED] < numbers[_MOST_PROTECTED] else _PROBATION)


@njit(forceinline=True)
def _room_in_main(numbers):  # type: ignore[no-untyped-def]
    return numbers[_PROBATION] + numbers[_PROTECTED] + numbers[_LENT] < numbers[_MOST_MAIN]


@njit(forceinline=True)
def _protect(state, node):  # type: ignore[no-untyped-def]
    """A row of probation was requested."""
    links, numbers = state.links, state.numbers
    _leave(state, node)
    _enter(state, node, _PROTECTED)
    while numbers[_PROTECTED] > numbers[_MOST_PROTECTED]:
        oldest = np.int64(links[2 * _PROTECTED + 1])
        _leave(state, oldest)
        _enter(state, oldest, _PROBATION)
        if numbers[_PROBATION] > numbers[_MOST_PROBATION] > 0:
            numbers[_OWED] = 1


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    node, ring = slot + _HEADS, np.int64(state.rings[slot])
    if ring != _WINDOW:
        add_requests(state.counters, state.clock, state.names[slot], count)
    if ring == _PROBATION:
        _protect(state, node)
    else:
        cut(state.links, node)
        join(state.links, ring, node)
    if count > 1 and state.rings[slot] == _PROBATION:  # protected holds nothing, so that it came back
        _protect(state, node)
    return True


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    name = name_of(table, id)
    state.names[slot] = name
    _enter(state, slot + _HEADS, _WINDOW)
    add(state.counters, name, count)
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    _leave(state, slot + _HEADS)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_ring(state.links, _HEADS, slots, i)
    prefetch_item(state.names, np.int64(slots[min(i + 2 * _AHEAD, len(slots) - 1)]))
    ask_for_counters(state.counters, state.names[np.int64(slots[min(i + _AHEAD, len(slots) - 1)])])


@njit(forceinline=True)
def _oldest_of_main(links, guard, cursor):  # type: ignore[no-untyped-def]
    """The row of main that would leave: of probation, else of protected; 0 if none may."""
    node = oldest_free(links, _PROBATION, _HEADS, guard, cursor, 1)
    return node if node != 0 else oldest_free(links, _PROTECTED, _HEADS, guard, cursor, 2)


@njit(forceinline=True)
def _wins(state, candidate, other):  # type: ignore[no-untyped-def]
    """Whether the oldest of the window was counted more often than a row of main; it is counted once more."""
    name = state.names[candidate - _HEADS]
    wins = estimate(state.counters, name) > estimate(state.counters, state.names[other - _HEADS])
    add(state.counters, name, 1)
    return wins


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """Candidates move to main while it has room, or slots lent to the window; then one competition decides."""
    links, numbers = state.links, state.numbers
    owed = numbers[_OWED] != 0 and numbers[_PROBATION] > numbers[_MOST_PROBATION]
    numbers[_OWED] = 0
    other = oldest_free(links, _PROBATION, _HEADS, guard, cursor, 1) if owed else np.int64(0)
    if other != 0:
        return _leave(state, other)
    candidate = oldest_free(links, _WINDOW, _HEADS, guard, cursor, 0)
    while candidate != 0:
        if _room_in_main(numbers):
            add(state.counters, state.names[candidate - _HEADS], 1)
        else:
            other = _oldest_of_main(links, guard, cursor)
            if other == 0 or not _wins(state, candidate, other):
                return _leave(state, candidate)
            if numbers[_LENT] == 0:
                _leave(state, other)
                _leave(state, candidate)
                _enter_main(state, candidate)
                return other - _HEADS
            numbers[_LENT] -= 1
        _leave(state, candidate)
        _enter_main(state, candidate)
        candidate = oldest_free(links, _WINDOW, _HEADS, guard, cursor, 0)
    other = _oldest_of_main(links, guard, cursor)
    if other == 0:
        return np.int64(-1)
    numbers[_LENT] += 1
    return _leave(state, other)


@njit(cache=True)
def _move(old, new):  # type: ignore[no-untyped-def]
    """Give `new`, which has the rings of `old`, its numbers and counts, and make the parts of main fit."""
    links, numbers = new.links, new.numbers
    for ring in range(_HEADS):
        numbers[ring] = old.numbers[ring]
        node = np.int64(links[2 * ring + 1])
        while node != ring:
            name = new.names[node - _HEADS]
            add(new.counters, name, estimate(old.counters, name))
            node = np.int64(links[2 * node + 1])
    while numbers[_PROBATION] + numbers[_PROTECTED] > numbers[_MOST_MAIN]:
        ring = _PROBATION if numbers[_PROBATION] > 0 else _PROTECTED
        node = np.int64(links[2 * ring + 1])
        _leave(new, node)
        _enter(new, node, _WINDOW)
    while numbers[_PROTECTED] > numbers[_MOST_PROTECTED]:
        node = np.int64(links[2 * _PROTECTED + 1])
        _leave(new, node)
        _enter(new, node, _PROBATION)
    numbers[_LENT] = min(old.numbers[_LENT], numbers[_MOST_MAIN] - numbers[_PROBATION] - numbers[_PROTECTED])


implement(WTinyLfuState, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
