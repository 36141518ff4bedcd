"""A counting Bloom filter: how often each of many rows was requested, far past the 15 of `tiered_emb.cache.sketch`.

Fan, Cao, Almeida and Broder, "Summary cache: a scalable wide-area web cache sharing protocol", IEEE/ACM Transactions on
Networking 8(3), 2000. A row has eight counters of 16 bits anywhere among 12 for each planned row, and its count is the
least of them; each request raises all eight, up to 65,535.

It is what W-TinyLFU counts with. libCacheSim's has ten counters of 32 bits among 14.4 a row; with eight among 12 the
miss ratios are the same to within 0.003 on the golden traces. With a 4-bit sketch they are up to 0.1 higher: the counts
of most rows come to 15 before they are halved, and of equals the candidate leaves.

Thread: the owner of whatever holds the arrays. Nothing here allocates, `make_counters` excepted.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.intrinsics import prefetch_item

MOST = 65_535
COUNTERS_PER_ROW, HASHES = 12, 8
SEEN, SAMPLE = 0, 1  # of a clock
_FEWEST, _MOST_COUNTERS = 64, 2**32 - 1
_FACTOR, _STEP = 0xD1342543DE82EF95, 0x9E3779B97F4A7C15


def make_counters(rows: int) -> NDArray[np.uint16]:
    """Counters, uint16, all 0, planned for so many rows."""
    counters: NDArray[np.uint16] = zeros(min(max(_FEWEST, COUNTERS_PER_ROW * rows), _MOST_COUNTERS), np.uint16)
    return counters


@njit(forceinline=True)
def _next(x):  # type: ignore[no-untyped-def]
    """A step of a linear congruential generator, whose upper half says the next counter."""
    return x * uint64(_FACTOR) + uint64(_STEP)


@njit(forceinline=True)
def _first(name):  # type: ignore[no-untyped-def]
    """Where the generator starts for a row: a name is mixed well in its upper half only."""
    return _next(name ^ (name >> uint64(32)))


@njit(forceinline=True)
def _counter(counters, x):  # type: ignore[no-untyped-def]
    """A counter's position."""
    return np.int64(((x >> uint64(32)) * uint64(len(counters))) >> uint64(32))


@njit(forceinline=True)
def estimate(counters, name):  # type: ignore[no-untyped-def]
    """How often a row was counted: no less than it was, up to 65,535."""
    least, x = np.int64(MOST), _first(name)
    for _ in range(HASHES):
        least = min(least, np.int64(counters[_counter(counters, x)]))
        x = _next(x)
    return least


@njit(forceinline=True)
def ask_for_counters(counters, name):  # type: ignore[no-untyped-def]
    """Prefetch a row's counters."""
    x = _first(name)
    for _ in range(HASHES):
        prefetch_item(counters, _counter(counters, x))
        x = _next(x)


@njit(forceinline=True)
def add(counters, name, times):  # type: ignore[no-untyped-def]
    """Raise a row's counters by `times`."""
    x = _first(name)
    for _ in range(HASHES):
        i = _counter(counters, x)
        counters[i] = min(np.int64(counters[i]) + times, MOST)
        x = _next(x)


@njit(forceinline=True)
def halve(counters):  # type: ignore[no-untyped-def]
    """Halve every counter."""
    for i in range(len(counters)):
        counters[i] >>= 1


@njit(forceinline=True)
def add_requests(counters, clock, name, times):  # type: ignore[no-untyped-def]
    """A row was requested `times` times, as that many single ones; counters are halved wherever a sample ends.

    Args:
        clock: int64 (2,), the requests seen in this sample, and how many a sample has.
    """
    while times > 0:
        now = min(times, clock[SAMPLE] - clock[SEEN])
        add(counters, name, now)
        clock[SEEN] += now
        times -= now
        if clock[SEEN] >= clock[SAMPLE]:
            halve(counters)
            clock[SEEN] = 0
