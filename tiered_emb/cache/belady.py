"""Belady's optimum: the victim is the row whose next request is farthest away, those never requested again first.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966; Mattson,
Gecsei, Slutz and Traiger ("Evaluation techniques for storage hierarchies", 1970) proved that no policy which admits
every row it misses has fewer misses. It has to know the future, so it is for the laboratory (`tiered_emb.sim`), where
the future is the rest of the trace, and no tier offers it.

The state is made for one trace and follows it: a clock counts requests, and `next_use[clock]` is the position of the
next request for the row that is requested now. A row in a slot is *due* at that position; positions of rows in slots
are all different, because a position is one request. A row that is never requested again is due at N + its slot, after
all others. So the victim is the slot that is due last, and the set of what is due is a set of numbers below N + S.

That set is a tree of bits, 64 to a word: level 0 has a bit a number, a bit of each further level says whether a word
of the one below holds any. Entering, leaving and finding the last one before some number look at one word a level,
four levels for 16 million requests, of which the upper ones stay in the processor's cache.

Batches: rows of a batch are handed over in another order than the trace's, hits first. `reorder` says which. Pins are
respected, so the batch's own rows stay and of the others the one due last leaves; `count` means nothing here.

Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.extending import intrinsic
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy, resized
from tiered_emb.cache.verbs import implement, may_leave

_NEVER = -1
_WORD_BITS = 64


class BeladyState(NamedTuple):
    """See the module's docstring.

    Attributes:
        next_use: int64 (N,), for each request the position of the row's next one, -1 if there is none.
        clock: int64 (1,), requests so far.
        due: int64 (S,), what the row in each slot is due at.
        slot_due: int32 (N,), the slot whose row is due at a position.
        bits: uint64, the levels of the tree one after the other, level 0 first.
        levels: int64 (L,), where each level begins.
    """

    next_use: NDArray[np.int64]
    clock: NDArray[np.int64]
    due: NDArray[np.int64]
    slot_due: NDArray[np.int32]
    bits: NDArray[np.uint64]
    levels: NDArray[np.int64]


class Belady(ArrayPolicy[BeladyState]):
    """Farthest next request first, for the requests of one trace.

    Args:
        capacity_rows: slots.
        next_use: int64 (N,), as `next_uses` gives it.

    A request after the last of the trace raises ValueError.
    """

    bytes_per_slot = 8
    has_ghosts = False

    def __init__(self, capacity_rows: int, next_use: NDArray[np.int64]) -> None:
        self._next_use = next_use
        super().__init__(capacity_rows)

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Not known without the trace: what it needs of it (12 bytes a request and more) is not a tier's to hold."""
        raise AssertionError("Belady is for the laboratory: no budget covers it")

    def make(self, capacity_rows: int) -> BeladyState:
        """An empty order before the first request."""
        requests = len(self._next_use)
        levels, words = _tree_levels(requests + capacity_rows)
        return BeladyState(
            self._next_use.copy(),
            np.zeros(1, np.int64),
            zeros(capacity_rows, np.int64),
            zeros(requests, np.int32),
            zeros(words, np.uint64),
            levels,
        )

    def resized(self, capacity_rows: int) -> BeladyState:
        """The same order of fewer or more slots; the tree is made anew."""
        old, empty = self.state, self.make(capacity_rows)
        state = empty._replace(
            next_use=old.next_use, clock=old.clock, due=resized(old.due, capacity_rows), slot_due=old.slot_due
        )
        _move_bits(old.bits, old.levels, state.bits, state.levels, len(old.next_use) + self.capacity_rows)
        return state

    def grow(self) -> None:
        """Called when there are more requests than the trace has."""
        raise ValueError(f"Belady knows the future of {len(self._next_use)} requests, and these are more")

    def reorder(self, order: NDArray[np.int64]) -> None:
        """The next requests (U,) come in this order of positions behind the clock, a permutation of 0 .. U - 1."""
        start = int(self.state.clock[0])
        ahead = self.state.next_use[start : start + len(order)]
        ahead[:] = ahead[order]


