"""TinyLFU's frequency sketch: how often a row was requested lately, whether it is here or not, in a few bytes a slot.

Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage 13(4),
2017. A count-min sketch of 4-bit counters: a row has one counter in each of four rows of counters, shared with others,
and its count is the least of the four. Increments are conservative (Estan and Varghese's minimal increment): a counter
that stands higher than the row's count shows other rows' requests and is not raised. Counts stop at 15. Each time
`sample` requests were counted, all counters are halved, as is the number of requests counted.

Layout, after Caffeine's: the four counters of a row lie in one cache line, a block of eight 64-bit words, two words (32
counters) for each of the four. A block is chosen by the upper half of the row's name, mixed once more, and the counters
by 20 bits of the lower half.

Thread: the owner of whatever holds the arrays. Nothing here allocates, `make_sketch` excepted.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.intrinsics import prefetch_item

MOST = 15
_WORDS, _SLOTS_PER_BLOCK = 8, 8
SEEN, SAMPLE = 0, 1  # of a clock
_MIX = 0xD6E8FEB86659FD93
_LOW, _LOW_3_BITS = 0xFFFFFFFF, 0x7777777777777777


def word_count(capacity_rows: int) -> int:
    """Words of a sketch for so many slots: a block for 8 of them, 8 bytes and 16 counters a slot, as in Caffeine."""
    return _WORDS * -(-capacity_rows // _SLOTS_PER_BLOCK)


def make_sketch(capacity_rows: int, sample: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """An empty sketch: words, uint64 (`word_count`,), and clock, int64 (2,): requests counted, and when to halve."""
    return zeros(word_count(capacity_rows), np.uint64), np.array([0, sample], np.int64)


@njit(forceinline=True)
def _spread(name):  # type: ignore[no-untyped-def]
    """64 bits, all mixed, of a row's name."""
    x = (name ^ (name >> uint64(32))) * uint64(_MIX)
    return x ^ (x >> uint64(32))


@njit(forceinline=True)
def _block(words, mixed):  # type: ignore[no-untyped-def]
    """First word of a row's block."""
    blocks = uint64(len(words) // _WORDS)
    return np.int64(((mixed >> uint64(32)) * blocks) >> uint64(32)) * _WORDS


@njit(forceinline=True)
def _place(block, mixed, row):  # type: ignore[no-untyped-def]
    """The word of a row's counter among the first, second, third or fourth ones, and its lowest bit in there."""
    five_bits = (mixed >> uint64(5 * row)) & uint64(31)
    return block + 2 * row + np.int64(five_bits >> uint64(4)), (five_bits & uint64(15)) << uint64(2)


@njit(forceinline=True)
def _counter(words, block, mixed, row):  # type: ignore[no-untyped-def]
    word, shift = _place(block, mixed, row)
    return np.int64((words[word] >> shift) & uint64(15))


@njit(forceinline=True)
def estimate(words, name):  # type: ignore[no-untyped-def]
    """Requests of a row lately, 0 to 15: never fewer than there were since counters were last halved, up to 15."""
    mixed = _spread(name)
    block = _block(words, mixed)
    return min(
        min(_counter(words, block, mixed, 0), _counter(words, block, mixed, 1)),
        min(_counter(words, block, mixed, 2), _counter(words, block, mixed, 3)),
    )


@njit(forceinline=True)
def ask_for_counters(words, name):  # type: ignore[no-untyped-def]
    """Prefetch a row's counters."""
    prefetch_item(words, _block(words, _spread(name)))


@njit(forceinline=True)
def _raise_to(words, block, mixed, row, count):  # type: ignore[no-untyped-def]
    word, shift = _place(block, mixed, row)
    if np.int64((words[word] >> shift) & uint64(15)) < count:
        words[word] = (words[word] & ~(uint64(15) << shift)) | (uint64(count) << shift)


@njit(forceinline=True)
def _add(words, name, count):  # type: ignore[no-untyped-def]
    goal = min(estimate(words, name) + count, MOST)
    mixed = _spread(name)
    block = _block(words, mixed)
    for row in range(4):
        _raise_to(words, block, mixed, row, goal)


@njit(forceinline=True)
def age(words):  # type: ignore[no-untyped-def]
    """Halve every counter."""
    for i in range(len(words)):
        words[i] = (words[i] >> uint64(1)) & uint64(_LOW_3_BITS)


@njit(forceinline=True)
def increment(words, clock, name, count):  # type: ignore[no-untyped-def]
    """A row was requested `count` times, as that many times once; counters are halved wherever a sample ends."""
    while count > 0:
        now = min(count, clock[SAMPLE] - clock[SEEN])
        _add(words, name, now)
        clock[SEEN] += now
        count -= now
        if clock[SEEN] >= clock[SAMPLE]:
            age(words)
            clock[SEEN] //= 2


@njit(forceinline=True)
def _larger(one, other):  # type: ignore[no-untyped-def]
    """The larger of two counters, for each of the 16 of a word."""
    result = uint64(0)
    for i in range(16):
        mask = uint64(15) << uint64(4 * i)
        result |= max(one & mask, other & mask)
    return result


@njit(nogil=True, cache=True)
def fold(words, clock, to_words, to_clock):  # type: ignore[no-untyped-def]
    """Count on in another sketch, an empty one, of fewer or more blocks.

    Blocks divide the hashes among them in order: each takes over from those whose hashes it gets, every counter the
    largest of theirs. So no row's count is lower afterwards, unless the shorter sample is over and all are halved.
    """
    old, new = len(words) // _WORDS, len(to_words) // _WORDS
    for block in range(new):
        for source in range(block * old // new, -(-(block + 1) * old // new)):
            for i in range(_WORDS):
                at = _WORDS * block + i
                to_words[at] = _larger(to_words[at], words[_WORDS * source + i])
    to_clock[SEEN] = clock[SEEN]
    while to_clock[SEEN] >= to_clock[SAMPLE]:
        age(to_words)
        to_clock[SEEN] //= 2