@njit(nogil=True, cache=True)
def next_uses(rows, distinct, next_use):  # type: ignore[no-untyped-def]
    """Write for each request of `rows` (N,), numbers below `distinct`, the position of the next same one, or -1."""
    seen = np.full(distinct, _NEVER, np.int64)
    for i in range(len(rows) - 1, -1, -1):
        next_use[i] = seen[rows[i]]
        seen[rows[i]] = i


def _tree_levels(size: int) -> tuple[NDArray[np.int64], int]:
    """Where the levels of a tree of `size` bits begin, and its words. Each level has a bit to spare, for its end."""
    levels, words = [0], size // _WORD_BITS + 1
    total = words
    while words > 1:
        levels.append(total)
        words = words // _WORD_BITS + 1
        total += words
    return np.array(levels, np.int64), total


@intrinsic
def _leading_zeros(typingctx: Any, word: Any) -> Any:
    """Bits above the highest one of a uint64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@njit(forceinline=True)
def _bit(place):  # type: ignore[no-untyped-def]
    return uint64(1) << uint64(place & 63)


@njit(forceinline=True)
def _highest(word):  # type: ignore[no-untyped-def]
    return 63 - _leading_zeros(word)


@njit(forceinline=True)
def _enter(bits, levels, number):  # type: ignore[no-untyped-def]
    """Take a number into the set."""
    place = number
    for level in range(len(levels)):
        word = levels[level] + (place >> 6)
        was_empty = bits[word] == uint64(0)
        bits[word] |= _bit(place)
        if not was_empty:
            return
        place >>= 6


@njit(forceinline=True)
def _leave(bits, levels, number):  # type: ignore[no-untyped-def]
    """Take a number that is in the set out of it."""
    place = number
    for level in range(len(levels)):
        word = levels[level] + (place >> 6)
        bits[word] &= ~_bit(place)
        if bits[word] != uint64(0):
            return
        place >>= 6


@njit(forceinline=True)
def _last_before(bits, levels, number):  # type: ignore[no-untyped-def]
    """The greatest number of the set below `number`, or -1: up to the first word with any before, down to its last."""
    place = number
    for level in range(len(levels)):
        before = bits[levels[level] + (place >> 6)] & (_bit(place) - uint64(1))
        if before != uint64(0):
            place = (place & ~63) | _highest(before)
            for below in range(level - 1, -1, -1):
                place = (place << 6) | _highest(bits[levels[below] + place])
            return place
        place >>= 6
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _move_bits(bits, levels, to_bits, to_levels, size):  # type: ignore[no-untyped-def]
    """Enter every number of a set of numbers below `size` into another set."""
    number = _last_before(bits, levels, size)
    while number >= 0:
        _enter(to_bits, to_levels, number)
        number = _last_before(bits, levels, number)


@njit(forceinline=True)
def _schedule(state, slot):  # type: ignore[no-untyped-def]
    """The row in a slot is requested now: when it is due next. False behind the end of the trace."""
    now, requests = state.clock[0], len(state.next_use)
    if now >= requests:
        return False
    due = state.next_use[now]
    if due < 0:
        due = requests + slot
    else:
        state.slot_due[due] = slot
    state.due[slot] = due
    _enter(state.bits, state.levels, due)
    state.clock[0] = now + 1
    return True


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    if state.clock[0] >= len(state.next_use):
        return False
    _leave(state.bits, state.levels, state.due[slot])
    return _schedule(state, slot)


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    return _schedule(state, slot)


def _remove(state, slot):  # type: ignore[no-untyped-def]
    _leave(state.bits, state.levels, state.due[slot])


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """Due last and free to leave; cursor[0] is what the one before was due at (never 0: that request is the first)."""
    requests = len(state.next_use)
    due = cursor[0] if cursor[0] != 0 else np.int64(requests + len(state.due))
    while due > 0:
        due = _last_before(state.bits, state.levels, due)
        cursor[0] = due
        if due < 0:
            break
        slot = due - requests if due >= requests else np.int64(state.slot_due[due])
        if may_leave(guard, slot):
            _leave(state.bits, state.levels, due)
            return slot
    return np.int64(-1)


implement(BeladyState, hit=_hit, insert=_insert, remove=_remove, victim=_victim)
